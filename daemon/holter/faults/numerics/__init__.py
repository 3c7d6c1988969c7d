"""Numbers that are not numbers, and losses that go wrong."""
