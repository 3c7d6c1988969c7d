"""One line of the differential."""

from dataclasses import dataclass
from typing import Literal

from holter.records import Basis, Finding


@dataclass(frozen=True)
class Row:
    """One line of the differential."""

    cause: str
    detector: str
    confidence: float
    basis: Basis
    seen: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    names: Literal["culprits", "everyone"] = "culprits"
    """Whom the cause is laid to: the finding's culprits, or every rank that was compared."""
    tensors: Literal["finding", "parameters", "gradients"] = "finding"
    missing: str = ""
    """What would settle it."""

    def fits(self, finding: Finding) -> bool:
        """Whether this row speaks of this finding."""
        facts = finding.facts
        return (
            finding.detector == self.detector
            and all(facts.get(name) is True for name in self.seen)
            and all(facts.get(name) is False for name in self.absent)
            and all(facts.get(name) is None for name in self.unknown)
            and not any(facts.get(name) is True for name in self.unless)
        )
