"""Checks of lab iteration: one iteration at a time."""
