"""Messages about incidents in Alertmanager's webhook format (version 4), so that a pager needs no Prometheus.

    incident opens                firing
    its cause or severity changes resolved, firing
    its ranks change              firing again, the same alert: nobody should go after the wrong rank
    it closes                     resolved; also when the run is started again

Pure: the coordinator sends the messages.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from holter.exporters import alert_text
from holter.exporters.alert_text import alert_name, describe, incident_info
from holter.faults import CAUSES
from holter.records import Diagnosis

Status = Literal["firing", "resolved"]
Message = dict[str, Any]

RECEIVER = "holter"
NEVER = "0001-01-01T00:00:00Z"
"""Alertmanager's notation for an alert that has not ended."""


@dataclass
class Deliveries:
    """Counts of what became of the messages so far."""

    to: str = "webhook"
    """Name of the receiver."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of messages by outcome. `delivered`; `failed`: an attempt failed and is repeated; `dropped`: given up, or
    no room."""
    failure: str = ""
    """Why the last attempt failed; empty if it succeeded."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, outcome: str, failure: str = "") -> None:
        """Count one message; may be called from several threads at once."""
        with self._lock:
            self.counts[outcome] = self.counts.get(outcome, 0) + 1
            self.failure = failure

    def warnings(self) -> list[str]:
        """Return a sentence if something is not being delivered or was lost."""
        failed, dropped = self.counts.get("failed", 0), self.counts.get("dropped", 0)
        if not self.failure and not dropped:
            return []
        last = f", last {self.failure}" if self.failure else ""
        return [f"{self.to}: {failed} attempts failed, {dropped} messages lost{last}"]


@dataclass(frozen=True)
class _IncidentAlert:
    """An incident with the labels of the alert that is sent for it."""

    labels: Mapping[str, str]
    diagnosis: Diagnosis

    def is_of(self, other: "_IncidentAlert") -> bool:
        """Whether it is the same alert about the same ranks."""
        return self.labels == other.labels and self.ranks == other.ranks

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks to blame."""
        return self.diagnosis.causes[0].ranks if self.diagnosis.causes else ()


class Pager:
    """Remembers what was sent about each incident, and decides what to send now."""

    def __init__(self, address: str, runbooks: str) -> None:
        self._address, self._runbooks = address, runbooks
        self._sent: dict[str, _IncidentAlert] = {}

    def remember(self, diagnoses: Sequence[Diagnosis]) -> None:
        """Take over incidents whose alerts were sent before the run was restarted; the next look reports them as over."""
        self._sent |= {diagnosis.id: _IncidentAlert(self._labels(diagnosis), diagnosis) for diagnosis in diagnoses}

    def look(self, standing: Sequence[Diagnosis], now: str) -> list[Message]:
        """Return messages for what changed since the last look; `standing` are the open incidents, `now` is in RFC 3339."""
        wanted = {diagnosis.id: _IncidentAlert(self._labels(diagnosis), diagnosis) for diagnosis in standing}
        messages = []
        for incident, sent in list(self._sent.items()):
            if incident not in wanted or wanted[incident].labels != sent.labels:
                del self._sent[incident]
                messages.append(self._message(sent, "resolved", now))
        for incident, new in wanted.items():
            if incident not in self._sent or not new.is_of(self._sent[incident]):
                self._sent[incident] = new
                messages.append(self._message(new, "firing", NEVER))
        return messages

    def _labels(self, diagnosis: Diagnosis) -> dict[str, str]:
        info = incident_info(diagnosis, self._address)
        return {
            "alertname": alert_name(info.cause),
            "run_id": diagnosis.run_id,
            "incident": info.incident,
            "cause": info.cause,
            "severity": info.severity,
            "layer": "incident",
        }

    def _message(self, incident: _IncidentAlert, status: Status, ends_at: str) -> Message:
        info = incident_info(incident.diagnosis, self._address)
        entry = CAUSES.get(info.cause)
        group = {name: incident.labels[name] for name in ("alertname", "run_id")}
        annotations = {
            "summary": entry.happened if entry is not None else incident.diagnosis.symptom,
            "description": describe(info, incident.diagnosis.run_id),
            "symptom": incident.diagnosis.symptom,
            "runbook_url": f"{self._runbooks}/{info.cause}.md",
            **alert_text.panel_annotations(alert_text.panel_of("incident", info.cause), incident.diagnosis.run_id),
        }
        alert = {
            "status": status,
            "labels": dict(incident.labels),
            "annotations": annotations,
            "startsAt": incident.diagnosis.opened_at,
            "endsAt": ends_at,
            "generatorURL": info.url,
            "fingerprint": _fingerprint(incident.labels),
        }
        return {
            "version": "4",
            "groupKey": "{}:{" + ", ".join(f'{name}="{value}"' for name, value in group.items()) + "}",
            "truncatedAlerts": 0,
            "status": status,
            "receiver": RECEIVER,
            "groupLabels": group,
            "commonLabels": dict(incident.labels),
            "commonAnnotations": annotations,
            "externalURL": self._address,
            "alerts": [alert],
        }


def _fingerprint(labels: Mapping[str, str]) -> str:
    """Return an id that is the same for the same alert, whichever process sends it."""
    text = "\xff".join(f"{name}\xff{value}" for name, value in sorted(labels.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
