"""Ranks that should be equal and are not."""
