"""The coordinator's HTTP server, on its only port."""
