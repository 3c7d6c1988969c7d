"""The model itself."""
