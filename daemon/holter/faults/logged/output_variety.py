"""Output variety: what the model writes is one token over and over.

What it detects
    A logged share of the commonest token (`commonest_token_share`, `top_token_fraction`), or of repeated text (`repetition_rate`), that is
    above four fifths log after log.

Why it matters
    Rewards and losses may look fine on text that nobody would read: a length bonus, a judge that is fooled, a decoder that is stuck.

False positives
    Padding counted as text makes the commonest token common: a share that has always been the same to the last digit is not judged. Some
    degenerate samples early in training are ordinary: it must be nearly all, for many logs.

What to do
    Read ten samples (`holter explain degenerate_outputs`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.logged_series import LoggedPoint, logged, trailing
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding

SHARE = re.compile(
    r"(commonest|most_common|top|mode|max)_token_(share|frac|fraction|ratio|rate)|repetition_(share|frac|fraction|ratio|rate)"
)


@dataclass(frozen=True)
class OutputVariety:
    """Judges a logged share of the commonest token."""

    name: ClassVar[str] = "output_variety"

    max_share: float = threshold(0.8, above=0, below=1)
    """Share above which outputs are one token over and over."""
    min_logs: int = 8
    """Number of logs in a row that must show it."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding."""
        for name, points in sorted(logged(window, lambda name: bool(SHARE.search(name))).items()):
            run = trailing(points, lambda value: self.max_share < value <= 1)
            is_stuck = len({value for _, value in points}) == 1 and points[0][1] < 1
            if len(run) < self.min_logs or is_stuck:
                continue
            yield _finding(window, name, run, self.min_logs)
            return


def _finding(window: Window, name: str, run: Sequence[LoggedPoint], min_logs: int) -> Finding:
    share = run[-1][1]
    return Finding(
        detector=OutputVariety.name,
        severity="warning",
        first_step=run[0][0],
        detected_step=run[min_logs - 1][0],
        ranks=tuple(sorted(window.attached)),
        summary=f"{share:.0%} of what the model writes has been repetition since step {run[0][0]} ({name.removeprefix('log.')}).",
        facts={"is_repeating": True, "is_varied": False, "series": [name]},
        evidence=(
            Evidence(
                kind="series",
                summary=f"{name.removeprefix('log.')}: {share:.3g} now, as high at {len(run)} logs in a row",
                values={"name": name, "last": share, "num_logs": len(run)},
            ),
        ),
    )
