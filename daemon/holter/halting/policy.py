"""What to do about a diagnosis, decided by a pure function that gives its reason.

    action asked for   what is directed
    observe            observe: recorded, nobody is called
    notify             notify; observe for what is only information
    halt               halt, for a critical cause that was observed directly; else as notify

A halt is decided here and carried out elsewhere. That other part does not exist yet, so a halt is directed as `notify`, and says so.
"""

from collections.abc import Sequence

from holter.records import Action, Cause, Directive, Severity

ALREADY_OVER = frozenset({"rank_dead"})
"""Causes after which nobody trains on."""


def decide(severity: Severity, causes: Sequence[Cause], action: Action) -> Directive:
    """What is directed for a diagnosis of this severity and these causes, where the operator asked for `action`."""
    if action == "observe":
        return Directive(
            directive="observe", reason="the action is set to observe: recorded, nobody is called, training goes on"
        )
    if severity == "info":
        return Directive(directive="observe", reason="this is information, not a fault: training goes on")
    if action == "notify":
        return Directive(directive="notify", reason="the action is set to notify: reported, training goes on")
    return _instead_of_halt(severity, causes)


def _instead_of_halt(severity: Severity, causes: Sequence[Cause]) -> Directive:
    if severity != "critical":
        return Directive(directive="notify", reason=f"a {severity} does not halt a run: reported, training goes on")
    if not causes:
        return Directive(
            directive="notify",
            reason="no cause is known, and only a cause that was observed halts a run: training goes on",
        )
    first = causes[0]
    if first.basis != "observation":
        reason = f"{first.cause} rests on {first.basis}, and only what was observed directly halts a run: reported, training goes on"
        return Directive(directive="notify", reason=reason)
    if first.cause in ALREADY_OVER:
        reason = f"{first.cause} was observed directly; a halt would save what the survivors hold, which this version cannot carry out"
        return Directive(directive="notify", reason=reason)
    reason = f"{first.cause} was observed directly and calls for a halt, which this version cannot carry out: training goes on, stop it yourself"
    return Directive(directive="notify", reason=reason)
