"""The coordinator's part in a halt, and the verdicts on the run's checkpoints."""
