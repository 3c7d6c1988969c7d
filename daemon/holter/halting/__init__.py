"""Halting decides what to do about a diagnosis; carrying it out comes later, in files of its own."""

from holter.halting.policy import decide

__all__ = ["decide"]
