"""How what was read leaves the rank: the step log, the budget, the page."""
