"""Declared frozen: a component that the settings declare frozen is trained.

What it detects
    Parameters whose names match a pattern that the user declared frozen, that require gradients, and that an optimizer holds.

Why it matters
    A reference model, an encoder or a base model that was meant to stay as it is drifts away with every step, and the loss looks better
    for it.

False positives
    None without a declaration: nothing is guessed from names. A layer that is unfrozen on purpose later must not be declared frozen.

What to do
    Freeze the named parameters (`requires_grad_(False)`) before the optimizer is built, or correct the declaration.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from holter.faults.shared.structure import distinct_censuses
from holter.faults.shared.wording import modules_of, named, ranks_text
from holter.faults.window import Window
from holter.records import Census, Evidence, Finding


@dataclass(frozen=True)
class DeclaredFrozen:
    """Compares the census with what was declared frozen."""

    name: ClassVar[str] = "declared_frozen"

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding, for all ranks on which something declared frozen is trained."""
        if not any(census.declared_frozen for census in distinct_censuses(window)):
            return
        holders: dict[int, list[int]] = {}
        for rank, census in sorted(window.models.census.items()):
            holders.setdefault(id(census), []).append(rank)
        found: dict[str, str] = {}
        ranks: list[int] = []
        for group in holders.values():
            trained = _trained(window.models.census[group[0]])
            if trained:
                found.update(trained)
                ranks.extend(group)
        if found:
            yield _finding(window, found, tuple(sorted(ranks)))


def _trained(census: Census) -> dict[str, str]:
    """Return the pattern that declares it frozen, for each parameter that is trained nevertheless, by name."""
    return {
        entry.name: pattern
        for pattern in census.declared_frozen
        for entry in census.entries
        if entry.requires_grad and entry.optimizer >= 0 and _matches(entry.name, pattern)
    }


def _matches(name: str, pattern: str) -> bool:
    """Whether the pattern matches; `encoder` stands for everything in it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _finding(window: Window, found: dict[str, str], ranks: tuple[int, ...]) -> Finding:
    tensors = tuple(found)
    changes = [c for c in window.models.changes if c.name in found and c.what == "requires_grad" and c.after == "True"]
    step = min((change.step for change in changes), default=0)
    patterns = tuple(dict.fromkeys(found.values()))
    return Finding(
        detector=DeclaredFrozen.name,
        severity="warning",
        first_step=step,
        detected_step=max((view.step for view in window.steps), default=step),
        ranks=ranks,
        tensors=tensors,
        modules=modules_of(tensors),
        summary=f"{len(tensors)} parameters that are declared frozen ({named(patterns)}) are trained on {ranks_text(ranks)}.",
        facts={"is_held_by_optimizer": True, "was_unfrozen_later": bool(changes)},
        evidence=(
            Evidence(
                kind="census",
                summary=f"declared frozen by {named(patterns)}; require gradients and are held by an optimizer: {named(tensors)}",
                values={"patterns": list(patterns), "num": len(tensors)},
            ),
        ),
    )
