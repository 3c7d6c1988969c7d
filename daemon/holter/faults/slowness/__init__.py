"""Ranks that the others wait for."""
