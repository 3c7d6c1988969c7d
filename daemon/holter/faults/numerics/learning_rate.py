"""Learning rate: it jumped, or is too large all along, and made gradients and loss leave their history.

What it detects
    A learning rate that rises threefold or more within one step, above everything seen before, and within the next steps a loss or a
    gradient norm that leaves its history upward, while both were ordinary at the step of the jump itself: that step's forward pass
    still used the old weights. After a tenfold rise one loss is enough that is no number, at the very next step, of inputs that are.
    Without a jump: a loss that rises and stays, or grows a thousandfold at once, while steps change most
    modules by a tenth of themselves; and a loss that the first steps of a run, as large as that, left worse than it was, and that has
    not become better than it was since.

Why it matters
    A wrong line in a schedule destroys in a few steps what days of training reached, and the loss shows it only afterwards.

False positives
    Warm-up rises by small factors. A cosine with restarts and a plateau scheduler return to a rate that was there before. A jump that
    leads to nothing, or to a loss that falls, is silent. Layers unfrozen, or another model trained, at the same step change the norm
    at that very step, and are told apart by it. A range test, in which the rate rises by the same factor at every step over three
    decades, is information.

What to do
    Stop, correct the schedule, resume from a checkpoint that is older than the jump.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar, NamedTuple

from holter.faults.shared.range_test import apart_from_tests
from holter.faults.shared.robust import Points, Rise, deviation, find_rise, finite, is_surrogate, log_score, score
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Note, Window
from holter.records import Evidence, Finding, Severity, Vitals

HISTORY = 100
"""Number of steps before the jump that are looked at."""
NUM_CHECKS = 8
"""Number of the last checks over which a step's size is judged."""
BEYOND_RETURN = 1000.0
AT_ONCE = 10.0
"""A jump must be by this factor for a single non-finite loss to count, because a halt leaves no second one."""
MOST = 0.5
"""Share of the modules that is most of them."""
FIRST_STEPS = 8
"""Number of steps in which a rate that is too high from the start makes its largest updates."""
WORSE, NEARLY_ALL, BETTER = 1.1, 0.85, 0.9
"""A loss that the first steps left a tenth above its beginning, nearly all of them, and that has not come to a tenth
below it since."""
FAR_UP, NO_BETTER = 3.0, 0.95
"""A loss that was this many times its first value in the first steps, and is still no better than it after three times
as many steps."""
MIN_BLOW_UP = 8
"""Number of steps of a loss that grew a thousandfold."""


class Jump(NamedTuple):
    """A step at which the rate goes above everything before it."""

    step: int
    before: float
    rate: float


class Reaction(NamedTuple):
    """What a number did after the jump; a value that is not finite counts as infinite."""

    name: str
    usual: float
    highest: float
    """Its highest value before the jump."""
    worst: float
    num_far: int
    """Number of the next ten values that are far above the history."""
    num_above: int
    """Number of the next twenty values that are above everything in the history."""
    num_huge: int
    """Number of the next ten values that are ten times everything in the history, or not finite."""
    is_worse: bool
    is_at_once: bool
    """Whether the first value after the jump is not finite."""
    last_step: int


@dataclass(frozen=True)
class LearningRate:
    """Judges jumps of the learning rate by what follows, and a diverging loss by the size of its steps."""

    name: ClassVar[str] = "learning_rate"

    factor: float = threshold(3.0, above=1)
    """A rise by less than this factor within a step is part of a schedule."""
    min_history: int = 10
    """Number of steps with a learning rate above zero before the jump."""
    deviations: float = 5.0
    """Deviations by which a number must leave its history."""
    large_update: float = 0.1
    """A step that changes a module by more than this share of its norm is too large."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the first jump that had consequences, or else steps that are too large."""
        yield from apart_from_tests(window, self._judged)

    def _judged(self, window: Window) -> Iterator[Finding]:
        for jump in self._jumps(finite(window.values("learning_rate"))):
            reactions = [
                reaction
                for name in ("gradient_norm", "loss")
                if (reaction := self._reaction(window, name, jump)) is not None
            ]
            if _is_consequence(reactions) or _is_at_once(window, jump, reactions):
                yield _of_jump(window, jump, reactions)
                return
        vitals = list(window.notes_of(Vitals))
        share, largest = _large_updates(vitals[-NUM_CHECKS:], self.large_update)
        at_first = _large_updates([seen for seen in vitals if seen[0].step < FIRST_STEPS], self.large_update)
        # Checked first, because it costs less than the trend.
        if max(share, at_first[0]) <= MOST:
            return
        losses = finite(window.values("loss"))
        rise = find_rise(losses) or _blow_up(losses) if share > MOST else None
        if rise is None and at_first[0] > MOST:
            rise, (share, largest) = _no_better(losses), at_first
        if rise is not None and not is_surrogate(window, losses, rise):
            yield _of_size(window, rise, share, largest)

    def _jumps(self, rates: Points) -> Iterator[Jump]:
        highest, num_before, last = 0.0, 0, 0.0
        for step, rate in rates:
            is_beyond = rate >= self.factor * highest and rate >= self.factor * last
            if num_before >= self.min_history and is_beyond:
                yield Jump(step, last, rate)
            highest, last = max(highest, rate), rate
            num_before += rate > 0

    def _reaction(self, window: Window, name: str, jump: Jump) -> Reaction | None:
        """Return what a number did after the jump; None if its history is too short, or it had left it at the jump already."""
        points = [(step, math.inf if s.num_nonfinite else s.mean) for step, s in window.values(name)]
        past = [value for step, value in points if step < jump.step and math.isfinite(value)][-HISTORY:]
        after = [(step, value) for step, value in points if step > jump.step][:20]
        is_norm = name == "gradient_norm"
        if is_norm:
            past = [value for value in past if value > 0]
        if len(past) < self.min_history or not after:
            return None
        top, at_jump = max(past), next((value for step, value in points if step == jump.step), median(past))
        if at_jump > top + 3 * max(deviation(past), 0.1 * abs(top)):
            return None
        margin = top + (0.5 if is_norm else 0.1) * abs(top)
        after = _until_foreign_nan(after, margin)
        if not after:
            return None
        of = log_score if is_norm else score
        near = [value for _, value in after[:10]]
        recent = past[-20:]
        return Reaction(
            name=name,
            usual=median(recent),
            highest=top,
            worst=max(value for _, value in after),
            num_far=sum(value > margin and of(value, past) >= self.deviations for value in near),
            num_above=sum(value > top for _, value in after) if len(past) >= 20 else 0,  # noqa: PLR2004 - a maximum needs many
            num_huge=sum(value > 10 * abs(top) for value in near),
            is_worse=median(value for _, value in after) >= median(recent),
            is_at_once=math.isinf(after[0][1]) and after[0][0] == jump.step + 1,
            last_step=after[-1][0],
        )


def _until_foreign_nan(after: Points, margin: float) -> Points:
    """Cut off at a NaN that came out of ordinary values: a bad batch some steps after a jump is not the jump's fault."""
    first = next((i for i, (_, value) in enumerate(after) if math.isinf(value)), None)
    is_own = not first or any(value > margin for _, value in after[:first])
    return after if is_own else after[:first]


def _is_consequence(reactions: list[Reaction]) -> bool:
    """Whether the loss left its history, or the norm did while the loss is no better, or either exceeds all bounds."""
    of = {reaction.name: reaction for reaction in reactions}
    norm, loss = of.get("gradient_norm"), of.get("loss")
    if loss and (loss.num_far >= 3 or loss.num_above >= 8 or loss.num_huge >= 2):  # noqa: PLR2004 - several, not one
        return True
    if norm is None:
        return False
    return norm.num_huge >= 3 or (norm.num_far >= 3 and loss is not None and loss.is_worse)  # noqa: PLR2004 - as above


def _is_at_once(window: Window, jump: Jump, reactions: list[Reaction]) -> bool:
    """Whether the first loss of the new weights is not finite although its batch was."""
    is_lost = any(reaction.is_at_once for reaction in reactions if reaction.name == "loss")
    inputs = (
        entry for view in window.steps if view.step > jump.step for _, entry in view.nonfinite if entry.where == "input"
    )
    return is_lost and jump.rate >= AT_ONCE * jump.before > 0 and not any(inputs)


def _of_jump(window: Window, jump: Jump, reactions: list[Reaction]) -> Finding:
    worst = max(reactions, key=lambda reaction: (reaction.num_huge, reaction.num_far, reaction.num_above))
    loss = next((reaction for reaction in reactions if reaction.name == "loss"), None)
    is_lost = any(math.isinf(reaction.worst) for reaction in reactions) or bool(
        loss and loss.worst > BEYOND_RETURN * abs(loss.highest)
    )
    before = f"{jump.before:.3g}" if jump.before else "0"
    times = f", {jump.rate / jump.before:.3g} times as much" if jump.before else ""
    return Finding(
        detector=LearningRate.name,
        severity="critical" if is_lost else "warning",
        first_step=jump.step,
        detected_step=max(reaction.last_step for reaction in reactions),
        ranks=tuple(sorted(window.attached)),
        summary=f"The learning rate went from {before} to {jump.rate:.3g} at step {jump.step}{times}, and "
        f"{_word(worst.name)} left its history: {_number(worst.worst)} against {worst.usual:.3g} before.",
        facts=_facts(has_jump=True, has_loss=bool(loss and (loss.num_far or loss.num_above)), is_lost=is_lost),
        evidence=(
            Evidence(
                kind="schedule",
                summary=f"learning rate {before} before step {jump.step}, {jump.rate:.3g} at it{times}; it had never been that high",
                values={"step": jump.step, "before": jump.before, "after": jump.rate},
            ),
            *(_reaction_evidence(jump, reaction) for reaction in reactions),
        ),
    )


def _reaction_evidence(jump: Jump, reaction: Reaction) -> Evidence:
    return Evidence(
        kind="trend",
        summary=f"{_word(reaction.name)}: usually {reaction.usual:.3g}, at most {reaction.highest:.3g} before step {jump.step}, ordinary at it, "
        f"and up to {_number(reaction.worst)} by step {reaction.last_step}",
        values={
            "name": reaction.name,
            "usual": reaction.usual,
            "highest_before": reaction.highest,
            "worst": reaction.worst if math.isfinite(reaction.worst) else None,
            "num_far": reaction.num_far,
        },
    )


def _large_updates(seen: Sequence[tuple[Note, Vitals]], limit: float) -> tuple[float, float]:
    """Return the share of modules whose steps at these checks are too large, and the largest step."""
    ratios: dict[str, list[float]] = {}
    for _, vitals in seen:
        for module in vitals.modules:
            if math.isfinite(module.update_ratio) and module.learning_rate > 0:
                ratios.setdefault(module.module, []).append(module.update_ratio)
    levels = [median(values) for values in ratios.values()]
    return (sum(level > limit for level in levels) / len(levels), max(levels)) if levels else (0.0, 0.0)


def _blow_up(losses: Points) -> Rise | None:
    """Return the rise of a loss that grew a thousandfold from its start and never came back.

    It is too fast for a trend, and soon not finite.
    """
    if len(losses) < MIN_BLOW_UP or losses[0][1] <= 0:
        return None
    start, now = median(value for _, value in losses[:3]), median(value for _, value in losses[-5:])
    first = len(losses)
    while first and losses[first - 1][1] > 10 * start:
        first -= 1
    if now <= BEYOND_RETURN * start or len(losses) - first < MIN_BLOW_UP // 2:
        return None
    best = min(value for _, value in losses)
    return Rise(losses[first][0], losses[-1][0], start, best, 0.0, now, len(losses) - first)


def _no_better(losses: Points) -> Rise | None:
    """Return the rise of a loss that became worse in the first steps of a run and has not become better than before since."""
    if len(losses) < 2 * FIRST_STEPS or losses[0][0] > 1 or losses[0][1] <= 0:
        return None
    # The loss before any step: the second one may already be ruined.
    start = losses[0][1]
    early = [value for _, value in losses[FIRST_STEPS // 2 : 3 * FIRST_STEPS]]
    now = median(value for _, value in losses[-FIRST_STEPS:])
    is_left_worse = median(early) > WORSE * start and sum(value > start for value in early) >= NEARLY_ALL * len(early)
    # It went far up at first and came down only to where it began: what was lost was not learned again.
    is_left_empty = len(losses) >= 3 * FIRST_STEPS and max(value for _, value in losses[:FIRST_STEPS]) > FAR_UP * start
    if not is_left_worse and not (is_left_empty and now > NO_BETTER * start):
        return None
    if now <= BETTER * start:
        return None
    best = min(value for _, value in losses)
    return Rise(losses[0][0], losses[-1][0], start, best, 0.0, now, len(losses) - FIRST_STEPS // 2)


def _of_size(window: Window, rise: Rise, share: float, largest: float) -> Finding:
    is_lost = rise.now > BEYOND_RETURN * max(abs(rise.best), abs(rise.start))
    severity: Severity = "critical" if is_lost else "warning"
    return Finding(
        detector=LearningRate.name,
        severity=severity,
        first_step=rise.first_step,
        detected_step=rise.last_step,
        ranks=tuple(sorted(window.attached)),
        summary=f"The loss rises since step {rise.first_step}, from {rise.best:.3g} to {rise.now:.3g}, and steps change "
        f"{share:.0%} of the modules by more than a tenth of their weights.",
        facts=_facts(has_jump=False, has_loss=True, is_lost=is_lost),
        evidence=(
            Evidence(
                kind="trend",
                summary=f"loss: {rise.best:.3g} at its best, {rise.now:.3g} now, above its history for {rise.num_steps} steps",
                values={"best": rise.best, "now": rise.now, "num_steps": rise.num_steps},
            ),
            Evidence(
                kind="update",
                summary=f"norm of the step over norm of the weights: above a tenth in {share:.0%} of the modules, up to {largest:.3g}",
                values={"share": share, "largest": largest},
            ),
        ),
    )


def _facts(*, has_jump: bool, has_loss: bool, is_lost: bool) -> dict[str, Any]:
    return {
        "has_jump": has_jump,
        "has_loss_reaction": has_loss,
        "is_beyond_return": is_lost,
        # A jump is judged only if loss and norm were ordinary at its own step.
        "was_ordinary_at_jump": True if has_jump else None,
        "series": ["learning_rate", "gradient_norm", "loss"],
    }


def _word(name: str) -> str:
    return "the gradient norm" if name == "gradient_norm" else "the loss"


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "NaN or Inf"
