"""Halting decides what to do about a diagnosis (policy, plan), agrees on it (protocol, rank_protocol), and keeps what is saved (vault)."""

from holter.halting.decide import decide

__all__ = ["decide"]
