"""Halting: decide what to do about a diagnosis (verdicts, plan), agree on it (protocol, rank_protocol), and keep what is saved (vault)."""
