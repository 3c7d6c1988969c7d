"""The default transport: records over a WebSocket on the coordinator's only port."""
