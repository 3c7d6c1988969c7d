"""The coordinator's part in a halt, and what is thought of the run's checkpoints."""
