"""Loss terms: one term of the loss outweighs all others, or one is exactly zero.

What it detects
    Of the terms that the script tells (`watch.log(loss_terms={...})`): one that is a hundred times all the others together, by the median
    of twenty logs or more; one that from one log to the next is thirty times what it ever was, ten times all the others, which are as
    before, and stays; one that was there and is exactly zero at the last twenty logs; one that has been exactly zero at all of forty
    logs.

Why it matters
    A term that contributes nothing teaches nothing. The sum looks ordinary either way.

False positives
    A term whose weight is raised by a schedule starts small or at zero and grows: it is silent as long as the others' share grows, and for
    the first forty logs. A penalty beside a task is small by design, and a term that was trained down while another stayed is learned: both
    are silent. A term whose weight is let down to zero by a schedule gets small before it is zero, and is silent too. A policy's
    surrogate is about zero whatever it teaches (advantages have a mean of zero, ratios are one): beside a term that takes both signs,
    or one that is called so, magnitudes say nothing, and a value's loss jumps with the first reward that its policy finds.

What to do
    Compare weights and scales of the terms; see that the small one still reaches the weights it is for.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from holter.faults.shared.robust import Points, finite
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import listed
from holter.faults.window import Window
from holter.records import Evidence, Finding

PREFIX = "log.loss_terms."
SURROGATE = re.compile(r"(^|[._])(policy|pg|actor|surrogate|ppo|grpo|reinforce|rl)([._]|$)")
"""Matches terms whose value says nothing about their gradient."""
OF_RETURNS = re.compile(r"(^|[._])(value|vf|critic|q|td)([._]|$)")
"""Matches terms that, beside a policy's, are as large as its rewards: the first reward that a policy finds makes them
jump."""
SMALL_BY_DESIGN = re.compile(r"(^|[._])(l1|l2|reg\w*|penalty|\w*decay|smooth\w*|aux\w*|z_loss|balanc\w*|prior)([._]|$)")
"""Matches terms that have a small weight beside a task: that the task outweighs them is intended."""
MAX_LOGS = 400
RISEN = 3.0
"""A term that is this many times what it was at first has grown itself."""
JUMP, LASTING, LEADING = 30.0, 8, 10.0
"""Times its largest value to which a term jumps, number of logs for which it stays there, and times the sum of the
others that it then is."""


@dataclass(frozen=True)
class LossTerms:
    """Compares the magnitudes of the terms of the loss."""

    name: ClassVar[str] = "loss_terms"

    ratio: float = 100.0
    """One term must be this many times the sum of all others."""
    min_logs: int = threshold(20, at_least=3)  # Thirds are compared.
    """Number of logs before anything is reported."""
    min_zero_logs: int = 40
    """Number of logs before a term that was always zero is reported."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: a term that is gone, or else one that dominates."""
        terms = _terms(window)
        measured = {name: points for name, points in terms.items() if not SURROGATE.search(_short(name))}
        if len(terms) < 2:  # noqa: PLR2004 - one term has no others
            return
        for name, points in measured.items():
            others = [other for other in terms if other != name]
            since = self._gone_since(points)
            if since is not None and all(median(_sizes(terms[other][-self.min_logs :])) > 0 for other in others):
                yield _of_zero(window, name, points, since, terms)
                return
        if (jump := self._jumped(terms)) is not None:
            yield _of_jump(window, *jump, terms)
        elif len(measured) == len(terms) and (found := self._dominating(terms)) is not None:
            yield _of_dominance(window, found, terms, self.min_logs)

    def _gone_since(self, points: Points) -> int | None:
        """Return the step of the first of the zeros that end the series, or None.

        They must be many, and have begun at the start or abruptly.
        """
        num = next((i for i, (_, value) in enumerate(reversed(points)) if value != 0), len(points))
        if num == len(points):
            return points[0][0] if num >= self.min_zero_logs else None
        if num < self.min_logs:
            return None
        alive = _sizes(points[:-num])
        usual = median(alive)
        is_abrupt = len(alive) >= 5 and min(alive[-3:]) > 0.1 * usual > 0  # noqa: PLR2004 - a schedule lets down slowly
        return points[-num][0] if is_abrupt else None

    def _jumped(self, terms: Mapping[str, Points]) -> tuple[str, int, tuple[float, float]] | None:
        """Return (name, step, (before, after)) of a term whose weight was changed; None if there is none.

        The change must be larger than what training changes in a step.
        """
        rows = _common(terms)
        has_policy = any(SURROGATE.search(_short(name)) for name in terms)
        for name in terms if len(rows) >= self.min_logs + LASTING else ():
            if has_policy and OF_RETURNS.search(_short(name)):
                continue
            own = [row[name] for row in rows]
            rest = [sum(row.values()) - row[name] for row in rows]
            top, before = max(own[: self.min_logs]), self.min_logs
            while before < len(own) and own[before] <= JUMP * top:
                top, before = max(top, own[before]), before + 1
            after = own[before : before + LASTING]
            is_up = len(after) == LASTING and top > 0 and min(after) > JUMP / 3 * top
            if is_up and LEADING * rest[before] < own[before] and rest[before] <= RISEN * max(rest[:before]):
                steps = sorted(set.intersection(*({step for step, _ in points} for points in terms.values())))
                return name, steps[before], (median(own[:before]), median(after))
        return None

    def _dominating(self, terms: Mapping[str, Points]) -> str | None:
        shares = _common(terms)
        if len(shares) < self.min_logs:
            return None
        for name in terms:
            sums = [(row[name], sum(size for other, size in row.items() if other != name)) for row in shares]
            recent = sums[-self.min_logs :]
            if any(_has_both_signs(points) for other, points in terms.items() if other != name):
                continue
            if median(rest for _, rest in recent) > 0 and all(own > self.ratio * rest for own, rest in recent):
                is_healthy = _is_growing([rest / own for own, rest in sums if own > 0]) or self._is_learned(sums)
                is_small_by_design = all(SMALL_BY_DESIGN.search(_short(other)) for other in terms if other != name)
                return None if is_healthy or is_small_by_design else name
        return None

    def _is_learned(self, sums: Sequence[tuple[float, float]]) -> bool:
        """Whether the others were as large at first and have been trained down, while this one stayed about the same."""
        first, recent = sums[: self.min_logs // 2], sums[-self.min_logs :]
        was_usual = median(own for own, _ in first) <= self.ratio * median(rest for _, rest in first)
        return was_usual and median(own for own, _ in recent) < RISEN * median(own for own, _ in first)


def _terms(window: Window) -> dict[str, Points]:
    names = sorted({name for entry in window.series[-MAX_LOGS:] for name in entry.numbers if name.startswith(PREFIX)})
    return {name: points for name in names if (points := finite(window.values(name))[-MAX_LOGS:])}


def _sizes(points: Points) -> list[float]:
    return [abs(value) for _, value in points]


def _has_both_signs(points: Points) -> bool:
    """Whether its value moves around zero, so that its size says nothing about its weight."""
    return min(value for _, value in points) < 0 < max(value for _, value in points)


def _common(terms: Mapping[str, Points]) -> list[dict[str, float]]:
    """Return the magnitudes at the steps at which every term was logged."""
    by_name = {name: dict(points) for name, points in terms.items()}
    steps = sorted(set.intersection(*(set(points) for points in by_name.values())))
    return [{name: abs(points[step]) for name, points in by_name.items()} for step in steps]


def _is_growing(shares: Sequence[float]) -> bool:
    """Whether the others' share grew by half from the first third to the last, or grew in the last stretch."""
    part = max(1, len(shares) // 3)
    recent = shares[-20:]
    half = max(1, len(recent) // 2)
    return median(shares[-part:]) > 1.5 * median(shares[:part]) or median(recent[half:]) > 1.2 * median(recent[:half])


def _short(name: str) -> str:
    return name.removeprefix(PREFIX)


def _sizes_evidence(terms: Mapping[str, Points], num: int) -> Evidence:
    sizes = {_short(name): median(_sizes(points[-num:])) for name, points in terms.items()}
    shown = listed(f"{name} {size:.3g}" for name, size in sorted(sizes.items(), key=lambda item: -item[1]))
    return Evidence(kind="terms", summary=f"median magnitude over the last {num} logs: {shown}", values=sizes)


def _of_zero(window: Window, name: str, points: Points, since: int, terms: Mapping[str, Points]) -> Finding:
    is_from_start = since == points[0][0]
    how = "has been exactly zero from the start" if is_from_start else f"is exactly zero since step {since}"
    return _finding(
        window,
        terms,
        step=since,
        summary=f"The loss term {_short(name)!r} {how}, while the others are not.",
        facts={"is_zero": True, "is_zero_from_start": is_from_start, "is_dominating": False, "is_growing": False},
        evidence=_sizes_evidence(terms, 20),
    )


def _of_jump(window: Window, name: str, step: int, sizes: tuple[float, float], terms: Mapping[str, Points]) -> Finding:
    before, after = sizes
    return _finding(
        window,
        terms,
        step=step,
        summary=f"The loss term {_short(name)!r} went from {before:.3g} to {after:.3g} at step {step}, while the others stayed as they were.",
        facts={"is_zero": False, "is_zero_from_start": False, "is_dominating": True, "is_growing": False},
        evidence=Evidence(
            kind="terms",
            summary=f"{_short(name)}: {before:.3g} (median) at all logs before step {step}, {after:.3g} in the {LASTING} from it on; it had never been a {JUMP:.0f}th of that",
            values={"before": before, "after": after, "step": step},
        ),
    )


def _of_dominance(window: Window, name: str, terms: Mapping[str, Points], num: int) -> Finding:
    own = median(_sizes(terms[name][-num:]))
    rest = sum(median(_sizes(points[-num:])) for other, points in terms.items() if other != name)
    times = f"{own / rest:.3g} times" if rest else "far above"
    return _finding(
        window,
        terms,
        step=terms[name][0][0],
        summary=f"The loss term {_short(name)!r} is {times} all the others together.",
        facts={"is_zero": False, "is_zero_from_start": False, "is_dominating": True, "is_growing": False},
        evidence=_sizes_evidence(terms, num),
    )


def _finding(  # noqa: PLR0913 - a record's fields
    window: Window, terms: Mapping[str, Points], *, step: int, summary: str, facts: dict[str, bool], evidence: Evidence
) -> Finding:
    return Finding(
        detector=LossTerms.name,
        severity="warning",
        first_step=step,
        detected_step=max(points[-1][0] for points in terms.values()),
        ranks=tuple(sorted(window.attached)),
        summary=summary,
        facts=facts | {"series": sorted(terms)},
        evidence=(evidence,),
    )
