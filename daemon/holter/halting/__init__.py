"""Halting decides what to do about a diagnosis (decide, plan), agrees on it (protocol, rank_protocol), and keeps what is saved (vault)."""
