"""Ranks that the others wait for. Being late breaks nothing itself, so nothing follows from it."""
