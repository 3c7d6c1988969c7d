"""In the rank: what is observed, when, and how it reaches the shared page. Never raises, never blocks, never changes a number."""
