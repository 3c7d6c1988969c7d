"""A round: look at everything that was heard, find what is wrong, explain what can be explained.

The coordinator makes rounds while a run lives, `holter replay` makes them again over its journal; both do it here, so that they agree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from holter import clock
from holter.coordinator.incidents.tracker import IncidentTracker
from holter.coordinator.judge import DIAGNOSIS, DetectorRunner, pending
from holter.coordinator.window.assembly import Assembly
from holter.faults import Detector, ExamKey, TableKey
from holter.records import Diagnosis, Finding

FINAL_PATIENCE_NS = 60 * 10**9
"""The last judgement is made as if so much time had passed: no one is waited for any more."""


@dataclass(frozen=True)
class Seen:
    """What one round showed."""

    findings: list[Finding]
    needs: tuple[TableKey, ...]
    """Tables without which some of it cannot be explained."""
    exams: tuple[ExamKey, ...]
    """Examinations, likewise."""
    diagnoses: tuple[Diagnosis, ...]
    """New, or better understood than before."""


class JudgingRounds:
    """What was heard, who judges it, and the incidents made of it."""

    def __init__(self, assembly: Assembly, casebook: IncidentTracker, detectors: Sequence[Detector]) -> None:
        self.assembly = assembly
        self.bench = DetectorRunner(detectors, clock.monotonic_s)
        self.casebook = casebook

    def make(self, now_ns: int, *, is_final: bool = False) -> Seen:
        """One round, as of this moment."""
        ahead_ns = FINAL_PATIENCE_NS if is_final else 0
        window = replace(self.assembly.window(now_ns + ahead_ns), real_ns=now_ns)
        findings = self.bench.judge(window)
        needs = {key for finding in findings for key in pending(finding, window)}
        exams = tuple(sorted(key for key in needs if isinstance(key, ExamKey)))
        tables = tuple(sorted(key for key in needs if not isinstance(key, ExamKey)))
        diagnoses: list[Diagnosis] = []
        settled = self.casebook.settle(findings, window, now_ns, is_final=is_final)
        self.bench.guard(DIAGNOSIS, lambda: _collect(settled, diagnoses))
        return Seen(findings, tables, exams, tuple(diagnoses))


def _collect(settled: Iterator[Diagnosis], found: list[Diagnosis]) -> None:
    """One by one: what was explained before a failure stays."""
    for diagnosis in settled:
        found.append(diagnosis)  # noqa: PERF402 - a list would be lost with the failure
