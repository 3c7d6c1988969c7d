"""Detectors judge: each looks at a window of what the ranks said and yields what is wrong.

A detector is a frozen dataclass in a file of its own. Its fields are its thresholds, its file's docstring is its page, and it keeps
nothing between two calls, so that a recorded run can be judged again. `ALL` is the one list of them.
"""

from collections.abc import Iterator
from typing import Protocol

from holter.detectors.dead_rank import DeadRank
from holter.detectors.nonfinite_values import NonfiniteValues
from holter.detectors.replica_divergence import ReplicaDivergence
from holter.detectors.window import ClassHistory, RankExit, StepView, TableKey, Window
from holter.records import Finding


class Detector(Protocol):
    """What every detector is."""

    @property
    def name(self) -> str:
        """The fault it sees: also its file, its metric label, its alert and its page."""

    def judge(self, window: Window) -> Iterator[Finding]:
        """What is wrong in this window. Pure: the same window gives the same findings."""


ALL: tuple[Detector, ...] = (NonfiniteValues(), ReplicaDivergence(), DeadRank())

__all__ = [
    "ALL",
    "ClassHistory",
    "DeadRank",
    "Detector",
    "NonfiniteValues",
    "RankExit",
    "ReplicaDivergence",
    "StepView",
    "TableKey",
    "Window",
]
