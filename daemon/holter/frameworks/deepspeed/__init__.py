"""DeepSpeed, by itself or through accelerate."""
