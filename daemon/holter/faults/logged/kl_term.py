"""KL term: the pull toward the reference is exactly zero, or pushes the other way.

What it detects
    A logged KL that is zero, or no more than rounding, log after log although the policy is being trained; and a KL term of the loss that
    is negative while the KL itself is positive and grows.

Why it matters
    Without the pull a policy drifts wherever the reward leads it, and nobody sees it, because the KL that is shown is zero. With the wrong
    sign it is driven away from the reference as fast as the optimizer can.

False positives
    At the first steps policy and reference are equal and the KL is zero: it must stay zero for many logs while gradients are not. A script
    that has no KL term and logs a zero in its place looks the same: it is a remark (severity info) unless a KL term of the loss is
    logged too. A penalty inside the reward is negative by its nature: only terms of the loss count. Where weights were seen swapped
    within one autocast region, the zero has a better explanation, and nothing is said here.

What to do
    Compute the KL once by hand from both models' logits (`holter explain kl_inactive`, `kl_sign_flipped`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from holter.faults.shared.logged_series import LoggedPoint, halves, logged, trailing
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import cap
from holter.faults.window import Window
from holter.records import Evidence, Finding, Swapped

TERM = re.compile(r"^(loss_terms?\.(.*[._])?kl([._].*)?|kl_loss)$")
"""A KL term of the loss by its name."""

ROUNDING, FALLEN, MIN_TINY, MAX_GROWTH = 1e-6, 100.0, 16, 2.0
"""A KL of two models that are equal but for rounding; what it had been before, in so many of those; logs; a policy that has just set out leaves faster."""


@dataclass(frozen=True)
class KlTerm:
    """Judges a logged KL, and its term of the loss where that is logged."""

    name: ClassVar[str] = "kl_term"

    min_logs: int = threshold(16, at_least=2)  # Once is the beginning.
    """Logs in a row that must show it."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """At most one finding."""
        values = next(iter(logged(window, lambda name: name == "kl").values()), [])
        terms = logged(window, lambda name: bool(TERM.match(name)))
        for name, term in sorted(terms.items()):
            run = self._flipped(dict(values), term)
            if run:
                yield _finding(window, run, [name, "log.kl"], is_flipped=True, has_term=True)
                return
        zero = _nothing(values)
        if len(zero) >= self.min_logs and _is_training(window, zero[0][0]) and not any(window.notes_of(Swapped)):
            found = _finding(window, zero, ["log.kl", *sorted(terms)], is_flipped=False, has_term=bool(terms))
            yield msgspec.structs.replace(found, detected_step=zero[self.min_logs - 1][0])

    def _flipped(self, values: dict[int, float], term: Sequence[LoggedPoint]) -> Sequence[LoggedPoint]:
        """The newest logs at which the term was negative and the KL positive, if that grew."""
        both = [(step, value) for step, value in term if step in values]
        run = [point for point in trailing(both, lambda value: value < 0) if values[point[0]] > 0]
        if len(run) < self.min_logs:
            return ()
        before, after = halves([(step, values[step]) for step, _ in run])
        return run if after > before else ()


def _nothing(values: Sequence[LoggedPoint]) -> Sequence[LoggedPoint]:
    """The newest logs that are zero, or no more than rounding after it had been more, or all along and without growing."""
    zero, tiny = trailing(values, lambda value: value == 0), trailing(values, lambda value: abs(value) <= ROUNDING)
    if len(tiny) == len(zero) or len(tiny) < MIN_TINY:
        return zero
    before, after = halves([(step, abs(value)) for step, value in tiny])
    has_fallen = max((value for _, value in values[: len(values) - len(tiny)]), default=0.0) > FALLEN * ROUNDING
    return tiny if has_fallen or after <= MAX_GROWTH * before else zero


def _is_training(window: Window, since: int) -> bool:
    """Whether gradients and learning rate were above zero all the while."""
    entries = [entry for entry in window.series if entry.step >= since]
    norms = [entry.numbers["gradient_norm"].mean for entry in entries if "gradient_norm" in entry.numbers]
    rates = [entry.numbers["learning_rate"].mean for entry in entries if "learning_rate" in entry.numbers]
    return bool(norms) and bool(rates) and min(norms) > 0 and min(rates) > 0


def _finding(
    window: Window, run: Sequence[LoggedPoint], names: list[str], *, is_flipped: bool, has_term: bool
) -> Finding:
    since = run[0][0]
    what = (
        "the loss is lowered by a KL that grows"
        if is_flipped
        else f"the KL to the reference is {'exactly zero' if not any(value for _, value in run) else 'no more than rounding'} although the policy is trained"
    )
    return Finding(
        detector=KlTerm.name,
        severity="warning" if has_term else "info",
        first_step=since,
        detected_step=run[-1][0],
        ranks=tuple(sorted(window.attached)),
        summary=f"{cap(what)}, at every log since step {since}.",
        facts={
            "is_flipped": is_flipped,
            "is_zero": not is_flipped,
            "has_term": has_term,
            "is_active": False,
            "series": names,
        },
        evidence=(
            Evidence(
                kind="series",
                summary=f"{names[0].removeprefix('log.')}: {run[-1][1]:.3g} now, at {len(run)} logs in a row since step {since}",
                values={"name": names[0], "last": run[-1][1], "num_logs": len(run)},
            ),
        ),
    )
