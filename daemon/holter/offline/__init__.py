"""What a job without holter left behind, turned into the observations that holter would have made, so that the same detectors judge it."""
