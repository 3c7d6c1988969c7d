"""Gradient explosion: the gradient norm leaves its own history upward and stays there.

What it detects
    A gradient norm that is, at five of eight steps in a row, ten times its median, eight robust deviations above it on a log scale, and
    three times the highest level that it ever kept; together with a loss that gets worse, or a norm of a hundred times the usual. The
    modules whose own norms grew the most are named.

Why it matters
    A few such steps throw the weights far from where they were. Clipping bounds the length of a step, not its direction.

False positives
    A spike of a few steps that comes back is silent, as are norms that scatter threefold, norms that return to where they were at
    the start, the first twenty steps, a change of the number of micro-batches, and layers unfrozen on purpose, which raise the norm
    but not the loss. A range test of the learning rate breaks the loss on purpose: it is information.

What to do
    Look for what changed at the first step named here: data, schedule, resumed state. Resume from a checkpoint before it.
"""

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, NamedTuple

from holter.faults.shared.range_test import apart_from_tests
from holter.faults.shared.robust import Points, finite, levels, log_score, score
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import listed
from holter.faults.window import Window
from holter.records import Evidence, Finding, Vitals

WIDTH, NEEDED = 8, 5
"""Number of steps in a row, and how many of them must be high: a spike of a few steps comes back."""
MAX_POINTS = 2000
BEYOND_RETURN = 1000.0


class Onset(NamedTuple):
    """Where the norm left its history."""

    place: int
    usual: float
    kept_to: float
    """The highest level that the norm had ever kept for several steps."""
    level: float
    score: float


@dataclass(frozen=True)
class GradientExplosion:
    """Compares the gradient norm with its own history."""

    name: ClassVar[str] = "gradient_explosion"

    min_history: int = threshold(20, at_least=WIDTH)
    """Number of steps before which nothing is judged."""
    deviations: float = 8.0
    factor: float = 10.0
    """The norm must be this many times its median."""
    sure_factor: float = 100.0
    """The same, if the loss gets no worse."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the first onset."""
        yield from apart_from_tests(window, self._judged)

    def _judged(self, window: Window) -> Iterator[Finding]:
        name = "gradient_norm" if window.values("gradient_norm") else "clip.norm"
        norms = [(step, value) for step, value in finite(window.values(name)) if value > 0][-MAX_POINTS:]
        onset = self._onset([value for _, value in norms])
        if onset is None:
            return
        first = norms[onset.place][0]
        suffering = _loss_suffers(window, first)
        if not suffering and onset.level < self.sure_factor * onset.usual:
            return
        if _is_changed_on_purpose(window, first):
            return
        yield _finding(window, name, norms, onset, suffering)

    def _onset(self, norms: Sequence[float]) -> Onset | None:
        past = sorted(norms[: self.min_history])
        kept_to, num_seen = 0.0, 0
        for i in range(self.min_history, len(norms) - NEEDED + 1):
            usual = past[len(past) // 2]
            if norms[i] > self.factor * usual:
                kept_to, num_seen = max(kept_to, *levels(norms[num_seen:i], WIDTH)), i - WIDTH + 1
                level = sorted(norms[i : i + WIDTH], reverse=True)[NEEDED - 1]
                far = log_score(level, norms[:i]) if level > max(self.factor * usual, 3 * kept_to) else 0.0
                if far >= self.deviations:
                    return Onset(i, usual, kept_to, level, far)
            insort(past, norms[i])
        return None


def _loss_suffers(window: Window, first: int) -> tuple[float, float] | None:
    """Return (usual, now) of a loss that left its history together with the norm; None if it did not.

    A loss that is not finite has left it, too.
    """
    losses = window.values("loss")
    past = [value for step, value in finite(losses) if step < first][-100:]
    after = [math.inf if spread.num_nonfinite else spread.mean for step, spread in losses if step >= first][:20]
    if len(past) < WIDTH or len(after) < NEEDED:
        return None
    level, top = sorted(after, reverse=True)[NEEDED - 1], max(levels(past, WIDTH))
    return (median(past), level) if score(level, past) > 5 and level > top + 0.2 * abs(top) else None  # noqa: PLR2004 - clear of noise


def _is_changed_on_purpose(window: Window, first: int) -> bool:
    """Whether other micro-batches, or other trained tensors, began at just that step: then another norm is no fault."""
    near = range(first - 2, first + WIDTH)
    if any(change.what in {"requires_grad", "new", "gone"} and change.step in near for change in window.models.changes):
        return True
    counts = finite(window.values("micro_steps"))
    past = [value for step, value in counts if step < first][-20:]
    now = [value for step, value in counts if step >= first][:WIDTH]
    return bool(past and now) and median(past) != median(now)


def _grown(window: Window, first: int) -> list[tuple[str, float, float]]:
    """Return (module, usual norm, norm since) of the modules whose norm grew tenfold, the largest growth first."""
    before: dict[str, list[float]] = {}
    since: dict[str, list[float]] = {}
    for note, vitals in window.notes_of(Vitals):
        side = before if note.step < first else since
        for module in vitals.modules:
            if math.isfinite(module.gradient_norm):
                side.setdefault(module.module, []).append(module.gradient_norm)
    rows = [(name, median(values), median(since[name])) for name, values in before.items() if name in since]
    grown = [row for row in rows if 0 < 10 * row[1] < row[2]]
    return sorted(grown, key=lambda row: row[1] / row[2])


def _finding(window: Window, name: str, norms: Points, onset: Onset, suffering: tuple[float, float] | None) -> Finding:
    first, grown = norms[onset.place][0], _grown(window, norms[onset.place][0])
    is_lost = bool(suffering and suffering[1] > BEYOND_RETURN * abs(suffering[0]))
    modules = tuple(module for module, _, _ in grown[:8])
    return Finding(
        detector=GradientExplosion.name,
        severity="critical" if is_lost else "warning",
        first_step=first,
        detected_step=norms[min(onset.place + NEEDED - 1, len(norms) - 1)][0],
        ranks=tuple(sorted(window.attached)),
        modules=modules,
        summary=f"The gradient norm left its history at step {first}: {onset.level:.3g} for several steps against {onset.usual:.3g} usually.",
        facts={
            "has_loss_reaction": suffering is not None,
            "has_modules": bool(modules) if any(True for _ in window.notes_of(Vitals)) else None,
            "is_beyond_return": is_lost,
            "came_back": _came_back(norms, onset),
            "series": [name, "loss", "learning_rate"],
        },
        evidence=tuple(_evidence(first, onset, suffering, grown)),
    )


def _came_back(norms: Points, onset: Onset) -> bool | None:
    """Whether the last steps are within the history again; None if it is too early to say."""
    after = [value for _, value in norms[onset.place + WIDTH :]]
    return median(after[-WIDTH:]) < 2 * onset.kept_to if len(after) >= WIDTH else None


def _evidence(
    first: int, onset: Onset, suffering: tuple[float, float] | None, grown: list[tuple[str, float, float]]
) -> Iterator[Evidence]:
    yield Evidence(
        kind="trend",
        summary=f"gradient norm: median {onset.usual:.3g} in {onset.place} steps before step {first}, never above {onset.kept_to:.3g} for long, "
        f"then {onset.level:.3g} at {NEEDED} of {WIDTH} steps, {onset.score:.0f} robust deviations above",
        values={"usual": onset.usual, "kept_to": onset.kept_to, "level": onset.level, "deviations": onset.score},
    )
    if suffering:
        usual, now = suffering
        yield Evidence(
            kind="trend",
            summary=f"the loss went with it: {usual:.3g} before, {now:.3g} since"
            if math.isfinite(now)
            else f"the loss went with it: {usual:.3g} before, NaN or Inf since",
            values={"usual": usual, "now": now if math.isfinite(now) else None},
        )
    if grown:
        shown = listed(f"{name} from {usual:.3g} to {now:.3g}" for name, usual, now in grown[:5])
        yield Evidence(kind="modules", summary=f"modules whose own norm grew the most: {shown}")
