"""How what was read leaves the rank: the budget, the log of steps, what is told of each, the page."""
