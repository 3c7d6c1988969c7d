"""Frozen movement: the content of a frozen tensor changed over time.

What it detects
    Frozen parameters that an optimizer's own step changed, at two checks or more: a decay, a momentum or a stale gradient works on them
    although they require no gradient. Frozen parameters that changed once outside of any step, after they had been still. And those that
    are multiplied by a factor again and again, whoever does it.

Why it matters
    What is frozen is taken for fixed: a reference model, an encoder whose features are cached, a base under an adapter. When it moves, what
    was computed from it no longer fits, and an adapter saved alone is worthless.

False positives
    Averages and momentum encoders move all the time, target networks are copied from the live one: neither is reported. An average that
    begins to move only after a while keeps moving: one change that is followed by rest is reported, lasting movement only if it is nothing
    but a factor, which an average is not. A tensor that moves in a step is reported only if an optimizer holds it.

What to do
    Give the optimizer only what trains (`[p for p in model.parameters() if p.requires_grad]`), and build it after freezing; or look for
    what writes to the named tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from holter.faults.shared.structure import common_module
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import named
from holter.faults.window import Note, Window
from holter.records import Evidence, Finding, Vitals

Seen = tuple[Note, Vitals]


@dataclass(frozen=True)
class FrozenMovement:
    """Judges the ranks' reports about frozen tensors."""

    name: ClassVar[str] = "frozen_movement"

    min_steps: int = threshold(2, at_least=1)
    """Number of checked steps in which an optimizer must have moved what is frozen."""
    still_checks: int = 4
    """Number of checks in a row in which a tensor must have been still before a change outside of a step counts."""
    long_still_checks: int = 8
    """The same if it changes again and again from then on: an average or a target moves from the start."""
    rest_checks: int = 2
    """Number of checks to wait for after such a change."""
    scaled_checks: int = threshold(3, at_least=2)
    """Number of checks in which it must have been multiplied by a factor."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding; changes by an optimizer come first."""
        vitals = list(window.notes_of(Vitals))
        inside = [(note, seen) for note, seen in vitals if _held(window, note, seen)]
        if len({note.step for note, _ in inside}) >= self.min_steps:
            names = tuple(dict.fromkeys(name for note, seen in inside for name in _held(window, note, seen)))
            yield _finding(window, inside, names, is_in_step=True)
            return
        scaled = [(note, seen) for note, seen in vitals if seen.frozen_scaled.count]
        always = set.intersection(*(set(seen.frozen_scaled.names) for _, seen in scaled)) if scaled else set()
        if always and len({note.step for note, _ in scaled}) >= self.scaled_checks:
            found = _finding(window, scaled, tuple(sorted(always)), is_in_step=False, is_scaled=True)
            yield msgspec.structs.replace(
                found, detected_step=sorted({note.step for note, _ in scaled})[self.scaled_checks - 1]
            )
            return
        between = [(note, seen) for note, seen in vitals if seen.frozen_moved_between.count]
        if between and self._is_event(vitals, between):
            names = tuple(dict.fromkeys(name for _, seen in between for name in seen.frozen_moved_between.names))
            yield _finding(window, between, names, is_in_step=False)

    def _is_event(self, vitals: list[Seen], between: list[Seen]) -> bool:
        """Whether a change is an event: one after a long rest and followed by rest, or several after a longer rest."""
        first = min(note.step for note, _ in between)
        onset = [seen for note, seen in between if note.step == first]
        later = [seen for note, seen in between if note.step > first]
        names = {name for seen in onset for name in seen.frozen_moved_between.names}
        still = min(seen.frozen_still_checks for seen in onset)
        num_after = len({note.step for note, _ in vitals if note.step > first})
        if later and any(not names.issuperset(seen.frozen_moved_between.names) for seen in later):
            return False
        return still >= (self.long_still_checks if later else self.still_checks) and num_after >= self.rest_checks


def _held(window: Window, note: Note, seen: Vitals) -> tuple[str, ...]:
    """Return the tensors moved in a step that an optimizer holds; it cannot have moved others."""
    if not seen.frozen_moved_in_step.count:
        return ()
    census = window.models.census.get(note.rank)
    held = {entry.name for entry in census.entries if entry.optimizer >= 0} if census else set()
    return tuple(name for name in seen.frozen_moved_in_step.names if name in held)


def _finding(
    window: Window, seen: list[Seen], names: tuple[str, ...], *, is_in_step: bool, is_scaled: bool = False
) -> Finding:
    first = min(note.step for note, _ in seen)
    ranks = tuple(sorted({note.rank for note, _ in seen}))
    how = "by an optimizer's step" if is_in_step else "outside of any optimizer's step"
    if is_scaled:
        how = "by a factor, again and again, outside of any optimizer's step"
    counts = [(seen.frozen_moved_in_step if is_in_step else seen.frozen_moved_between).count for _, seen in seen]
    is_replicated = any(census.is_replicated for census in window.models.census.values())
    return Finding(
        detector=FrozenMovement.name,
        severity="warning",
        first_step=first,
        detected_step=first,
        # Ranks take turns in looking, so a rank that did not look may be affected too.
        ranks=tuple(sorted(window.attached)) if is_in_step and is_replicated else ranks,
        tensors=names,
        modules=common_module(names),
        summary=f"{max(counts)} frozen parameters were changed {how}, first seen at step {first}: {named(names)}.",
        facts={
            "is_moved_in_step": is_in_step,
            "is_held_by_optimizer": is_in_step,
            "was_still_before": not is_in_step and not is_scaled,
            "is_scaled": is_scaled,
            "compared_ranks": list(ranks),
        },
        evidence=tuple(
            Evidence(
                kind="history",
                summary=f"rank {note.rank}, step {note.step}: frozen and changed {how}: {named(names)}",
                values={"rank": note.rank, "step": note.step},
            )
            for note, _ in seen[:3]
        ),
    )
