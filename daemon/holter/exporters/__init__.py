"""Exports to other systems: metrics rendered on request from the last state, and incidents as alerts, messages and events."""
