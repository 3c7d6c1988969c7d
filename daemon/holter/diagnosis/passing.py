"""When an incident is over. Pure.

    finding    stands ........ gone                       back: another incident, another strike
    incident   open ..............|-- HOLD_NS, and steps --| closed

Only causes that leave nothing behind can pass, and only while the job goes on: a rank that nobody sees any more has not recovered,
and weights that took a NaN are not mended by a window that forgets. All other causes stay until the run ends.
"""

from collections.abc import Iterable

from holter.diagnosis.correlate import Incident, brings_about, is_same
from holter.diagnosis.ranking import top_cause
from holter.faults.window import Window
from holter.records import Finding

HOLD_NS = 60 * 10**9
"""So long nothing of an incident must have been found."""

STALLS = frozenset(
    {
        "rank_missing_from_collective",
        "rank_stuck_in_python",
        "interpreter_locked",
        "rank_suspended",
        "host_unreachable",
        "stalled_data_loader",
        "stalled_checkpoint",
    }
)
"""Over when the ranks move on."""
PASSES: dict[str, int] = {
    **dict.fromkeys(STALLS, 1),
    # As many as its detector looks at to see that a rank is well again, and more.
    **dict.fromkeys(("slow_compute", "slow_input", "slow_device"), 25),
    # As many as a rise must last to be one.
    **dict.fromkeys(("loss_divergence", "loss_plateau"), 30),
}
"""Cause -> steps that the job must have completed without it."""
MEASURED_AGAINST_THE_PAST = frozenset({"loss_divergence"})
"""Not found any more can mean forgotten: these pass only while the step at which they began is remembered."""


def can_pass(incident: Incident) -> bool:
    """Whether everything in it leaves nothing behind."""
    found = (incident.leading, *incident.consequences)
    return all(top_cause(one) in PASSES and one.facts.get("is_beyond_return") is not True for one in found)


def stands(incident: Incident, findings: Iterable[Finding]) -> bool:
    """Whether anything of it is found now, be it only suspected."""
    followers = {one.detector for one in incident.consequences}
    return any(
        one.detector in followers
        or (one.detector == incident.leading.detector and (bool(one.needs) or is_same(incident.leading, one)))
        or brings_about(incident.leading, one)
        for one in findings
    )


def has_passed(incident: Incident, absent_since_ns: int, window: Window, now_ns: int) -> bool:
    """Nothing of it was found for long enough, its ranks are there, and the job went on meanwhile."""
    if now_ns - absent_since_ns < HOLD_NS or not can_pass(incident):
        return False
    cause = top_cause(incident.leading)
    first = window.series[0].step if window.series else incident.leading.first_step + 1
    if cause in MEASURED_AGAINST_THE_PAST and first > incident.leading.first_step:
        return False
    num_steps = sum(entry.at_ns >= absent_since_ns for entry in window.series[-PASSES[cause] :])
    return num_steps >= PASSES[cause] and all(_is_in_sight(rank, window) for rank in incident.leading.ranks)


def _is_in_sight(rank: int, window: Window) -> bool:
    link = window.processes.links.get(rank)
    return (link is None or link.state == "connected") and all(end.rank != rank for end in window.processes.exits)
