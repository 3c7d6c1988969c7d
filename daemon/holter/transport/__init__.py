"""How sidecars and coordinator talk: the messages, and the ways they travel."""
