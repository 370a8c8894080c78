"""Checks of lab admission: memory decides who joins."""
