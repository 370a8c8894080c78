"""Checks of lab paging: blocks, tables, and copies."""
