"""Checks of lab ragged: one sequence for all requests, and the mask of a chunk."""
