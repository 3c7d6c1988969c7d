"""What only the script knows: reinforcement learning and generative models."""
