"""Checks of lab preemption: giving way."""
