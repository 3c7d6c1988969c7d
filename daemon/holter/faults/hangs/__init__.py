"""Ranks that stand still, do not call what their peers call, or have ended."""
