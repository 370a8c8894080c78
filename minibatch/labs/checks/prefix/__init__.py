"""Checks of lab prefix: finding a prefix again."""
