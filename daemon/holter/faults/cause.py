"""A cause that can be named: how it is recognised, what it does, and what to do about it.

The slugs are public. Each entry is also a page (`holter explain nonfinite_input`), so it is written for somebody who was just woken
and has no code at hand. `CAUSES` of a family's `causes.py` lists the family's entries.
"""

from dataclasses import dataclass
from typing import Literal

from holter.records import Basis, Finding, Fix


@dataclass(frozen=True)
class Row:
    """One line of the differential: if the facts are so, this detector's finding has the entry's cause, with this confidence and on this basis.

    A fact is True (seen), False (looked for and not seen) or None (nobody looked).
    """

    detector: str
    confidence: float
    basis: Basis
    seen: tuple[str, ...] = ()
    """Facts that must be True."""
    absent: tuple[str, ...] = ()
    """Facts that must be False."""
    unknown: tuple[str, ...] = ()
    """Facts that must be None."""
    unless: tuple[str, ...] = ()
    """Facts of which none may be True."""
    names: Literal["culprits", "everyone"] = "culprits"
    """Which ranks the cause names: the finding's culprits, or every rank that was compared."""
    tensors: Literal["finding", "parameters", "gradients"] = "finding"
    """Which tensors the cause names: the finding's own, or the parameters or gradients that differ."""
    missing: str = ""
    """The evidence that would settle it; needed where the confidence is below 0.70."""

    def fits(self, finding: Finding) -> bool:
        """Whether this row fits this finding."""
        facts = finding.facts
        return (
            finding.detector == self.detector
            and all(facts.get(name) is True for name in self.seen)
            and all(facts.get(name) is False for name in self.absent)
            and all(facts.get(name) is None for name in self.unknown)
            and not any(facts.get(name) is True for name in self.unless)
        )


@dataclass(frozen=True)
class Damage:
    """What a cause does to weights and optimizer state, and so to a checkpoint that holds them."""

    begins: Literal["with the step", "before the step"]
    """Whether the state before the step at which it was found is still good."""
    verdict: Literal["poisoned", "unknown"]
    """`unknown`: ranks disagree, and nobody knows whose numbers are right."""
    why: str
    """The start of a sentence that goes on with the step."""


@dataclass(frozen=True, kw_only=True)
class CauseEntry:
    """One cause, and everything that is declared about it."""

    cause: str
    """Its slug."""
    happened: str
    """One sentence."""
    mechanism: str
    """How it comes about."""
    would_refute: str
    """One sentence: which observation would disprove it."""
    refuting_fact: str
    """The fact that tells whether that observation was made."""
    is_refuted_by: bool
    """The value of that fact which refutes."""
    rows: tuple[Row, ...]
    """How it is recognised. Of the rows that fit a finding, the surest counts."""
    fix: Fix
    damage: Damage | None = None
    """What it does to a checkpoint; None: a slow rank, a plateau or a dead peer spoils no number."""
    is_hang: bool = False
    """Ranks wait for each other: it is over when they move on, and no rank reaches an agreed step meanwhile."""
    is_death: bool = False
    """A process ended by itself: the survivors wait for it."""
    passes_after_steps: int | None = None
    """It leaves nothing behind, and is over after so many steps without it; None: it stays until the run ends."""
    is_measured_against_the_past: bool = False
    """It can be missing only because its beginning was forgotten: it passes only while the step at which it began is remembered."""
