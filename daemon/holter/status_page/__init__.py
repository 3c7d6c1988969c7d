"""The status page for people without Grafana: its files, and the stream of events that keeps it up to date."""
