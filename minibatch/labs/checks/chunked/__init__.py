"""Checks of lab chunked: a token budget."""
