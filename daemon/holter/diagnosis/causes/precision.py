"""Precision and dtype."""

from holter.diagnosis.causes.entry import CauseEntry

CAUSES: tuple[CauseEntry, ...] = ()
