"""What the dtypes did."""
