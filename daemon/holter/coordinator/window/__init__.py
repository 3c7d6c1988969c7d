"""Assembles the ranks' reports into the window that detectors judge."""
