"""Average tracking: an averaged copy of the weights does not follow them.

What it detects
    A moving average of the weights (EMA) that was logged and that never changes while the live weights do, that is far from the
    live weights and goes further away, that moves away from them log after log, or that is held in a narrow dtype, in which most of its
    elements stay where they are.

Why it matters
    The average is what gets evaluated and released. If it stands still, the training's result is the initialisation.

False positives
    An average that is updated every few steps stands still between: its rest must be far longer than its usual one. One that begins
    late is given twenty steps. A slow average lags behind, by less than the weights' own size, but each of its elements moves, and toward
    them. One that is logged rarely may see the live weights turn round meanwhile: most logs must show it.

What to do
    Look at who calls the update, on which parameters, with which decay (`holter explain average_not_tracking`).
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Spread, Window
from holter.records import Evidence, Finding, Vitals


@dataclass(frozen=True)
class AverageTracking:
    """Judges the distance between the copy and the live weights."""

    name: ClassVar[str] = "average_tracking"

    min_logs: int = threshold(10, at_least=2)  # The first log has no earlier one to differ from.
    """Number of logged steps in a row at which the copy had not changed."""
    min_steps: int = 20
    """Number of steps that these logs must span."""
    times_usual_rest: int = 3
    """A rest must be this many times as long as the longest one before it."""
    away: float = threshold(0.5, above=0, below=1)
    """The cosine between the copy's movement and the way to the live weights must be below minus this: it moves away."""
    stuck: float = threshold(0.5, above=0, below=1)
    """Share of the elements of a narrow copy that an update must move."""
    far: float = 3.0
    """Relative distance that no lag explains."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding."""
        moved, distances = window.values("ema.moved"), dict(window.values("ema.distance"))
        if still := self._still(moved):
            first, last = still
            inside = [distances[step].mean for step in sorted(distances) if first <= step <= last]
            if _is_live_moving(window, inside, first):
                yield _finding(window, first, last, inside, is_still=True)
                return
        for name, is_wrong in (("ema.toward", self._is_away), ("ema.changed", self._is_stuck)):
            run = self._mostly(window, name, is_wrong)
            if run:
                inside = [distances[step].mean for step in sorted(distances) if run[0] <= step <= run[1]]
                yield _finding(window, *run, inside, is_still=False, is_rounded=name == "ema.changed")
                return
        leaving = self._leaving(sorted(distances.items()))
        if leaving:
            steps = [step for step, _ in leaving]
            yield _finding(window, steps[0], steps[-1], [spread.mean for _, spread in leaving], is_still=False)

    def _is_away(self, toward: float, is_narrow: float) -> bool:
        del is_narrow
        return toward < -self.away

    def _is_stuck(self, changed: float, is_narrow: float) -> bool:
        return is_narrow > 0 and changed < self.stuck

    def _mostly(self, window: Window, name: str, is_wrong: Callable[[float, float], bool]) -> tuple[int, int] | None:
        """Return the first and last of the newest logs that show it, if they are long enough."""
        narrow = dict(window.values("ema.is_narrow"))
        found = [
            (step, is_wrong(s.mean, narrow[step].low if step in narrow else 0.0)) for step, s in window.values(name)
        ]
        run = [step for step, _ in itertools.takewhile(lambda one: one[1], reversed(found))]
        is_long = len(run) >= self.min_logs and run[0] - run[-1] >= self.min_steps
        return (run[-1], run[0]) if is_long else None

    def _still(self, moved: list[tuple[int, Spread]]) -> tuple[int, int] | None:
        """Return the first and last step of the first rest that is too long.

        The first log itself has nothing to differ from.
        """
        usual, rest = 0, list[int]()
        for step, spread in moved:
            if spread.high > 0:
                usual, rest = max(usual, len(rest)), []
                continue
            rest.append(step)
            is_long = (
                len(rest) >= max(self.min_logs, self.times_usual_rest * usual) and step - rest[0] >= self.min_steps
            )
            if is_long:
                return rest[0], step
        return None

    def _leaving(self, distances: list[tuple[int, Spread]]) -> list[tuple[int, Spread]]:
        """Return the newest logs, if each is further away than the one before and the last is far."""
        recent = distances[-self.min_logs :]
        means = [spread.mean for _, spread in recent]
        is_growing = all(a < b for a, b in itertools.pairwise(means))
        return recent if len(recent) >= self.min_logs and is_growing and means[-1] > self.far else []


def _is_live_moving(window: Window, distances: list[float], first: int) -> bool:
    """Whether the live weights move: the distance of a copy at rest changes only then."""
    known = [distance for distance in distances if math.isfinite(distance)]
    if known:
        return known[-1] > 0 and known[-1] != known[0]
    return any(m.update_ratio > 0 for note, v in window.notes_of(Vitals) if note.step >= first for m in v.modules)


def _finding(  # noqa: PLR0913 - what was seen, and how
    window: Window, first: int, last: int, distances: list[float], *, is_still: bool, is_rounded: bool = False
) -> Finding:
    what = "has not changed" if is_still else "has moved away from the weights"
    if is_rounded:
        what = "is held in a narrow dtype, in which most of its elements have not moved"
    evidence = [
        Evidence(
            kind="average",
            summary=f"the copy {what} at all logged steps from {first} to {last}",
            values={"first_step": first, "last_step": last},
        )
    ]
    if distances:
        evidence.append(
            Evidence(
                kind="average",
                summary=f"its relative distance from the live weights went from {distances[0]:.3g} to {distances[-1]:.3g}",
                values={"first": distances[0], "last": distances[-1]},
            )
        )
    return Finding(
        detector=AverageTracking.name,
        severity="warning",
        first_step=first,
        detected_step=last,
        ranks=tuple(sorted(window.attached)),
        summary=f"The averaged copy of the weights {what} since step {first}, while the live weights move.",
        facts={
            "is_copy_still": is_still or is_rounded,
            "is_copy_leaving": not is_still and not is_rounded,
            "is_live_moving": True,
        },
        evidence=tuple(evidence),
    )
