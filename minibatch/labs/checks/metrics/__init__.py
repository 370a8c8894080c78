"""Checks of lab metrics: latency from events."""
