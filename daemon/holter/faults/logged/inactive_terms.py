"""Inactive terms: a term of the loss is logged whose tensor carries no gradient, beside others that do.

What it detects
    Of the tensors that a script logs as terms of its loss (`watch.log(loss_terms={...})`, or names such as `kl_loss`, `z_penalty`): one
    that needs no gradient although it is not zero, log after log, while another at the same logs does. The tensor says so itself.

Why it matters
    A penalty that was computed under `no_grad`, from detached tensors or from a number is added to the loss, shown on every chart, and
    teaches nothing: balance, pull or bonus is not there.

False positives
    Scripts log detached copies of what they add: where no term carries a gradient nothing is said, nor where the only one that does is
    the total. A term that is switched off and logged as a zero is silent. Numbers say nothing of gradients.

What to do
    Print `term.requires_grad` where the loss is summed (`holter explain auxiliary_loss_inactive`, `kl_inactive`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.logged_series import CARRIES, MAX_LOGS, MAX_STEPS, LoggedPoint, logged, plain, trailing
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding

KL = re.compile(r"(^|[._])kl([._]|$)")
TOTAL = re.compile(r"(^|[._])(total|sum|overall|objective)([._]|$)|^loss$|\.loss$")


@dataclass(frozen=True)
class InactiveTerms:
    """Judges which logged terms of the loss carry a gradient."""

    name: ClassVar[str] = "inactive_terms"

    min_logs: int = threshold(8, at_least=2)  # One may be a branch that is taken once.
    """Number of logs in a row."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding, with all terms that carry no gradient now."""
        flags = {name: dict(points) for name, points in _flags(window).items()}
        values = {name: dict(next(iter(logged(window, plain(name).__eq__).values()), [])) for name in flags}
        active = {name: steps for name, steps in flags.items() if not _is_total(name, values)}
        found: dict[str, list[LoggedPoint]] = {}
        for name, points in active.items():
            others = {step for other in active if other != name for step, flag in active[other].items() if flag > 0}
            judged = [(step, flag) for step, flag in sorted(points.items()) if step in others]
            run = trailing(judged, lambda flag: flag == 0)
            is_zero = not any(values[name].get(step) for step, _ in run)
            if len(run) >= self.min_logs and not is_zero and run[-1][0] >= max(points):
                found[name] = [(step, values[name].get(step, 0.0)) for step, _ in run]
        if found:
            yield _finding(window, found)


def _flags(window: Window) -> dict[str, list[LoggedPoint]]:
    """Return, by name of a term, the steps at which its tensor did or did not carry a gradient.

    The logged KL itself is left out: it is a measure, and enters the loss as a term of its own.
    """
    names = {name for entry in window.series[-MAX_STEPS:] for name in entry.numbers if name.startswith(CARRIES)}
    return {
        bare: [(step, spread.mean) for step, spread in window.values(name)[-MAX_LOGS:]]
        for name in sorted(names)
        if plain(bare := name.removeprefix(CARRIES)) not in ("", "kl")
    }


def _is_total(name: str, values: dict[str, dict[int, float]]) -> bool:
    """Whether it is the sum of the others, by its name or by its value."""
    if TOTAL.search(plain(name)):
        return True
    others = [points for other, points in values.items() if other != name and not TOTAL.search(plain(other))]
    steps = [step for step in values[name] if all(step in points for points in others)]
    if len(others) < 2 or not steps:  # noqa: PLR2004  one other alone may be equal to it by chance
        return False
    sums = [(values[name][step], sum(points[step] for points in others)) for step in steps]
    return all(abs(own - rest) <= 1e-3 * max(abs(own), abs(rest)) for own, rest in sums)


def _finding(window: Window, found: dict[str, list[LoggedPoint]]) -> Finding:
    names = sorted(found)
    since = min(points[0][0] for points in found.values())
    shown = ", ".join(repr(plain(name).removeprefix("loss_terms.")) for name in names)
    return Finding(
        detector=InactiveTerms.name,
        severity="warning",
        first_step=since,
        detected_step=max(points[-1][0] for points in found.values()),
        ranks=tuple(sorted(window.attached)),
        summary=f"The loss term{'s' if len(names) > 1 else ''} {shown} carr{'y' if len(names) > 1 else 'ies'} no gradient since step {since}.",
        facts={
            "is_kl": any(KL.search(plain(name)) for name in names),
            "is_without_gradient": True,
            "has_gradient": False,
            "series": [f"log.{name}" for name in names],
        },
        evidence=tuple(
            Evidence(
                kind="terms",
                summary=f"{plain(name).removeprefix('loss_terms.')}: {points[-1][1]:.3g} now; its tensor needs no gradient at {len(points)} logs in a row, where other terms do",
                values={"name": name, "last": points[-1][1], "num_logs": len(points)},
            )
            for name, points in sorted(found.items())
        ),
    )
