"""Ranks that do not go on, died, or call something else than their peers."""
