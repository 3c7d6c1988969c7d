"""What keeps a step from being applied: the guard, the agreement between shards, the rank's part of a halt."""
