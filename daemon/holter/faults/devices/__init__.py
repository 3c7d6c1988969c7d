"""Accelerators and hosts that fail: their drivers' faults, their memory, their links, their clocks."""
