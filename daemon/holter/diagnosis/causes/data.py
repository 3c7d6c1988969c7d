"""What the ranks are fed."""

from holter.diagnosis.causes.entry import CauseEntry

CAUSES: tuple[CauseEntry, ...] = ()
