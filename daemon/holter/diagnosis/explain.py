"""An incident becomes a diagnosis: the public record that a person, a pager and a test read."""

from collections.abc import Sequence

import msgspec

from holter.diagnosis.ranking import rank_causes
from holter.records import Cause, Diagnosis, Directive, Evidence, Finding, Severity

WORST_FIRST: tuple[Severity, ...] = ("critical", "warning", "info")
"""An incident is as grave as the gravest of what it brought about."""
MAX_STRIKES = 3
"""After so many returns of the same cause the assumption itself is in doubt."""


def explain(  # noqa: PLR0913 - the parts of a public record
    leading: Finding,
    consequences: Sequence[Finding] = (),
    *,
    incident_id: str,
    run_id: str,
    opened_at: str,
    detected_after_s: float,
    directive: Directive,
    strikes: int = 1,
    plots: Sequence[Evidence] = (),
) -> Diagnosis:
    """The diagnosis of what `leading` and its consequences show; the caller gives identity, times, plots and what was decided."""
    causes = rank_causes(leading)
    assert causes, f"no line of the differential speaks of {leading.detector}"
    first, *others = causes
    causes = (_with(first, [_consequence(finding) for finding in consequences]), *others)
    if strikes >= MAX_STRIKES:
        causes = _in_doubt(causes, strikes)
    causes = (_with(causes[0], plots), *causes[1:])
    return Diagnosis(
        id=incident_id,
        run_id=run_id,
        severity=min((leading, *consequences), key=lambda finding: WORST_FIRST.index(finding.severity)).severity,
        symptom=leading.summary,
        first_step=leading.first_step,
        detected_step=leading.detected_step,
        agreed_steps=leading.agreed_steps,
        detected_after_s=detected_after_s,
        opened_at=opened_at,
        strikes=strikes,
        causes=causes,
        action=directive,
    )


def _consequence(finding: Finding) -> Evidence:
    return Evidence(
        kind="consequence",
        summary=finding.summary,
        values={"detector": finding.detector, "first_step": finding.first_step, "ranks": list(finding.ranks)},
    )


def _in_doubt(causes: tuple[Cause, ...], strikes: int) -> tuple[Cause, ...]:
    """Put the alternatives first: this cause was named, presumably mended, and came back."""
    first, *others = causes
    if others:
        text = f"{first.cause} was diagnosed {strikes} times and came back: the assumption may be wrong, so the alternatives are put first"
    else:
        text = f"{first.cause} was diagnosed {strikes} times and came back: the assumption may be wrong, and no alternative fits what was seen"
    doubt = Evidence(kind="strikes", summary=text, values={"strikes": strikes})
    head, *tail = (*others, first)
    return (_with(head, [doubt]), *tail)


def _with(cause: Cause, evidence: Sequence[Evidence]) -> Cause:
    return msgspec.structs.replace(cause, evidence=(*cause.evidence, *evidence))
