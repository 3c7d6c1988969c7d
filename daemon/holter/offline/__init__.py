"""What a job that never ran holter left behind, as the observations that holter would have made: judged by the same detectors."""
