"""Parts of the model that should not move, and do, or were never right."""
