"""What to do about a diagnosis, decided by a pure function that gives its reason.

    action asked for   what is directed
    observe            observe: recorded, nobody is called
    notify             notify; observe for what is only information
    halt               halt, for a critical cause that was observed directly by a detector that is trusted so far; else as notify

Where the action is less than halt, the reason says what would have been done.
"""

from collections.abc import Sequence

from holter.faults import CAUSES, DETECTORS
from holter.records import EXIT_CODE, Action, Cause, Directive, Severity


def decide(severity: Severity, causes: Sequence[Cause], action: Action, *, detector: str = "") -> Directive:
    """What is directed for a diagnosis of this severity and these causes, where the operator asked for `action`."""
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
    return f"{cause.cause} is critical and was observed directly"


def _why_no_halt(severity: Severity, causes: Sequence[Cause], detector: str) -> str:
    """Why this diagnosis does not halt a run; empty: it does."""
    if severity != "critical":
        return f"a {severity} does not halt a run: reported, training goes on"
    if not causes:
        return "no cause is known, and only a cause that was observed halts a run: training goes on"
    first = causes[0]
    if first.basis != "observation":
        return f"{first.cause} rests on {first.basis}, and only what was observed directly halts a run: reported, training goes on"
    if detector in DETECTORS and DETECTORS[detector].tried_on != "jobs":
        return f"{detector} is on trial, and only what is trusted halts a run: reported, training goes on"
    if first.cause in CAUSES and CAUSES[first.cause].is_death and _is_own_error(first):
        return "the script ended itself with an error of its own: it ends as it would have, reported"
    return ""


def _is_own_error(cause: Cause) -> bool:
    """An exception of the script's, not a signal and not `os._exit`: ending with it is what the script does about it."""
    ends = [proof.values for proof in cause.evidence if proof.kind == "process_exit"]
    said = str(ends[0].get("farewell") or "") if ends else ""
    return bool(said) and not ends[0].get("signal") and not said.startswith("os._exit")
