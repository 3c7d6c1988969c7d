"""The run's incidents and their diagnoses, kept from one judgement to the next. Pure.

Detectors keep nothing and find the same fault again each time; `correlate` recognises it, and only what is new or better
understood is explained.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holter.clock import compact, rfc3339
from holter.diagnosis.correlate import Incident, can_pass, correlate, has_passed, stands
from holter.diagnosis.explain import explain, rank_causes
from holter.diagnosis.plots import plots
from holter.faults import DETECTORS, Window
from holter.faults.family import engine_facts
from holter.halting.decide import decide
from holter.records import Action, Diagnosis, Evidence, Finding


@dataclass(frozen=True)
class _Opening:
    """When an incident was opened, and how long after it began."""

    at_ns: int
    detected_after_s: float


class IncidentTracker:
    """Incidents in the making."""

    def __init__(self, run_id: str, action: Action, earlier: Sequence[Diagnosis] = ()) -> None:
        self._run_id = run_id
        self._action: Action = action
        """The most that may be done."""
        self.count(earlier)
        self._incidents: dict[str, Incident] = {}
        self._openings: dict[str, _Opening] = {}
        self._absent_since_ns: dict[str, int] = {}
        """Open incidents that can pass and that no detector finds now -> since when."""

    def count(self, earlier: Sequence[Diagnosis]) -> None:
        """These incidents were found earlier in the same run: their leading causes count as strikes."""
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
        """Diagnoses that are new, have changed or have passed, at the end all that are open: what came after is seen in their plots.

        `passed`: incidents that the live run saw pass now, in a replay. What cannot be explained is raised after the others, and tried
        again next time.
        """
        errors: list[Exception] = []
        for incident in self._to_explain(findings, window, now_ns, passed, is_final=is_final):
            after_s = _detected_after_s(incident.leading, window, now_ns)
            opening = self._openings.setdefault(incident.id, _Opening(now_ns, after_s))
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
        """An incident is absent from the first judgement that does not find it: judgements are rare in a silence, and rarer in a replay of one."""
        absent = [
            incident.id
            for incident in known.values()
            if incident.is_open and can_pass(incident) and not stands(incident, findings)
        ]
        self._absent_since_ns = {id_: self._absent_since_ns.get(id_, now_ns) for id_ in absent}

    def _explain(self, incident: Incident, opening: _Opening, drawn: Sequence[Evidence], now_ns: int) -> Diagnosis:
        causes = rank_causes(incident.leading)
        diagnosis = explain(
            incident.leading,
            incident.consequences,
            incident_id=incident.id,
            run_id=self._run_id,
            opened_at=rfc3339(opening.at_ns),
            detected_after_s=opening.detected_after_s,
            directive=decide(incident.leading.severity, causes, self._action, detector=incident.leading.detector),
            strikes=1 + self._num_earlier(incident.id, causes[0].cause),
            plots=drawn,
        )
        is_over = not incident.is_open
        return msgspec.structs.replace(diagnosis, closed_at=rfc3339(now_ns)) if is_over else diagnosis

    def _num_earlier(self, incident_id: str, cause: str) -> int:
        """How often this cause led an incident before this one."""
        others = [
            rank_causes(other.leading)[0].cause
            for other in self._incidents.values()
            if _number(other.id) < _number(incident_id) and other.merged_into is None
        ]
        return (self._earlier + others).count(cause)


def cause_of(diagnosis: Diagnosis) -> str:
    """The leading cause's slug."""
    return diagnosis.causes[0].cause if diagnosis.causes else "unknown"


def confidence_of(diagnosis: Diagnosis) -> float:
    """In the leading cause."""
    return diagnosis.causes[0].confidence if diagnosis.causes else 0.0


def _number(incident_id: str) -> int:
    """Incidents of a run are counted, whenever they were opened."""
    return int(incident_id.rpartition("-")[2])


def _drawn(finding: Finding, window: Window, errors: list[Exception]) -> tuple[Evidence, ...]:
    """A plot that cannot be made costs no diagnosis."""
    try:
        return plots(window, finding)
    except Exception as error:  # noqa: BLE001 - raised by the caller
        errors.append(error)
        return ()


def _detected_after_s(finding: Finding, window: Window, now_ns: int) -> float:
    """Seconds since the death, since a deadline passed, or since the first report of the step at which it began."""
    overdue_ns = engine_facts(finding).get("overdue_at_ns")
    if overdue_ns is not None:
        return max(0.0, round((now_ns - overdue_ns) / 1e9, 3))
    is_end = finding.detector in DETECTORS and DETECTORS[finding.detector].sees_ends
    deaths = [end.at_ns for end in window.processes.exits if is_end and end.rank in finding.ranks]
    view = window.step(finding.first_step)
    began_ns = min(deaths, default=view.first_seen_ns if view else now_ns)
    return max(0.0, round((now_ns - began_ns) / 1e9, 3))
