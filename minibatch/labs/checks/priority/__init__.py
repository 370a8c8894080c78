"""Checks of lab priority: who is next."""
