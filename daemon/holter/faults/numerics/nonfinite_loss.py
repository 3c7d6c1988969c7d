"""Non-finite loss: the raw loss is NaN or Inf while no non-finite gradient was seen to reach the weights.

What it detects
    Steps whose loss, as backward got it, was NaN or Inf, and for which no NaN was seen in what the optimizer applied. It also says what
    the logger showed meanwhile: a running average, or a filter such as the Trainer's `logging_nan_inf_filter`, shows a sound number.

Why it matters
    The curve that everybody looks at is ordinary while the run learns nothing, or learns from a part of its batches.

False positives
    Losses of a step that a loss scaler skipped do not count. A loss that is NaN once, because a batch held no label that counts, is
    reported as information, and so is one whose graph nobody could look at, or that a range test of the learning rate ends with. A script
    that drops such batches before backward is not seen at all.

What to do
    Look at the raw loss of the first step named here, not at the logger's. If every step since is NaN, stop: the weights are gone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.numerics.nonfinite_values import is_outside, line_evidence, outputs_evidence
from holter.faults.shared.logged_series import logged, plain
from holter.faults.shared.range_test import apart_from_tests
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import ranks_text
from holter.faults.window import Spread, Window
from holter.records import Evidence, Finding, Origin, Severity

LOGGED = frozenset({"loss", "train_loss", "training_loss"})
"""Names under which a script's logger shows its loss."""

Step = tuple[int, Spread]


@dataclass(frozen=True)
class NonfiniteLoss:
    """Judges steps whose raw loss is not finite."""

    name: ClassVar[str] = "nonfinite_loss"

    min_steps: int = threshold(2, at_least=1)
    """Number of steps below which it is information only, unless the loss's graph shows that it is no average over nothing."""
    lost_steps: int = threshold(5, at_least="min_steps")
    """Number of steps in a row until now, on every rank, after which the loss will not come back."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield one finding: the first such step."""
        yield from apart_from_tests(window, self._judged)

    def _judged(self, window: Window) -> Iterator[Finding]:
        losses = window.values("loss")
        odd = [(step, spread) for step, spread in losses if spread.num_nonfinite]
        # `nonfinite_values` judges NaN that was applied to the weights, and explains it better.
        if not odd or any(entry.where != "input" for view in window.steps for _, entry in view.nonfinite):
            return
        first = odd[0][0]
        since = [spread for step, spread in losses if step >= first]
        is_lost = len(since) >= self.lost_steps and all(s.num_nonfinite == s.num for s in since[-self.lost_steps :])
        _, origin = _origins(window, first, odd[0][1])
        is_made = origin is not None and origin.is_of_nothing is False
        severity: Severity = "critical" if is_lost else "warning" if is_made or len(odd) >= self.min_steps else "info"
        yield _finding(window, odd, len(since), severity, is_lost=is_lost)


def _finding(window: Window, odd: list[Step], num_since: int, severity: Severity, *, is_lost: bool) -> Finding:
    first, last = odd[0][0], odd[-1][0]
    logged_as, shown = _logged_losses(window, first)
    ranks, origin = _origins(window, first, odd[0][1])
    hidden = f" while the logger showed {shown[-1][1]:.4g}" if shown else ""
    return Finding(
        detector=NonfiniteLoss.name,
        severity=severity,
        first_step=first,
        detected_step=last,
        ranks=ranks,
        summary=f"The raw loss is NaN or Inf since step {first}, at {len(odd)} of {num_since} steps{hidden}.",
        facts={
            "is_logged_finite": True if shown else False if logged_as else None,
            "is_repeated": len(odd) > 1,
            "is_on_all_ranks": all(spread.num_nonfinite == spread.num for _, spread in odd),
            "is_beyond_return": is_lost,
            "is_outside_modules": is_outside(origin),
            "has_finite_gradient": _has_finite_gradient(window, {step for step, _ in odd}),
            "series": ["loss", *([logged_as] if logged_as else []), "gradient_norm"],
        },
        evidence=(
            *line_evidence(origin),
            *_evidence(odd, num_since, logged_as, shown, ranks),
            *outputs_evidence(origin),
        ),
    )


def _origins(window: Window, first: int, spread: Spread) -> tuple[tuple[int, ...], Origin | None]:
    """Return the ranks with such a loss, and what is known of its origin.

    All ranks if not all that had it reported an origin.
    """
    told = {rank: origin for (rank, step), origin in window.tensors.origins.items() if step == first}
    ranks = tuple(sorted(told)) if told and len(told) >= spread.num_nonfinite else tuple(sorted(window.attached))
    return ranks, next((told[rank] for rank in ranks if rank in told), None)


def _logged_losses(window: Window, first: int) -> tuple[str | None, list[tuple[int, float]]]:
    """Return the name under which the script has logged a loss since then, and its finite values."""
    finite = {
        name: [point for point in points if point[0] >= first]
        for name, points in logged(window, LOGGED.__contains__).items()
        if name.startswith("log.")
    }
    name = next((name for name, points in finite.items() if points), None)
    if name is not None:
        return name, finite[name]
    said = (name for entry in window.series if entry.step >= first for name in entry.numbers)
    return next((name for name in said if plain(name) in LOGGED and name.startswith("log.")), None), []


def _has_finite_gradient(window: Window, steps: set[int]) -> bool | None:
    """Whether gradients at those steps were finite; None if nobody read them."""
    norms = [spread for step, spread in window.values("gradient_norm") if step in steps]
    return not any(spread.num_nonfinite for spread in norms) if norms else None


def _evidence(
    odd: list[Step], num_since: int, logged_as: str | None, shown: list[tuple[int, float]], ranks: tuple[int, ...]
) -> Iterator[Evidence]:
    (first, spread), (last, _) = odd[0], odd[-1]
    yield Evidence(
        kind="loss",
        summary=f"the loss that backward got was NaN or Inf on {spread.num_nonfinite} of {spread.num} ranks at step {first}, and at "
        f"{len(odd)} of the {num_since} steps since, the last of them {last}",
        values={"first_step": first, "last_step": last, "num_steps": len(odd), "num_ranks": spread.num_nonfinite},
    )
    if shown:
        step, value = shown[-1]
        yield Evidence(
            kind="log",
            summary=f"the script's logger showed {value:.4g} as `{logged_as}` at step {step}: an average or a filter hides the NaN",
            values={"name": logged_as, "step": step, "value": value},
        )
    elif logged_as is None:
        yield Evidence(kind="missing", summary="what the script's logger showed since: it logged no loss that was seen")
    if spread.num_nonfinite < spread.num and len(ranks) != spread.num_nonfinite:
        summary = f"which of {ranks_text(ranks)} had it: only the number of ranks is kept, so all are named"
        yield Evidence(kind="missing", summary=summary)
