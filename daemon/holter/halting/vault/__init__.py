"""Where checkpoints are kept: written beside, verified, named last, never overwritten."""
