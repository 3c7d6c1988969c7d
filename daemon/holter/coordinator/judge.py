"""One judgement: the detectors look at everything that was heard, and what they find becomes incidents.

    Assembly ──window──▶ detectors ──findings──▶ IncidentTracker ──▶ diagnoses that are new, changed or over
                                       └─▶ tables and examinations without which some of it cannot be explained

The coordinator judges so while a run lives; a restart, `holter replay` and `holter page` judge its journal in the same way.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from holter import clock
from holter.coordinator.incidents.tracker import IncidentTracker, cause_of
from holter.coordinator.window.assembly import Assembly
from holter.faults import Detector, ExamKey, TableKey, Window
from holter.records import Diagnosis, ExamRequest, Finding, TableRequest

T = TypeVar("T")

DIAGNOSIS = "diagnosis"
"""Under this name failures to explain are counted, beside the detectors."""
FINAL_PATIENCE_NS = 60 * 10**9
"""The last judgement is made as if so much time had passed: no one is waited for any more."""

logger = logging.getLogger(__name__)


@dataclass
class DetectorRunner:
    """Runs each detector on its own: one that fails is counted and named, and never taken for health."""

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
        """The result of the call; None when it fails: the failure is counted under this name, shown, and logged once."""
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


@dataclass(frozen=True)
class Judgement:
    """What one look at everything showed."""

    findings: list[Finding]
    tables: tuple[TableKey, ...]
    """Tables to fetch before some findings can be explained."""
    exams: tuple[ExamKey, ...]
    """Examinations of ranks, likewise."""
    diagnoses: tuple[Diagnosis, ...]
    """New, or better understood than before, or over."""


class Judge:
    """What was heard, the detectors that judge it, and the incidents made of it."""

    def __init__(self, assembly: Assembly, tracker: IncidentTracker, detectors: Sequence[Detector]) -> None:
        self.assembly = assembly
        self.tracker = tracker
        self.runner = DetectorRunner(detectors, clock.monotonic_s)
        self.findings: list[Finding] = []
        """The findings of the last judgement."""
        self._told: set[tuple[str, str]] = set()

    def judge(self, now_ns: int, *, is_final: bool = False, passed: Collection[str] = ()) -> Judgement:
        """Look at everything as of this moment; in a replay with the incidents that the live run saw pass now."""
        ahead_ns = FINAL_PATIENCE_NS if is_final else 0
        window = replace(self.assembly.window(now_ns + ahead_ns), real_ns=now_ns)
        findings = self.findings = self.runner.judge(window)
        missing = {key for finding in findings for key in pending(finding, window)}
        exams = tuple(sorted(key for key in missing if isinstance(key, ExamKey)))
        tables = tuple(sorted(key for key in missing if not isinstance(key, ExamKey)))
        diagnoses: list[Diagnosis] = []
        settled = self.tracker.settle(findings, window, now_ns, is_final=is_final, passed=passed)
        self.runner.guard(DIAGNOSIS, lambda: _collect(settled, diagnoses))
        return Judgement(findings, tables, exams, tuple(diagnoses))

    def news(self, diagnoses: Iterable[Diagnosis]) -> tuple[Diagnosis, ...]:
        """The diagnoses that nobody was told of: each incident once for each leading cause, however often it is explained better."""
        found = []
        for diagnosis in diagnoses:
            key = (diagnosis.id, cause_of(diagnosis))
            if key not in self._told:
                self._told.add(key)
                found.append(diagnosis)
        return tuple(found)


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


def _collect(settled: Iterator[Diagnosis], found: list[Diagnosis]) -> None:
    """Take the diagnoses one by one: those that were explained before a failure stay."""
    for diagnosis in settled:
        found.append(diagnosis)  # noqa: PERF402 - a list would be lost with the failure
