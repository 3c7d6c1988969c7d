"""A training loop of the script's own: plain, DDP, or sharded by DTensors."""
