"""Verdicts on a run: findings, and the diagnosis that people and pagers read."""

from typing import Any, Literal

import msgspec

from holter.records.observation import ExamDepth

Severity = Literal["critical", "warning", "info"]
Basis = Literal["observation", "documented", "inference"]
Action = Literal["observe", "notify", "halt"]


class TableRequest(msgspec.Struct, frozen=True):
    """Evidence that a finding lacks: these ranks' tables of a class at a step."""

    tensor_class: str
    step: int
    ranks: tuple[int, ...]


class ExamRequest(msgspec.Struct, frozen=True):
    """Evidence that a finding lacks: a look at these ranks, not before this moment."""

    asked_ns: int
    depth: ExamDepth
    ranks: tuple[int, ...]


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """The collective that a diagnosis names."""

    group: str
    sequence: int
    operation: str


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One proof, with its numbers."""

    kind: str
    summary: str
    values: dict[str, Any] = {}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A detector's verdict: what is wrong, where, since when, with the numbers that prove it."""

    detector: str
    severity: Severity
    first_step: int
    detected_step: int
    ranks: tuple[int, ...]
    """The culprits if the detector can tell them; else every rank that shows the fault."""
    tensors: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    summary: str
    facts: dict[str, Any] = {}
    """What was seen, and what was looked for and not seen: the differential diagnosis reads these."""
    evidence: tuple[Evidence, ...] = ()
    collective: Collective | None = None
    agreed_steps: int | None = None
    """For faults that only a comparison shows: completed steps of the last state that was compared and good, -1 if none was; else None."""
    needs: tuple[TableRequest | ExamRequest, ...] = ()
    """Not enough evidence yet: ask for these, and judge again."""


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, in six parts; and what comes after it."""

    do: str
    changes: str
    does_not_fix: str
    expect: str
    verify: str
    otherwise: str
    alternatives: tuple[str, ...] = ()
    """The small fix and the thorough one."""
    prevent: str = ""
    """What to watch or test from now on: a setting, an alert or a test."""
    roll_back: str = ""
    """The way back, if the fix does harm."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate root cause; the slug is from the public catalogue."""

    cause: str
    confidence: float
    basis: Basis
    ranks: tuple[int, ...]
    tensors: tuple[str, ...]
    modules: tuple[str, ...]
    collective: Collective | None = None
    mechanism: str
    evidence: tuple[Evidence, ...]
    would_refute: str
    fix: Fix
    missing: tuple[str, ...] = ()
    """Below a confidence of 0.70: which evidence would decide, and how to get it."""
    sources: tuple[str, ...] = ()
    """What a documented pattern rests on: issue, paper, page."""


class Hypothesis(msgspec.Struct, frozen=True, kw_only=True):
    """Another cause that fits what was seen, to be tested."""

    cause: str
    confidence: float
    confirm: str
    """What would confirm it."""
    rule_out: str
    """What would rule it out."""
    looked_at: str
    """Whether that was looked at."""


class Healthy(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint whose numbers are good, as far as anybody knows."""

    step: int
    """Completed optimizer steps in it."""
    path: str
    """What to give to the framework; relative to the run directory if it is a halt's."""


class Directive(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done about a diagnosis, and why."""

    directive: Action
    reason: str
    checkpoint: str | None = None
    exit_code: int | None = None
    last_healthy: Healthy | None = None
    """The newest healthy checkpoint that is known when the diagnosis is made, the script's own too."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """An incident, explained: ranked causes, best first. Public JSON; fields are added, never changed."""

    schema: int = 1
    id: str
    run_id: str
    severity: Severity
    symptom: str
    first_step: int
    detected_step: int
    agreed_steps: int | None = None
    """Where ranks were compared: completed steps of the last state in which they agreed, -1 if there was none. The fault may be as old as that."""
    detected_after_s: float | None
    """From the beginning of the fault to the diagnosis, as far as is known; None: nobody saw it begin."""
    opened_at: str
    closed_at: str | None = None
    strikes: int = 1
    causes: tuple[Cause, ...]
    action: Directive
    hypotheses: tuple[Hypothesis, ...] = ()
    """Other causes, in the order to test, one change at a time."""
    seen_before: tuple[str, ...] = ()
    """What the memory of earlier runs knows of it."""
