"""KL term: the pull toward the reference is exactly zero, pushes the other way, or leads somewhere else than the run began.

What it detects
    A logged KL that is zero, or no more than rounding, log after log although the policy is being trained; and a KL term of the loss that
    is negative while the KL itself is positive and grows. And a KL that is large at the run's first log, before any update could have
    made a distance, and at every log since.

Why it matters
    Without the pull a policy drifts wherever the reward leads it, and nobody sees it, because the KL that is shown is zero. With the wrong
    sign it is driven away from the reference as fast as the optimizer can. A reference that is another model pulls the policy there.

False positives
    At the first steps policy and reference are equal and the KL is zero: it must stay zero for many logs while gradients are not. A script
    that has no KL term and logs a zero in its place looks the same: it is a remark (severity info) unless a KL term of the loss is
    logged too. A penalty inside the reward is negative by its nature: only terms of the loss count. Where weights were seen swapped
    within one autocast region, the zero has a better explanation, and nothing is said here. A policy that was trained before, and is held
    to the model that it came from, is far from it at the first log on purpose: that is a remark.

What to do
    Compute the KL once by hand from both models' logits (`holter explain kl_inactive`, `kl_sign_flipped`, `wrong_reference`).
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
"""Matches the name of a KL term of the loss."""

ROUNDING, FALLEN, MIN_TINY, MAX_GROWTH = 1e-6, 100.0, 16, 2.0
"""Largest KL of two models equal but for rounding; times that it was before; logs needed; growth up to which it is no
policy that sets out."""


@dataclass(frozen=True)
class KlTerm:
    """Judges a logged KL, and its term of the loss if that is logged."""

    name: ClassVar[str] = "kl_term"

    min_logs: int = threshold(16, at_least=2)  # Once is the beginning.
    """Number of logs in a row that must show it."""
    far: float = threshold(0.5, above=0)
    """A KL at the first log that dropout and precision do not explain."""
    far_logs: int = threshold(8, at_least=2)
    """Number of logs, from the first on, that must be at half of it."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding."""
        values = next(iter(logged(window, lambda name: name == "kl").values()), [])
        terms = logged(window, lambda name: bool(TERM.match(name)))
        for name, term in sorted(terms.items()):
            run = self._flipped(dict(values), term)
            if run:
                yield _finding(window, run, [name, "log.kl"], "is_flipped", has_term=True)
                return
        zero = _nothing(values)
        if len(zero) >= self.min_logs and _is_training(window, zero[0][0]) and not any(window.notes_of(Swapped)):
            found = _finding(window, zero, ["log.kl", *sorted(terms)], "is_zero", has_term=bool(terms))
            yield msgspec.structs.replace(found, detected_step=zero[self.min_logs - 1][0])
        elif self._is_far_at_first(values):
            found = _finding(window, values, ["log.kl"], "is_far_at_first", has_term=False)
            yield msgspec.structs.replace(found, detected_step=values[self.far_logs - 1][0])

    def _is_far_at_first(self, values: Sequence[LoggedPoint]) -> bool:
        """Whether the KL was far from zero from the first log on; False if the run's first step is not remembered."""
        if len(values) < self.far_logs or values[0][0] > 1:
            return False
        return values[0][1] > self.far and min(value for _, value in values[: self.far_logs]) > self.far / 2

    def _flipped(self, values: dict[int, float], term: Sequence[LoggedPoint]) -> Sequence[LoggedPoint]:
        """Return the newest logs at which the term was negative and the KL positive, if the KL grew."""
        both = [(step, value) for step, value in term if step in values]
        run = [point for point in trailing(both, lambda value: value < 0) if values[point[0]] > 0]
        if len(run) < self.min_logs:
            return ()
        before, after = halves([(step, values[step]) for step, _ in run])
        return run if after > before else ()


def _nothing(values: Sequence[LoggedPoint]) -> Sequence[LoggedPoint]:
    """Return the newest logs that are zero, or only rounding, if it was more before or has always been and does not grow."""
    zero, tiny = trailing(values, lambda value: value == 0), trailing(values, lambda value: abs(value) <= ROUNDING)
    if len(tiny) == len(zero) or len(tiny) < MIN_TINY:
        return zero
    before, after = halves([(step, abs(value)) for step, value in tiny])
    has_fallen = max((value for _, value in values[: len(values) - len(tiny)]), default=0.0) > FALLEN * ROUNDING
    return tiny if has_fallen or after <= MAX_GROWTH * before else zero


def _is_training(window: Window, since: int) -> bool:
    """Whether gradients and learning rate were above zero all the time."""
    entries = [entry for entry in window.series if entry.step >= since]
    norms = [entry.numbers["gradient_norm"].mean for entry in entries if "gradient_norm" in entry.numbers]
    rates = [entry.numbers["learning_rate"].mean for entry in entries if "learning_rate" in entry.numbers]
    return bool(norms) and bool(rates) and min(norms) > 0 and min(rates) > 0


def _finding(window: Window, run: Sequence[LoggedPoint], names: list[str], shown: str, *, has_term: bool) -> Finding:
    (since, first), is_far = run[0], shown == "is_far_at_first"
    nothing = "no more than rounding" if any(value for _, value in run) else "exactly zero"
    what = {
        "is_flipped": f"the loss is lowered by a KL that grows, at every log since step {since}.",
        "is_zero": f"the KL to the reference is {nothing} although the policy is trained, at every log since step {since}.",
        "is_far_at_first": f"the KL to the reference was {first:.3g} at the first log of the run, before any update could have made it.",
    }[shown]
    return Finding(
        detector=KlTerm.name,
        severity="warning" if has_term else "info",
        first_step=since,
        detected_step=run[-1][0],
        ranks=tuple(sorted(window.attached)),
        summary=cap(what),
        facts={
            "is_flipped": shown == "is_flipped",
            "is_zero": shown == "is_zero",
            "is_far_at_first": is_far,
            "has_term": has_term,
            "is_active": False,
            "series": names,
        },
        evidence=(
            Evidence(
                kind="series",
                summary=f"{names[0].removeprefix('log.')}: {first:.3g} at step {since}, {run[-1][1]:.3g} now"
                if is_far
                else f"{names[0].removeprefix('log.')}: {run[-1][1]:.3g} now, at {len(run)} logs in a row since step {since}",
                values={"name": names[0], "last": run[-1][1], "num_logs": len(run)},
            ),
        ),
    )
