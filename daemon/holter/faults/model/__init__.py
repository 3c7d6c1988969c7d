"""What the model itself shows: its shape, its first weights, what it computes from too few samples."""
