"""Checks of lab static: static batches and their waste."""
