"""Running the detectors, each on its own: one that fails is counted and named, and never taken for health."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from holter.faults import Detector, ExamKey, TableKey, Window
from holter.records import ExamRequest, Finding, TableRequest

T = TypeVar("T")

DIAGNOSIS = "diagnosis"
"""Under this name failures to explain are counted, beside the detectors."""

logger = logging.getLogger(__name__)


@dataclass
class DetectorRunner:
    """The detectors, and how each is doing."""

    detectors: Sequence[Detector]
    stopwatch_s: Callable[[], float]
    """Seconds that never go back."""
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    failing: dict[str, str] = field(default_factory=dict)
    """Detectors that failed when they last judged, and how."""

    def judge(self, window: Window) -> list[Finding]:
        """What all of them find."""
        return [finding for detector in self.detectors for finding in self._judge(detector, window)]

    def guard(self, name: str, call: Callable[[], T]) -> T | None:
        """What the call gives; None when it fails, and then that is counted under its name, shown, and logged once."""
        began_s = self.stopwatch_s()
        try:
            found = call()
        except Exception as error:
            if name not in self.failing:
                logger.exception("%s failed", name)
            self.failing[name] = f"{type(error).__name__}: {error}"
            self.failures[name] = self.failures.get(name, 0) + 1
            return None
        self.failing.pop(name, None)
        self.seconds[name] = self.stopwatch_s() - began_s
        return found

    def blind(self) -> list[str]:
        """A sentence for each that does not judge."""
        return [f"{name} fails to judge: {reason}" for name, reason in sorted(self.failing.items())]

    def _judge(self, detector: Detector, window: Window) -> list[Finding]:
        return self.guard(detector.name, lambda: list(detector.judge(window))) or []


def pending(finding: Finding, window: Window) -> list[TableKey | ExamKey]:
    """What this finding still waits for."""
    return [key for request in finding.needs for key in _keys(request) if _is_open(key, window)]


def _keys(request: TableRequest | ExamRequest) -> Iterator[TableKey | ExamKey]:
    for rank in request.ranks:
        if isinstance(request, ExamRequest):
            yield ExamKey(request.asked_ns, request.depth, rank)
        else:
            yield request.tensor_class, request.step, rank


def _is_open(key: TableKey | ExamKey, window: Window) -> bool:
    if not isinstance(key, ExamKey):
        return key not in window.tensors.tables and key not in window.tensors.unavailable
    answers = (seen.exam.asked_ns for seen in window.processes.exams.get(key.rank, ()))
    return key.asked_ns > max(answers, default=0) and key.asked_ns > window.processes.unexamined.get(key.rank, 0)
