"""What is new about the incidents of a run, for whoever is told in their own words: phones, chats, collectors of events. Pure.

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
    """One incident, and what is new about it."""

    change: Change
    diagnosis: Diagnosis


class NewsDesk:
    """Remembers what was told of each incident, and so knows what to tell now."""

    def __init__(self, severities: Iterable[str] = ("critical", "warning", "info")) -> None:
        self._severities = frozenset(severities)
        self._told: dict[str, Diagnosis] = {}

    def remember(self, diagnoses: Iterable[Diagnosis]) -> None:
        """What a former life of the run told: the next look says that they are over."""
        self._told |= {one.id: one for one in diagnoses if one.severity in self._severities}

    def look(self, standing: Iterable[Diagnosis], known: Iterable[Diagnosis]) -> list[IncidentNews]:
        """`standing` are those that are open and settled; `known` are all, as they are now."""
        wanted = {one.id: one for one in standing if one.severity in self._severities}
        current = {one.id: one for one in known}
        news = []
        for incident in [known for known in self._told if known not in wanted]:
            # One that is open and not settled at the moment is not over.
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
    """What must change for somebody to be told again."""
    first = diagnosis.causes[0] if diagnosis.causes else None
    action = diagnosis.action
    return (
        diagnosis.severity,
        first.cause if first else "",
        first.ranks if first else (),
        action.checkpoint if action.exit_code is not None else None,
        action.exit_code,
    )
