"""What follows from a diagnosis: which directive, and whether the numbers in a checkpoint are good. Pure, with reasons.

    action asked for   what is directed
    observe            observe: recorded, nobody is called
    notify             notify; observe for what is only information
    halt               halt, for a critical cause that was observed directly by a detector that is trusted so far; else as notify

If less is done than a halt, the reason says what would have been done.

    steps      … 38   39   40   41        a state of 40 completed steps holds steps 0 to 39
    NaN applied            ^40            it came after: healthy; applied at 39 or before: poisoned
    corruption         ^39 found          the weights were bad before step 39 began: a state of 39 steps is poisoned already
    replicas    =33    ≠39 compared       only the state of 33 steps is known to be good: those of 34 and more are suspect
    loss                ^40 rises         it was computed with the weights of 40 steps: they are suspect
    learning rate       ^40 jumps         the weights of 40 steps are still good: those of 41 and more are suspect

Which causes damage weights or optimizer, and from when, is declared by their entries (`CauseEntry.damage`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holter.faults import CAUSES, DETECTORS
from holter.faults.family import Damage
from holter.records import EXIT_CODE, Action, Cause, Diagnosis, Directive, Finding, Severity, Verdict
from holter.records.titles import titled


def decide(severity: Severity, causes: Sequence[Cause], action: Action, *, detector: str = "") -> Directive:
    """Decide on the directive for a diagnosis of this severity and these causes, where the operator set the action to `action`."""
    why_not = _why_no_halt(severity, causes, detector)
    if action == "observe":
        would = f"with halt it would be halted: {_why_halt(causes[0])}" if not why_not else f"with halt, too: {why_not}"
        return Directive(
            directive="observe",
            reason=f"the action is set to observe: recorded, nobody is called, training goes on ({would})",
        )
    if severity == "info":
        return Directive(directive="observe", reason="this is information, not a fault: training goes on")
    if action == "notify":
        would = f" (with halt it would be halted: {_why_halt(causes[0])})" if not why_not else ""
        return Directive(directive="notify", reason=f"the action is set to notify: reported, training goes on{would}")
    if why_not:
        return Directive(directive="notify", reason=why_not)
    return Directive(directive="halt", reason=_why_halt(causes[0]), exit_code=EXIT_CODE)


def _why_halt(cause: Cause) -> str:
    return f"{titled(cause.cause)} is critical and was observed directly"


def _why_no_halt(severity: Severity, causes: Sequence[Cause], detector: str) -> str:
    """Return why this diagnosis does not halt a run; empty if it does."""
    if severity != "critical":
        return f"a {severity} does not halt a run: reported, training goes on"
    if not causes:
        return "no cause is known, and only a cause that was observed halts a run: training goes on"
    first = causes[0]
    if first.basis != "observation":
        return f"{titled(first.cause)} rests on {first.basis}, and only what was observed directly halts a run: reported, training goes on"
    if detector in DETECTORS and DETECTORS[detector].tried_on != "jobs":
        return f"{detector} is on trial, and only what is trusted halts a run: reported, training goes on"
    if detector in DETECTORS and DETECTORS[detector].sees_ends and _is_own_error(first):
        return "the script ended itself with an error of its own: it ends as it would have, reported"
    return ""


def _is_own_error(cause: Cause) -> bool:
    """Whether the script ended itself with an exception, not by a signal or `os._exit`; ending so is its own reaction."""
    ends = [proof.values for proof in cause.evidence if proof.kind == "process_exit"]
    said = str(ends[0].get("farewell") or "") if ends else ""
    return bool(said) and not ends[0].get("signal") and not said.startswith("os._exit")


class Spoil(NamedTuple):
    """A fault that made the numbers bad, or suspect, from some state on."""

    verdict: Verdict
    first_bad: int
    """Completed steps of the first state that contains the fault."""
    why: str
    incident: str = ""


class CheckpointJudgement(NamedTuple):
    """A verdict on a checkpoint, with the sentence that explains it."""

    verdict: Verdict
    why: str
    incident: str = ""
    """Id of the incident that explains the fault; empty if there is none."""


@dataclass(frozen=True)
class Sight:
    """How much was seen of the steps in a state."""

    until_step: int = 0
    """All steps below this one were reported by every rank that lived."""
    compared_until: int | None = None
    """Completed steps of the last state in which replicas were compared and equal; None if no comparison is to be
    waited for."""
    blind: tuple[str, ...] = ()
    """Reasons why the reports may be incomplete."""


def spoils(findings: Iterable[Finding], diagnoses: Iterable[Diagnosis]) -> list[Spoil]:
    """Return the faults that reached weights or optimizer, poisoned before suspect, then earliest first."""
    found = [spoil for diagnosis in diagnoses for spoil in _of_diagnosis(diagnosis)]
    known = {spoil.first_bad for spoil in found if spoil.verdict == "poisoned"}
    for finding in findings:
        if is_applied(finding) and finding.first_step + 1 not in known:
            why = f"NaN or Inf was applied to the weights at step {finding.first_step}"
            found.append(Spoil("poisoned", finding.first_step + 1, why))
    return sorted(found, key=lambda spoil: (spoil.verdict != "poisoned", spoil.first_bad))


def of_state(step: int, spoiled: Sequence[Spoil], sight: Sight) -> CheckpointJudgement:
    """Judge a state of `step` completed steps, counted as findings count them; `spoiled` is in the order of `spoils`."""
    for spoil in spoiled:
        if spoil.first_bad <= step:
            return CheckpointJudgement(spoil.verdict, spoil.why, spoil.incident)
    if sight.blind:
        return CheckpointJudgement("unknown", f"not all was seen: {sight.blind[0]}")
    if sight.until_step < step:
        return CheckpointJudgement("unknown", f"step {sight.until_step} has not been reported by every rank")
    if sight.compared_until is None:
        return CheckpointJudgement(
            "healthy", "every step in it was seen, and none spoiled it; no replicas were compared"
        )
    if sight.compared_until < step:
        return CheckpointJudgement("unknown", f"{_compared(sight.compared_until)}, and not since")
    return CheckpointJudgement(
        "healthy", "every step in it was seen, none spoiled it, and replicas were equal afterwards"
    )


def of_halt(step: int, spoiled: Sequence[Spoil], compared_until: int | None = None) -> CheckpointJudgement:
    """Judge the state that a halt saves: all ranks had finished its last step, but a rank that holds or hangs reports no more.

    Replicas are not compared once more either: those that were not seen to differ are believed equal, and the verdict
    says when they were last compared.
    """
    found = of_state(step, spoiled, Sight(until_step=step))
    if found.verdict != "healthy":
        return found
    seen = f"; {_compared(compared_until)}" if compared_until is not None and compared_until < step else ""
    return CheckpointJudgement("healthy", f"nothing had spoiled it by step {step}{seen}")


def uncompared(step: int, compared_until: int | None) -> str:
    """Say until when replicas were found equal, if that is before this state; empty if they were equal in it."""
    until = -1 if compared_until is None else compared_until
    return _compared(until) if until < step else ""


def _compared(until: int) -> str:
    return f"replicas were last found equal after {until} steps" if until >= 0 else "replicas were never found equal"


def is_applied(finding: Finding) -> bool:
    """Whether the finding's fault went into the weights, whatever finding leads the incident."""
    entry = DETECTORS.get(finding.detector)
    return entry is not None and entry.sees_damage


def _of_diagnosis(diagnosis: Diagnosis) -> Iterator[Spoil]:
    """Yield the damage done by the diagnosis's cause and by its consequences, such as a loss that left its course."""
    if diagnosis.severity == "info" or not diagnosis.causes:
        return
    first = diagnosis.causes[0]
    for cause, step in ((first.cause, diagnosis.first_step), *_consequences(first)):
        damage = CAUSES[cause].damage if cause in CAUSES else None
        # What has passed no longer counts against a checkpoint; what is poisoned stays so.
        if damage is not None and (damage.verdict == "poisoned" or diagnosis.closed_at is None):
            agreed = diagnosis.agreed_steps if step == diagnosis.first_step else None
            yield _spoil(cause, damage, step, agreed, diagnosis.id)


def _consequences(cause: Cause) -> Iterator[tuple[str, int]]:
    """Yield (cause, first step) of the consequences that the evidence of an incident lists."""
    for proof in cause.evidence:
        if proof.kind == "consequence" and proof.values.get("severity") in ("critical", "warning"):
            yield str(proof.values.get("cause")), int(proof.values["first_step"])


def _spoil(cause: str, damage: Damage, first: int, agreed: int | None, incident: str) -> Spoil:
    if damage.begins == "with the step":
        return Spoil(damage.verdict, first + 1, f"{damage.why} at step {first} ({cause})", incident)
    first_bad = first if agreed is None else min(first, agreed + 1)
    since = f"since step {first}" if first_bad == first else f"found at step {first}; {_compared(first_bad - 1)}"
    return Spoil(damage.verdict, first_bad, f"{damage.why}, {since} ({cause})", incident)
