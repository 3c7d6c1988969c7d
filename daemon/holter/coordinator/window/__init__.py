"""What the ranks reported, assembled into the window that detectors judge."""
