"""Records over a WebSocket on the coordinator's one port: the default."""
