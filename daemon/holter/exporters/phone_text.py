"""An incident as a message for a phone: what, who, since when, what to do first, and where to read on. Pure.

holter: critical: Non-finite input, rank 1, step 30
─────────────────────────────────────────────────────
run gpt-7: Rank 1's batch held 1 NaN.
Do first: look at the shard that rank 1 read.
Halted; go on from checkpoints/30.
http://head:4000/#incident=20261115T101500-1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holter.exporters.alert_text import incident_info
from holter.exporters.incident_news import IncidentNews
from holter.records import Diagnosis, Severity
from holter.records.titles import title

MAX_SENTENCE = 240
MAX_TITLE = 120
_PLAIN = str.maketrans({"<": "(", ">": ")", "@": "(at)"})
"""Characters that a chat may take for a link or for a call to everybody; they occur in exceptions' words or host
names."""
MAX_LISTED = 5
"""Number of messages that a digest lists by title."""

Kind = Literal["critical", "warning", "info", "over"]


@dataclass(frozen=True)
class PhoneMessage:
    """A message as it is sent."""

    title: str
    body: str
    kind: Kind
    incident: str
    """Id of the incident, the same for all its messages; empty for a digest."""


def message(news: IncidentNews, address: str) -> PhoneMessage:
    """Write the message about a change of an incident."""
    one = news.diagnosis
    subject = clipped(f"holter: {_lead(news)}{_place(one)}", MAX_TITLE)
    link = incident_info(one, address).url
    if news.change == "closed":
        return PhoneMessage(subject, f"run {one.run_id}: it is over.\n{link}", "over", one.id)
    lines = [clipped(f"run {one.run_id}: {one.symptom}", MAX_SENTENCE)]
    if one.causes and one.causes[0].fix.do:
        lines.append(clipped(f"Do first: {one.causes[0].fix.do}", MAX_SENTENCE))
    if one.action.exit_code is not None:
        kept = f"; go on from {one.action.checkpoint}" if one.action.checkpoint else "; no checkpoint was kept"
        lines.append(f"Halted{kept}.")
    return PhoneMessage(subject, "\n".join([*lines, link]), one.severity, one.id)


def digest(messages: Sequence[PhoneMessage], address: str) -> PhoneMessage:
    """Join many simultaneous messages into one."""
    worst: Kind = next(
        (kind for kind in ("critical", "warning", "info") if any(one.kind == kind for one in messages)), "over"
    )
    named = [f"- {one.title.removeprefix('holter: ')}" for one in messages[:MAX_LISTED]]
    more = [f"and {len(messages) - MAX_LISTED} more"] if len(messages) > MAX_LISTED else []
    subject = f"holter: {len(messages)} more messages about incidents"
    return PhoneMessage(subject, "\n".join([*named, *more, address]), worst, "")


def clipped(text: str, length: int) -> str:
    """Return a text as one line of at most `length` characters, cut between words if possible."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split()).translate(_PLAIN)
    if len(line) <= length:
        return line
    head = line[: length - 1]
    return f"{head.rsplit(' ', 1)[0] if ' ' in head[length // 2 :] else head}…"


def _lead(news: IncidentNews) -> str:
    one = news.diagnosis
    name = title(one.causes[0].cause) if one.causes else "Unknown cause"
    severity: Severity = one.severity
    word = {"opened": severity, "updated": f"{severity}, changed", "closed": "over"}[news.change]
    return f"{word}: {name}"


def _place(one: Diagnosis) -> str:
    ranks = one.causes[0].ranks if one.causes else ()
    who = f", rank {ranks[0]}" if len(ranks) == 1 else f", {len(ranks)} ranks" if ranks else ""
    return who + (f", step {one.first_step}" if one.first_step >= 0 else "")
