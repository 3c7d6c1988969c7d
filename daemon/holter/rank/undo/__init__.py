"""Undoes a step: keeps random states, buffers, counters and snapshots from before it, and puts them back."""
