"""Findings become incidents: one NaN is not forty alarms.

The first finding in time and in causal order leads an incident; what it brought about is listed under it. `consequences` says which
detector's findings can follow from which, and the order within one step: weights that differ before the step can make a NaN in it,
weights that differ after it can be made by one.

An incident keeps its id when its leading finding is understood better, or turns out to be a consequence itself.
"""

from collections.abc import Iterable, Sequence

import msgspec

from holter.diagnosis.consequences import (
    BRINGS_ABOUT,
    JUDGES_THE_WHOLE_RUN,
    ORDER_IN_STEP,
    SPEAKS_OF_EVENTS,
    Consequence,
)
from holter.diagnosis.ranking import top_cause
from holter.records import Finding


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Findings that have one cause."""

    id: str
    leading: Finding
    consequences: tuple[Finding, ...] = ()
    """At most one a detector: the first."""
    merged_into: str | None = None
    """The incident of which this one turned out to be a part."""
    is_closed: bool = False
    """It has passed (`passing`): what is found from now on is another one."""

    @property
    def is_open(self) -> bool:
        """Whether findings still belong here."""
        return not self.is_closed and self.merged_into is None


_PLACE = {name: place for place, name in enumerate(ORDER_IN_STEP)}


def correlate(incidents: Sequence[Incident], findings: Iterable[Finding], *, stamp: str) -> tuple[Incident, ...]:
    """The incidents that are new or changed, in order of id.

    `incidents` are all of the run, open or not; `stamp` begins the ids of new ones: `20261115T101500` makes `20261115T101500-1`.
    Findings that still need evidence are left for the next round.
    """
    known = {incident.id: incident for incident in incidents}
    changed: dict[str, Incident] = {}
    for finding in sorted((finding for finding in findings if not finding.needs), key=moment):
        for incident in _place(known, finding, f"{stamp}-{len(known) + 1}"):
            known[incident.id] = changed[incident.id] = incident
    return tuple(changed.values())


def moment(finding: Finding) -> tuple[int, int]:
    """Where in the run, and where in its step, a finding began."""
    key = str(finding.facts.get("first_class", finding.detector))
    return finding.first_step, _PLACE.get(key, _PLACE.get(finding.detector, len(_PLACE)))


def brings_about(leader: Finding, follower: Finding) -> bool:
    """Whether a line of `BRINGS_ABOUT` explains one finding by the other."""
    return any(_applies(line, leader, follower) for line in BRINGS_ABOUT)


def _applies(line: Consequence, leader: Finding, follower: Finding) -> bool:
    return (
        line.leader == leader.detector
        and follower.detector in line.after
        and (line.whenever or moment(leader) <= moment(follower))
        and (not line.if_leader_is or top_cause(leader) in line.if_leader_is)
        and not any(leader.facts.get(name) is True for name in line.unless_leader_has)
        and top_cause(follower) not in line.unless_follower_is
        and not any(follower.facts.get(name) is True for name in line.unless_follower_has)
        and (not line.on_a_shared_rank or bool(set(leader.ranks) & set(follower.ranks)))
    )


def _place(known: dict[str, Incident], finding: Finding, new_id: str) -> list[Incident]:
    """The incidents that change when this finding is put where it belongs."""
    open_incidents = [incident for incident in known.values() if incident.is_open]
    for incident in open_incidents:
        if is_same(incident.leading, finding):
            return _refreshed(incident, finding)
    for incident in sorted(open_incidents, key=lambda incident: moment(incident.leading)):
        if brings_about(incident.leading, finding):
            return _joined(incident, [finding])
    explained = [incident for incident in open_incidents if brings_about(finding, incident.leading)]
    if not explained:
        return [Incident(id=new_id, leading=finding)]
    head, *rest = explained
    followers = [one for incident in explained for one in (incident.leading, *incident.consequences)]
    led = msgspec.structs.replace(head, leading=finding, consequences=_first_of_each([], followers))
    return [led, *(msgspec.structs.replace(incident, merged_into=head.id) for incident in rest)]


def is_same(leading: Finding, finding: Finding) -> bool:
    """The same detector about the same event, the same step, or the same cause on the same ranks."""
    if leading.detector != finding.detector:
        return False
    if finding.detector in JUDGES_THE_WHOLE_RUN or leading.first_step == finding.first_step:
        return True
    if finding.detector in SPEAKS_OF_EVENTS and leading.ranks != finding.ranks:
        return False
    return top_cause(leading) == top_cause(finding)


def _refreshed(incident: Incident, finding: Finding) -> list[Incident]:
    # A window forgets: what is seen later of the same fault says less about how it began.
    is_later = finding.detector not in JUDGES_THE_WHOLE_RUN and finding.first_step > incident.leading.first_step
    if is_later or _substance(finding) == _substance(incident.leading):
        return []
    return [msgspec.structs.replace(incident, leading=finding)]


def _substance(finding: Finding) -> tuple[object, ...]:
    """What must differ for a finding to be news; counts in its facts and evidence grow with every step."""
    facts = {name: value for name, value in finding.facts.items() if value is None or isinstance(value, bool | list)}
    return finding.severity, finding.first_step, finding.ranks, finding.tensors, finding.modules, facts


def _joined(incident: Incident, followers: list[Finding]) -> list[Incident]:
    consequences = _first_of_each(incident.consequences, followers)
    return (
        [] if consequences == incident.consequences else [msgspec.structs.replace(incident, consequences=consequences)]
    )


def _first_of_each(present: Iterable[Finding], more: Iterable[Finding]) -> tuple[Finding, ...]:
    first: dict[str, Finding] = {}
    for finding in (*present, *sorted(more, key=moment)):
        first.setdefault(finding.detector, finding)
    return tuple(first.values())
