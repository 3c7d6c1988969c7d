"""Keeps a bad step from being applied: the guard, the agreement between shards, and the rank's part of a halt."""
