"""Verdicts on a run: the findings, and the diagnosis that people and pagers read."""

from typing import Any, Literal

import msgspec

from holter.records.observation import ExamDepth

Severity = Literal["critical", "warning", "info"]
Basis = Literal["observation", "documented", "inference"]
Action = Literal["observe", "notify", "halt"]


class TableRequest(msgspec.Struct, frozen=True):
    """Missing evidence of a finding: the fingerprint tables of a class of tensors on these ranks at a step."""

    tensor_class: str
    step: int
    ranks: tuple[int, ...]


class ExamRequest(msgspec.Struct, frozen=True):
    """Missing evidence of a finding: an examination of these ranks that is not older than `asked_ns`."""

    asked_ns: int
    depth: ExamDepth
    ranks: tuple[int, ...]


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """The collective that a diagnosis is about."""

    group: str
    sequence: int
    operation: str


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of evidence, with its numbers."""

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
    """The culprits if the detector can tell them, else every rank that shows the fault."""
    tensors: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    summary: str
    facts: dict[str, Any] = {}
    """What was seen, and what was looked for and not seen; used by the differential diagnosis."""
    evidence: tuple[Evidence, ...] = ()
    collective: Collective | None = None
    agreed_steps: int | None = None
    """For faults that only a comparison between ranks shows: completed steps of the last state that agreed, -1 if none
    did. None for other faults."""
    needs: tuple[TableRequest | ExamRequest, ...] = ()
    """Evidence to ask for before judging again; empty if the evidence suffices."""


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """What to do about a cause, in six parts, and what should follow."""

    do: str
    changes: str
    does_not_fix: str
    expect: str
    verify: str
    otherwise: str
    alternatives: tuple[str, ...] = ()
    """Other fixes: a smaller one and a thorough one."""
    prevent: str = ""
    """What to watch or test from now on: a setting, an alert or a test."""
    roll_back: str = ""
    """How to undo the fix if it does harm."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One possible root cause; its slug is listed in the public catalogue."""

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
    """For a confidence below 0.70: which evidence would decide, and how to get it."""
    sources: tuple[str, ...] = ()
    """What a documented pattern is based on: issue, paper or page."""


class Hypothesis(msgspec.Struct, frozen=True, kw_only=True):
    """Another cause that fits the observations and should be tested."""

    cause: str
    confidence: float
    confirm: str
    """Which observation would confirm it."""
    rule_out: str
    """Which observation would rule it out."""
    looked_at: str
    """Whether that was checked in this run, in words."""


class Healthy(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint whose numbers are good, as far as is known."""

    step: int
    """Completed optimizer steps in it."""
    path: str
    """Path to give to the framework; relative to the run directory if it is a halt's checkpoint."""


class Directive(msgspec.Struct, frozen=True, kw_only=True):
    """What should be done about a diagnosis, and why."""

    directive: Action
    reason: str
    checkpoint: str | None = None
    exit_code: int | None = None
    last_healthy: Healthy | None = None
    """The newest healthy checkpoint known when the diagnosis is made; it may be one of the script's own."""


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
    """For ranks that were compared: completed steps of the last state in which they agreed, -1 if there was none. The
    fault may be as old as that."""
    detected_after_s: float | None
    """Seconds from the beginning of the fault to the diagnosis; None if nobody saw it begin."""
    opened_at: str
    closed_at: str | None = None
    strikes: int = 1
    causes: tuple[Cause, ...]
    action: Directive
    hypotheses: tuple[Hypothesis, ...] = ()
    """Other causes, in the order to test them, one change at a time."""
    seen_before: tuple[str, ...] = ()
    """What is remembered of this fault from earlier runs."""
