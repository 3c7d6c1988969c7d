"""Group findings into incidents and close incidents that are over, so that one NaN does not raise forty alarms.

The first finding in time and in causal order leads an incident; findings that it brought about are listed under it. The
families of faults declare which detector's findings can follow from which (`BRINGS_ABOUT`), and where in a step a fault
begins (`Stage`): weights that differ before the step can cause a NaN in it, weights that differ after it can be caused
by one.

    finding    stands ........ gone                       back: another incident, another strike
    incident   open ..............|-- HOLD_NS, and steps --| closed

An incident keeps its id when its leading finding is understood better, or turns out to be a consequence itself. Only
causes that leave nothing behind can pass (`passes_after_steps`), and only while the job continues: a rank that nobody
sees any more has not recovered, and weights that took a NaN are not repaired when the window forgets it.
"""

from collections.abc import Iterable, Sequence

import msgspec

from holter.diagnosis.explain import top_cause
from holter.faults import BRINGS_ABOUT, CAUSES, DETECTORS
from holter.faults.family import STAGE_OF_CLASS, Consequence, Stage, engine_facts
from holter.faults.window import Window
from holter.records import Finding

HOLD_NS = 60 * 10**9
"""Nanoseconds for which nothing of an incident may be found before it closes."""
_PLACE = {name: place for place, name in enumerate(DETECTORS)}


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Findings that share one cause."""

    id: str
    leading: Finding
    consequences: tuple[Finding, ...] = ()
    """Findings that the leading one brought about; at most one for each detector, the first."""
    merged_into: str | None = None
    """Id of the incident that this one turned out to be a part of; None if it stands by itself."""
    is_closed: bool = False
    """Whether the incident has passed; what is found from now on belongs to another one."""

    @property
    def is_open(self) -> bool:
        """Whether new findings can still belong to this incident."""
        return not self.is_closed and self.merged_into is None


def correlate(incidents: Sequence[Incident], findings: Iterable[Finding], *, stamp: str) -> tuple[Incident, ...]:
    """Sort findings into incidents and return the incidents that are new or changed, in the order in which they were touched.

    `incidents` are all of the run, open or not; `stamp` begins the ids of new ones: `20261115T101500` makes
    `20261115T101500-1`. Findings that still need evidence are left for the next round.
    """
    known = {incident.id: incident for incident in incidents}
    changed: dict[str, Incident] = {}
    for finding in sorted((finding for finding in findings if not finding.needs), key=moment):
        for incident in _place(known, finding, f"{stamp}-{len(known) + 1}"):
            known[incident.id] = changed[incident.id] = incident
    return tuple(changed.values())


def moment(finding: Finding) -> tuple[int, int, int]:
    """Return a sort key for when a finding began: its step, and the place within the step."""
    stage = STAGE_OF_CLASS.get(engine_facts(finding).get("first_class", ""))
    if stage is not None:
        return finding.first_step, stage, -1
    entry = DETECTORS.get(finding.detector)
    return finding.first_step, entry.stage if entry else Stage.UNKNOWN, _PLACE.get(finding.detector, len(_PLACE))


def brings_about(leader: Finding, follower: Finding) -> bool:
    """Whether a line of `BRINGS_ABOUT` explains the follower by the leader."""
    return any(_applies(line, leader, follower) for line in BRINGS_ABOUT)


def _applies(line: Consequence, leader: Finding, follower: Finding) -> bool:
    return (
        line.leader == leader.detector
        and (follower.detector in line.after or _group(follower) in line.groups)
        and (line.whenever or moment(leader) <= moment(follower))
        and (not line.if_leader_is or top_cause(leader) in line.if_leader_is)
        and not any(leader.facts.get(name) is True for name in line.unless_leader_has)
        and top_cause(follower) not in line.unless_follower_is
        and not any(follower.facts.get(name) is True for name in line.unless_follower_has)
        and (not line.on_a_shared_rank or bool(set(leader.ranks) & set(follower.ranks)))
    )


def _group(finding: Finding) -> str | None:
    entry = DETECTORS.get(finding.detector)
    return entry.group if entry else None


def _incident_per(finding: Finding) -> str:
    entry = DETECTORS.get(finding.detector)
    return entry.incident_per if entry else "cause"


def _place(known: dict[str, Incident], finding: Finding, new_id: str) -> list[Incident]:
    """Return the incidents that change when this finding is added."""
    open_incidents = [incident for incident in known.values() if incident.is_open]
    for incident in open_incidents:
        if is_same(incident.leading, finding):
            return _refreshed(incident, finding)
    for incident in sorted(open_incidents, key=lambda incident: moment(incident.leading)):
        if brings_about(incident.leading, finding):
            return _joined(incident, finding)
    explained = [incident for incident in open_incidents if brings_about(finding, incident.leading)]
    if not explained:
        return [Incident(id=new_id, leading=finding)]
    head, *rest = explained
    followers = [one for incident in explained for one in (incident.leading, *incident.consequences)]
    led = msgspec.structs.replace(head, leading=finding, consequences=_first_of_each(followers))
    return [led, *(msgspec.structs.replace(incident, merged_into=head.id) for incident in rest)]


def is_same(leading: Finding, finding: Finding) -> bool:
    """Whether both findings come from one detector and concern the same event, the same step, or the same cause on the same ranks."""
    if leading.detector != finding.detector:
        return False
    if _incident_per(finding) == "run" or leading.first_step == finding.first_step:
        return True
    if _incident_per(finding) == "event" and leading.ranks != finding.ranks:
        return False
    return top_cause(leading) == top_cause(finding)


def _refreshed(incident: Incident, finding: Finding) -> list[Incident]:
    # The window forgets: what is seen later of the same fault says less about how it began.
    is_per_run, began = _incident_per(finding) == "run", incident.leading.first_step
    is_later = finding.first_step > began
    is_same_cause = top_cause(finding) == top_cause(incident.leading)
    if is_later and is_per_run and is_same_cause and set(incident.leading.ranks) <= set(finding.ranks):
        # An event keeps its step, so that what a log line, a pager and halt.json said of it stays true.
        finding = msgspec.structs.replace(finding, first_step=began)
    if (is_later and not is_per_run) or _substance(finding) == _substance(incident.leading):
        return []
    return [msgspec.structs.replace(incident, leading=finding)]


def _substance(finding: Finding) -> tuple[object, ...]:
    """Return what must differ for a finding to be news.

    Counts are left out, because those in facts and evidence grow with every step.
    """
    facts = {name: value for name, value in finding.facts.items() if value is None or isinstance(value, bool | list)}
    return finding.severity, finding.first_step, finding.ranks, finding.tensors, finding.modules, facts


def _joined(incident: Incident, follower: Finding) -> list[Incident]:
    if any(one.detector == follower.detector for one in incident.consequences):
        return []
    return [msgspec.structs.replace(incident, consequences=(*incident.consequences, follower))]


def _first_of_each(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    first: dict[str, Finding] = {}
    for finding in sorted(findings, key=moment):
        first.setdefault(finding.detector, finding)
    return tuple(first.values())


def can_pass(incident: Incident) -> bool:
    """Whether the incident can close by itself, because none of its findings leaves damage behind."""
    return all(_leaves_nothing(one) for one in (incident.leading, *incident.consequences))


def _leaves_nothing(finding: Finding) -> bool:
    entry = CAUSES.get(top_cause(finding))
    passes = entry is not None and entry.passes_after_steps is not None
    return passes and engine_facts(finding).get("is_beyond_return") is not True


def stands(incident: Incident, findings: Iterable[Finding]) -> bool:
    """Whether any finding of the incident is present now, even as a suspicion."""
    followers = {one.detector for one in incident.consequences}
    return any(
        one.detector in followers
        or (one.detector == incident.leading.detector and (bool(one.needs) or is_same(incident.leading, one)))
        or brings_about(incident.leading, one)
        for one in findings
    )


def has_passed(incident: Incident, absent_since_ns: int, window: Window, now_ns: int) -> bool:
    """Whether nothing of the incident was found for long enough while its ranks were in sight and the job continued."""
    if now_ns - absent_since_ns < HOLD_NS or not can_pass(incident):
        return False
    entry = CAUSES[top_cause(incident.leading)]
    num_needed = entry.passes_after_steps
    assert num_needed is not None
    first = window.series[0].step if window.series else incident.leading.first_step + 1
    if entry.is_measured_against_the_past and first > incident.leading.first_step:
        return False
    num_steps = sum(step.at_ns >= absent_since_ns for step in window.series[-num_needed:])
    return num_steps >= num_needed and all(_is_in_sight(rank, window) for rank in incident.leading.ranks)


def _is_in_sight(rank: int, window: Window) -> bool:
    link = window.processes.links.get(rank)
    return (link is None or link.state == "connected") and all(end.rank != rank for end in window.processes.exits)
