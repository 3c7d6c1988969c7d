"""How a step is undone: random states, buffers, counters and snapshots from before it."""
