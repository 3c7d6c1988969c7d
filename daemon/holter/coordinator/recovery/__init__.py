"""The journal, and what is read from it: after a restart, for a replay, of a run that is over."""
