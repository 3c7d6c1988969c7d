"""Differential diagnosis: which causes fit what a detector saw, and what it looked for and did not see.

The rows of all causes (`CauseEntry.rows`) hold all of this knowledge. A fact is True (seen), False (looked for, not
seen) or None (nobody looked).

    a row fits when   every fact in `seen` is True, in `absent` is False, in `unknown` is None, and no fact in `unless` is True

Of the rows that fit, the one with the highest confidence counts for each cause. A confidence under 0.70 must say which
evidence is missing. An incident with its ranked causes becomes a `Diagnosis`: the public record that a person, a pager
and a test read.
"""

import re
from collections.abc import Iterable, Sequence

import msgspec

from holter.faults import CAUSES
from holter.faults.aftercare import complete, sources_of
from holter.faults.family import CauseEntry, Row, engine_facts
from holter.faults.shared.wording import modules_of
from holter.records import Basis, Cause, Diagnosis, Directive, Evidence, Finding, Hypothesis, Severity

CAPS: dict[Basis, float] = {"observation": 0.95, "documented": 0.85, "inference": 0.70}
"""Highest confidence that each basis allows."""
NEGLIGIBLE = 0.20
"""Alternative causes below this confidence are left out; the leading cause is named however low its confidence is."""
SURE = 0.70
"""Below this confidence, a diagnosis says which evidence is missing."""
WORST_FIRST: tuple[Severity, ...] = ("critical", "warning", "info")
"""Severities from worst to mildest; an incident takes the worst of all its findings."""
MAX_STRIKES = 3
"""After so many returns of the same cause, the diagnosis itself is in doubt."""

NOT_LOOKED = "This was not looked for."
SEEN = "This was seen, and speaks against it."
NOT_SEEN = "This was looked for and not seen."
LOOKED = (NOT_LOOKED, SEEN, NOT_SEEN)

STOP = re.compile(
    r"^Stop the run(?:\.|:) |(?<=[.)]) (?:Then e|E)nd the job(?: with SIGKILL \([^)]*\))? and resume from the last good checkpoint\."
)
"""The part of a fix that tells people to stop a running job; it is removed once the run was halted."""

MAX_REMEMBERED = 1024
_remembered: dict[int, tuple[Finding, tuple[Cause, ...]]] = {}
"""Ranked causes by the id() of their finding. The finding is kept too, so that no other object gets its id."""


def rank_causes(finding: Finding) -> tuple[Cause, ...]:
    """Return every cause that fits, highest confidence first; never empty for a finding of a detector in `faults.ALL`.

    Cached for each finding, because correlating, explaining and closing all ask within one judgement.
    """
    known = _remembered.get(id(finding))
    if known is None:
        if len(_remembered) >= MAX_REMEMBERED:
            _remembered.clear()
        known = _remembered[id(finding)] = (finding, _ranked(finding))
    return known[1]


def _ranked(finding: Finding) -> tuple[Cause, ...]:
    return rank_by(((entry, row) for entry in CAUSES.values() for row in entry.rows), finding)


def rank_by(rows: Iterable[tuple[CauseEntry, Row]], finding: Finding) -> tuple[Cause, ...]:
    """Return every cause of which one of these rows fits, highest confidence first."""
    fitting: dict[str, tuple[CauseEntry, list[Row]]] = {}
    for entry, row in rows:
        if row.fits(finding):
            fitting.setdefault(entry.cause, (entry, []))[1].append(row)
    best = [(entry, max(rows, key=_sureness)) for entry, rows in fitting.values()]
    ranked = sorted(best, key=lambda one: _sureness(one[1]), reverse=True)
    return tuple(
        _cause(entry, row, finding)
        for place, (entry, row) in enumerate(ranked)
        if place == 0 or _sureness(row) >= NEGLIGIBLE
    )


def top_cause(finding: Finding) -> str:
    """Return the slug of the most likely cause; empty if none fits."""
    causes = rank_causes(finding)
    return causes[0].cause if causes else ""


def _sureness(row: Row) -> float:
    return min(row.confidence, CAPS[row.basis])


def _cause(entry: CauseEntry, row: Row, finding: Finding) -> Cause:
    confidence = _sureness(row)
    tensors = _tensors(row, finding)
    gap = (Evidence(kind="missing", summary=row.missing),) if confidence < SURE else ()
    return Cause(
        cause=entry.cause,
        confidence=confidence,
        basis=row.basis,
        ranks=tuple(engine_facts(finding).get("compared_ranks", finding.ranks))
        if row.names == "everyone"
        else finding.ranks,
        tensors=tensors,
        modules=finding.modules if row.tensors == "finding" else modules_of(tensors),
        collective=finding.collective,
        mechanism=entry.mechanism,
        evidence=(*finding.evidence, *gap),
        missing=(row.missing,) if gap else (),
        would_refute=f"{entry.would_refute} {_looked(entry, finding)}",
        fix=complete(entry),
        sources=sources_of(entry.cause) if row.basis == "documented" else (),
    )


def _tensors(row: Row, finding: Finding) -> tuple[str, ...]:
    if row.tensors == "finding":
        return finding.tensors
    facts = engine_facts(finding)
    return tuple(
        facts.get("parameter_tensors", ()) if row.tensors == "parameters" else facts.get("gradient_tensors", ())
    )


def _looked(entry: CauseEntry, finding: Finding) -> str:
    value = finding.facts.get(entry.refuting_fact)
    if value is None:
        return NOT_LOOKED
    return SEEN if value is entry.is_refuted_by else NOT_SEEN


def explain(  # noqa: PLR0913 - the parts of a public record
    leading: Finding,
    consequences: Sequence[Finding] = (),
    *,
    incident_id: str,
    run_id: str,
    opened_at: str,
    detected_after_s: float | None,
    directive: Directive,
    strikes: int = 1,
    plots: Sequence[Evidence] = (),
    causes: tuple[Cause, ...] = (),
) -> Diagnosis:
    """Write the diagnosis of a finding and its consequences.

    The caller supplies identity, times, plots and the directive, and also the causes if no live detector made the
    finding.
    """
    causes = causes or rank_causes(leading)
    assert causes, f"no line of the differential speaks of {leading.detector}"
    first, *others = causes
    causes = (_with(first, [_consequence(finding) for finding in consequences]), *others)
    if strikes >= MAX_STRIKES:
        causes = _in_doubt(causes, strikes)
    causes = (_with(causes[0], plots), *causes[1:])
    return Diagnosis(
        id=incident_id,
        run_id=run_id,
        severity=_severity(causes[0].cause, leading, consequences),
        symptom=leading.summary,
        first_step=leading.first_step,
        detected_step=leading.detected_step,
        agreed_steps=leading.agreed_steps,
        detected_after_s=detected_after_s,
        opened_at=opened_at,
        strikes=strikes,
        causes=causes,
        action=directive,
        hypotheses=hypotheses(causes),
    )


def hypotheses(causes: Sequence[Cause]) -> tuple[Hypothesis, ...]:
    """Return the causes behind the first in the order to test them, each with what would confirm it and what would rule it out."""
    return tuple(
        Hypothesis(
            cause=cause.cause,
            confidence=cause.confidence,
            confirm=f"Get this: {cause.missing[0]}"
            if cause.missing
            else f"{cause.fix.do} Then expect: {cause.fix.expect}",
            rule_out=next(
                (
                    cause.would_refute.removesuffix(said).rstrip()
                    for said in LOOKED
                    if cause.would_refute.endswith(said)
                ),
                cause.would_refute,
            ),
            looked_at=next((said for said in LOOKED if cause.would_refute.endswith(said)), NOT_LOOKED),
        )
        for cause in causes[1:]
    )


def strike_out(diagnosis: Diagnosis, strikes: int, lessons: str) -> Diagnosis:
    """Record that so many fixes of this cause did not hold, in this run and earlier ones, with the lessons.

    A cause that was only inferred gives way to its alternatives.
    """
    is_known = any(evidence.kind == "strikes" for evidence in diagnosis.causes[0].evidence)
    is_seen = diagnosis.causes[0].basis == "observation" and diagnosis.causes[0].confidence >= SURE
    # Concurrent runs may have one fault each: what this run shows by itself is not overruled by the others.
    causes = diagnosis.causes if is_known or is_seen else _in_doubt(diagnosis.causes, strikes)
    causes = (_with(causes[0], [Evidence(kind="strikes", summary=lessons, values={"strikes": strikes})]), *causes[1:])
    return msgspec.structs.replace(diagnosis, strikes=strikes, causes=causes, hypotheses=hypotheses(causes))


def _severity(cause: str, leading: Finding, consequences: Sequence[Finding]) -> Severity:
    if cause in CAUSES and CAUSES[cause].keeps_severity:
        return leading.severity
    return min((leading, *consequences), key=lambda finding: WORST_FIRST.index(finding.severity)).severity


def after_halt(causes: Sequence[Cause], go_on: str) -> tuple[Cause, ...]:
    """Return the causes of a halted run, with fixes that say where to resume from instead of telling people to stop it."""
    return tuple(
        msgspec.structs.replace(cause, fix=msgspec.structs.replace(cause.fix, do=_do_after_halt(cause.fix.do, go_on)))
        for cause in causes
    )


def _do_after_halt(do: str, go_on: str) -> str:
    if do.endswith(go_on):
        return do
    rest = STOP.sub("", do, count=1)
    return f"{rest[:1].upper()}{rest[1:]} {go_on}"


def _consequence(finding: Finding) -> Evidence:
    return Evidence(
        kind="consequence",
        summary=finding.summary,
        values={
            "detector": finding.detector,
            "cause": top_cause(finding),
            "severity": finding.severity,
            "first_step": finding.first_step,
            "ranks": list(finding.ranks),
        },
    )


def _in_doubt(causes: tuple[Cause, ...], strikes: int) -> tuple[Cause, ...]:
    """Put the alternatives first, because this cause was named, presumably repaired, and came back."""
    first, *others = causes
    so = "so the alternatives are put first" if others else "and no alternative fits what was seen"
    text = f"{first.cause} was diagnosed {strikes} times and came back: the assumption may be wrong, {so}"
    doubt = Evidence(kind="strikes", summary=text, values={"strikes": strikes})
    head, *tail = (*others, first)
    return (_with(head, [doubt]), *tail)


def _with(cause: Cause, evidence: Sequence[Evidence]) -> Cause:
    return msgspec.structs.replace(cause, evidence=(*cause.evidence, *evidence))
