"""What the coordinator answers on its one port."""
