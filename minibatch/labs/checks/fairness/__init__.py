"""Checks of lab fairness: a fair share for every client."""
