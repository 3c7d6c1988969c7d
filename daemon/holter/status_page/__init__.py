"""The page for people with no Grafana: its files, and the stream that keeps it up to date."""
