"""Checks of lab cost: how long an iteration takes."""
