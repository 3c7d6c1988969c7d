"""Ranks that should hold the same, and do not."""
