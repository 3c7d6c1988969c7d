"""Ranks that the others wait for. Lateness itself breaks nothing, so that nothing follows from it."""
