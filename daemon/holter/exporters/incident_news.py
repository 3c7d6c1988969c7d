"""Changes of a run's incidents, for those who are told in words: phones, chats and collectors of events. Pure.

an incident stands                                  opened
its cause, ranks or severity change, or it halts    updated
it closes, or its run is started again              closed
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from holter.records import Diagnosis

Change = Literal["opened", "updated", "closed"]


@dataclass(frozen=True)
class IncidentNews:
    """One incident, and how it changed."""

    change: Change
    diagnosis: Diagnosis


class NewsDesk:
    """Remembers what was told about each incident, and decides what to tell now."""

    def __init__(self, severities: Iterable[str] = ("critical", "warning", "info")) -> None:
        self._severities = frozenset(severities)
        self._told: dict[str, Diagnosis] = {}

    def remember(self, diagnoses: Iterable[Diagnosis]) -> None:
        """Take over what a former life of the run told; the next look reports these incidents as over."""
        self._told |= {one.id: one for one in diagnoses if one.severity in self._severities}

    def look(self, standing: Iterable[Diagnosis], known: Iterable[Diagnosis]) -> list[IncidentNews]:
        """Return the changes since the last look.

        `standing` are the incidents that are open and settled; `known` are all incidents as they are now.
        """
        wanted = {one.id: one for one in standing if one.severity in self._severities}
        current = {one.id: one for one in known}
        news = []
        for incident in [known for known in self._told if known not in wanted]:
            # An incident that is open, but not settled at the moment, is not over.
            now = current.get(incident, self._told[incident])
            if now.closed_at is not None or incident not in current:
                del self._told[incident]
                news.append(IncidentNews("closed", now))
        for incident, one in wanted.items():
            before = self._told.get(incident)
            if before is None or essence(one) != essence(before):
                self._told[incident] = one
                news.append(IncidentNews("opened" if before is None else "updated", one))
        return news


def essence(diagnosis: Diagnosis) -> tuple[object, ...]:
    """Return what must change for people to be told again."""
    first = diagnosis.causes[0] if diagnosis.causes else None
    action = diagnosis.action
    return (
        diagnosis.severity,
        first.cause if first else "",
        first.ranks if first else (),
        action.checkpoint if action.exit_code is not None else None,
        action.exit_code,
    )
