"""Components that should not move, and do, or were never right."""

from holter.diagnosis.causes.entry import CauseEntry

CAUSES: tuple[CauseEntry, ...] = ()
