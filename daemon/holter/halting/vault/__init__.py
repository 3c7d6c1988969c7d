"""Storage of checkpoints: written under a temporary name, verified, renamed last, never overwritten."""
