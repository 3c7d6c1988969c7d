"""The journal, and what is made from it: recovery after a restart, replays, and pages of finished runs."""
