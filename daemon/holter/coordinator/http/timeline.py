"""What happened to a run, in order: findings, incidents, checkpoints and halts. Pure: it compares states and reports changes.

It is bounded: of a night of flapping findings the last ones are kept, and incidents, which are few, are read from their
own records.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from holter.clock import rfc3339
from holter.coordinator.judge import cause_of
from holter.diagnosis import report
from holter.halting.vault.store import ScriptSave, Sealed
from holter.records import Diagnosis, Finding, Severity

Kind = Literal["finding", "incident", "checkpoint", "halt"]

MAX_HAPPENINGS = 256
_OUTCOMES: dict[str, Severity] = {"completed": "info", "incomplete": "critical", "failed": "critical"}
"""Severity of a halt by its outcome; a warning for all others."""


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the timeline."""

    number: int
    """Number that counts up, so that a reader knows what is new."""
    at: str
    kind: Kind
    severity: Severity
    text: str
    incident: str = ""


class Timeline:
    """What happened, each thing once, however often it is looked at."""

    def __init__(self) -> None:
        self._happenings: deque[Happening] = deque(maxlen=MAX_HAPPENINGS)
        self._number = 0
        self._findings: dict[tuple[str, int, tuple[int, ...]], Finding] = {}
        self._incidents: dict[str, tuple[str, str | None]] = {}
        """Id -> (cause, when it was closed)."""
        self._saves: dict[tuple[str, int], str] = {}
        """(path, step) -> verdict."""
        self._halt = ""
        """What was last said of a halt."""

    def all(self) -> tuple[Happening, ...]:
        """Return all lines, oldest first."""
        return tuple(self._happenings)

    def note(self, kind: Kind, text: str, now_ns: int, severity: Severity = "info") -> None:
        """Add something that looking at the state would not show."""
        self._say(kind, severity, text, rfc3339(now_ns))

    def look_at_findings(self, findings: Iterable[Finding], now_ns: int) -> None:
        """Add findings that came or went; a finding that waits for evidence is no verdict yet."""
        stands = {(one.detector, one.first_step, one.ranks[:1]): one for one in findings if not one.needs}
        for key, finding in stands.items():
            if key not in self._findings:
                self._say("finding", finding.severity, f"{finding.detector}: {finding.summary}", rfc3339(now_ns))
        for key, finding in self._findings.items():
            if key not in stands:
                self._say("finding", "info", f"{finding.detector} is no longer found", rfc3339(now_ns))
        # All of them, because a finding that is not remembered would be news again.
        self._findings = stands

    def look_at_incidents(self, diagnoses: Iterable[Diagnosis]) -> None:
        """Add incidents that were opened, explained differently, or closed."""
        for diagnosis in diagnoses:
            cause, known = cause_of(diagnosis), self._incidents.get(diagnosis.id)
            if known == (cause, diagnosis.closed_at):
                continue
            self._incidents[diagnosis.id] = (cause, diagnosis.closed_at)
            line = report.headline(diagnosis) if diagnosis.causes else f"{diagnosis.severity}: {diagnosis.symptom}"
            if known is None or known[0] != cause:
                word = "opened" if known is None else "is now explained otherwise"
                self._say("incident", diagnosis.severity, f"{word}: {line}", diagnosis.opened_at, diagnosis.id)
            if diagnosis.closed_at is not None:
                self._say("incident", "info", f"closed: {line}", diagnosis.closed_at, diagnosis.id)

    def look_at_saves(self, saves: Iterable[ScriptSave], sealed: Iterable[Sealed], now_ns: int) -> None:
        """Add checkpoints that were finished, and changes of their verdicts."""
        for save in saves:
            key, known = (save.path, save.step), self._saves.get((save.path, save.step))
            if known != save.verdict:
                self._saves[key] = save.verdict
                at = save.saved_at if known is None else rfc3339(now_ns)
                self._say_save(f"checkpoint of step {save.step} ({save.path})", save.verdict, save.why, at)
        for one in sealed:
            key = (str(one.path), one.manifest.step)
            if key not in self._saves:
                self._saves[key] = one.verdict
                text = f"a halt kept step {one.manifest.step} ({one.path.name})"
                self._say_save(text, one.verdict, one.why, one.manifest.sealed_at)

    def look_at_halt(self, halt: Mapping[str, Any] | None, now_ns: int) -> None:
        """Add the progress of a halt, or its result."""
        known = halt or {}
        number, step = (f" {known[name]}" if known.get(name) is not None else "" for name in ("number", "step"))
        outcome: str = known.get("outcome") or ""
        course = "" if halt is None else f"halt{number}: {outcome.replace('_', ' ') or known.get('course')}"
        why = known.get("text") if outcome else known.get("reason")
        text = f"{course}{step and f', step{step}'}{f', {why}' if why else ''}" if course else ""
        if text and text != self._halt:
            self._say("halt", _OUTCOMES.get(outcome, "warning"), text, rfc3339(now_ns))
        self._halt = text

    def _say_save(self, what: str, verdict: str, why: str, at: str) -> None:
        severity: Severity = (
            "critical" if verdict == "poisoned" else "warning" if verdict in ("incomplete", "suspect") else "info"
        )
        self._say("checkpoint", severity, f"{what}: {verdict}, {why}", at)

    def _say(self, kind: Kind, severity: Severity, text: str, at: str, incident: str = "") -> None:
        self._number += 1
        self._happenings.append(
            Happening(number=self._number, at=at, kind=kind, severity=severity, text=text, incident=incident)
        )
