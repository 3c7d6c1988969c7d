"""One line of the catalogue."""

from dataclasses import dataclass

from holter.records import Fix


@dataclass(frozen=True)
class CauseEntry:
    """One cause, as everyone names it."""

    cause: str
    happened: str
    """One sentence."""
    mechanism: str
    would_refute: str
    """One sentence: which observation would disprove it."""
    refuting_fact: str
    """The fact that tells whether that observation was made."""
    is_refuted_by: bool
    """The value of that fact which refutes."""
    fix: Fix
