"""One judgement: the detectors look at everything that was heard, and their findings become incidents.

    Assembly ──window──▶ detectors ──findings──▶ IncidentTracker ──▶ diagnoses that are new, changed or over
                                       └─▶ tables and examinations without which some findings cannot be explained

Detectors keep no state and find the same fault again each time; the tracker keeps the incidents: `correlate` recognises
known ones, and only what is new or better understood is explained.

The coordinator judges so while a run lives; a restart, `holter replay` and `holter page` judge its journal in the same
way.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from holter import clock
from holter.clock import compact, rfc3339
from holter.coordinator.window.assembly import Assembly
from holter.diagnosis.correlate import Incident, can_pass, correlate, has_passed, stands
from holter.diagnosis.explain import explain, rank_causes
from holter.diagnosis.plots import plots
from holter.faults import CAUSES, DETECTORS, Detector, ExamKey, TableKey, Window
from holter.faults.family import engine_facts
from holter.halting.verdicts import decide
from holter.records import Action, Diagnosis, Evidence, ExamRequest, Finding, Severity, TableRequest

T = TypeVar("T")

DIAGNOSIS = "diagnosis"
"""Name under which failures to explain are counted, beside the detectors."""
FINAL_PATIENCE_NS = 60 * 10**9
"""The last judgement is made as if so many nanoseconds had passed, so that nobody is waited for any more."""

logger = logging.getLogger(__name__)


class IncidentTracker:
    """Keeps the incidents while they develop."""

    def __init__(self, run_id: str, action: Action, earlier: Sequence[Diagnosis] = ()) -> None:
        self._run_id = run_id
        self._action: Action = action
        """The most that may be done about a diagnosis."""
        self.count(earlier)
        self._incidents: dict[str, Incident] = {}
        self._openings: dict[str, tuple[int, float | None]] = {}
        """For each incident: when it was opened, and how many seconds after it began; None if that is not known."""
        self._absent_since_ns: dict[str, int] = {}
        """For each open incident that can pass and that no detector finds now, the time since when."""

    def count(self, earlier: Sequence[Diagnosis]) -> None:
        """Count the leading causes of these earlier incidents of the run as strikes."""
        self._earlier = [cause_of(diagnosis) for diagnosis in earlier]

    def settle(
        self,
        findings: Sequence[Finding],
        window: Window,
        now_ns: int,
        *,
        is_final: bool = False,
        passed: Collection[str] = (),
    ) -> Iterator[Diagnosis]:
        """Yield diagnoses that are new, changed or have passed; at the end all open ones, whose plots then show what followed.

        `passed`: in a replay, the incidents that the live run saw pass now. What cannot be explained is raised after
        the others, and tried again next time.
        """
        errors: list[Exception] = []
        for incident in self._to_explain(findings, window, now_ns, passed, is_final=is_final):
            after_s = _detected_after_s(incident.leading, window, now_ns)
            opening = self._openings.setdefault(incident.id, (now_ns, after_s))
            try:
                diagnosis = self._explain(incident, opening, _drawn(incident.leading, window, errors), now_ns)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
                continue
            self._incidents[incident.id] = incident
            yield diagnosis
        if errors:
            raise ExceptionGroup("findings that cannot be explained", errors)

    def _to_explain(
        self, findings: Sequence[Finding], window: Window, now_ns: int, passed: Collection[str], *, is_final: bool
    ) -> list[Incident]:
        changed = correlate(tuple(self._incidents.values()), findings, stamp=compact(now_ns))
        known = self._incidents | {incident.id: incident for incident in changed}
        if is_final:
            return [incident for incident in known.values() if incident.is_open or incident in changed]
        self._look_who_is_absent(known, findings, now_ns)
        over = [id_ for id_, since in self._absent_since_ns.items() if has_passed(known[id_], since, window, now_ns)]
        over += [id_ for id_ in passed if id_ in known and known[id_].is_open and id_ not in over]
        return [*changed, *(msgspec.structs.replace(known[id_], is_closed=True) for id_ in over)]

    def _look_who_is_absent(self, known: Mapping[str, Incident], findings: Sequence[Finding], now_ns: int) -> None:
        """Update since when open incidents have not been found.

        An incident is absent from the first judgement that does not find it: judgements are rare in a silence, and even
        rarer in a replay of one.
        """
        absent = [
            incident.id
            for incident in known.values()
            if incident.is_open and can_pass(incident) and not stands(incident, findings)
        ]
        self._absent_since_ns = {id_: self._absent_since_ns.get(id_, now_ns) for id_ in absent}

    def _explain(
        self, incident: Incident, opening: tuple[int, float | None], drawn: Sequence[Evidence], now_ns: int
    ) -> Diagnosis:
        (opened_ns, after_s), causes = opening, rank_causes(incident.leading)
        diagnosis = explain(
            incident.leading,
            incident.consequences,
            incident_id=incident.id,
            run_id=self._run_id,
            opened_at=rfc3339(opened_ns),
            detected_after_s=after_s,
            directive=decide(_gravity(incident), causes, self._action, detector=incident.leading.detector),
            strikes=1 + self._num_earlier(incident.id, causes[0].cause),
            plots=drawn,
        )
        return diagnosis if incident.is_open else msgspec.structs.replace(diagnosis, closed_at=rfc3339(now_ns))

    def _num_earlier(self, incident_id: str, cause: str) -> int:
        """Return how often this cause led an incident before this one."""
        others = [
            rank_causes(other.leading)[0].cause
            for other in self._incidents.values()
            if _number(other.id) < _number(incident_id) and other.merged_into is None
        ]
        return (self._earlier + others).count(cause)


def _gravity(incident: Incident) -> Severity:
    """Return the severity of the leading finding, or critical if it made a rank hang or die.

    A device's fault, for example, is a warning until then.
    """
    first = rank_causes(incident.leading)[0].cause
    if first in CAUSES and CAUSES[first].keeps_severity:
        return incident.leading.severity
    causes = [CAUSES.get(rank_causes(finding)[0].cause) for finding in incident.consequences]
    has_stopped = any(cause is not None and (cause.is_hang or cause.is_death) for cause in causes)
    return "critical" if has_stopped else incident.leading.severity


def cause_of(diagnosis: Diagnosis) -> str:
    """Return the slug of the leading cause."""
    return diagnosis.causes[0].cause if diagnosis.causes else "unknown"


def confidence_of(diagnosis: Diagnosis) -> float:
    """Return the confidence in the leading cause."""
    return diagnosis.causes[0].confidence if diagnosis.causes else 0.0


def _number(incident_id: str) -> int:
    """Return the number of an incident; a run counts its incidents, whenever they are opened."""
    return int(incident_id.rpartition("-")[2])


def _drawn(finding: Finding, window: Window, errors: list[Exception]) -> tuple[Evidence, ...]:
    """Make the plots; a plot that cannot be made must not cost the diagnosis."""
    try:
        return plots(window, finding)
    except Exception as error:  # noqa: BLE001 - raised by the caller
        errors.append(error)
        return ()


def _detected_after_s(finding: Finding, window: Window, now_ns: int) -> float | None:
    """Return the seconds since the fault began; None if nobody saw it begin.

    It began when the rank last moved, when it died, or with the first report of the faulty step.
    """
    facts = engine_facts(finding)
    known_ns = facts.get("began_at_ns") or facts.get("overdue_at_ns")
    if known_ns is not None:
        return max(0.0, round((now_ns - known_ns) / 1e9, 3))
    is_end = finding.detector in DETECTORS and DETECTORS[finding.detector].sees_ends
    deaths = [end.at_ns for end in window.processes.exits if is_end and end.rank in finding.ranks]
    view = window.step(finding.first_step)
    began_ns = min(deaths, default=view.first_seen_ns if view else None)
    return None if began_ns is None else max(0.0, round((now_ns - began_ns) / 1e9, 3))


@dataclass
class DetectorRunner:
    """Runs each detector separately: a failing one is counted and named, and never taken for health."""

    detectors: Sequence[Detector]
    stopwatch_s: Callable[[], float]
    """Returns seconds that never go back."""
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    failing: dict[str, str] = field(default_factory=dict)
    """Detectors that failed in their last judgement, with the error."""

    def judge(self, window: Window) -> list[Finding]:
        """Return the findings of all detectors."""
        return [finding for detector in self.detectors for finding in self._judge(detector, window)]

    def guard(self, name: str, call: Callable[[], T]) -> T | None:
        """Return the result of the call; None if it fails.

        The failure is counted under this name, shown, and logged once.
        """
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
        """Return a sentence for each detector that does not judge."""
        return [f"{name} fails to judge: {reason}" for name, reason in sorted(self.failing.items())]

    def _judge(self, detector: Detector, window: Window) -> list[Finding]:
        return self.guard(detector.name, lambda: list(detector.judge(window))) or []


@dataclass(frozen=True)
class Judgement:
    """The result of one look at everything."""

    findings: list[Finding]
    tables: tuple[TableKey, ...]
    """Tables to fetch before some findings can be explained."""
    exams: tuple[ExamKey, ...]
    """Examinations of ranks to ask for before some findings can be explained."""
    diagnoses: tuple[Diagnosis, ...]
    """Diagnoses that are new, better than before, or over."""


class Judge:
    """Judges what was heard: with its detectors it makes findings, and with its tracker incidents."""

    def __init__(self, assembly: Assembly, tracker: IncidentTracker, detectors: Sequence[Detector]) -> None:
        self.assembly = assembly
        self.tracker = tracker
        self.runner = DetectorRunner(detectors, clock.monotonic_s)
        self.findings: list[Finding] = []
        """The findings of the last judgement."""
        self._told: set[tuple[str, str]] = set()

    def judge(self, now_ns: int, *, is_final: bool = False, passed: Collection[str] = ()) -> Judgement:
        """Judge everything as of this moment; in a replay with the incidents that the live run saw pass now."""
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
        """Return the diagnoses to tell people about: each incident once for each leading cause, however often it is explained better."""
        found = []
        for diagnosis in diagnoses:
            key = (diagnosis.id, cause_of(diagnosis))
            if key not in self._told:
                self._told.add(key)
                found.append(diagnosis)
        return tuple(found)


def pending(finding: Finding, window: Window) -> list[TableKey | ExamKey]:
    """Return the evidence that this finding still waits for."""
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
    """Collect the diagnoses one by one, so that those made before a failure are kept."""
    for diagnosis in settled:
        found.append(diagnosis)  # noqa: PERF402 - a list would be lost with the failure
