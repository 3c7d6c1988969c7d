"""NaN and Inf, and losses, gradients and learning rates that leave their course."""
