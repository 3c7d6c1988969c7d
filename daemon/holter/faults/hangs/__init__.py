"""Ranks that do not go on, do not call what their peers call, or are no more."""
