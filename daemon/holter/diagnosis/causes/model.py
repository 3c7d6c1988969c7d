"""The model itself."""

from holter.diagnosis.causes.entry import CauseEntry

CAUSES: tuple[CauseEntry, ...] = ()
