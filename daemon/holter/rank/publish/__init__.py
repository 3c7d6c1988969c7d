"""How readings leave the rank: the budget, the log of steps, and what is reported of each step to the page."""
