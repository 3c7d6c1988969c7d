"""What only the script knows, and logs."""
