"""One alert rule, and a group of them as a file that Prometheus reads."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from holter.exporters.places import annotations, place_of

Layer = Literal["incident", "finding", "watcher"]
"""What an alert speaks of: a diagnosed fault of the job, one that nobody explained, or holter itself."""


@dataclass(frozen=True)
class AlertRule:
    """What fires when, and what it says."""

    alert: str
    page: str
    """Name of its page: `holter explain PAGE`, and the last word of its `runbook_url`."""
    expr: str
    layer: Layer
    severity: str
    summary: str
    """Static: a pager groups by it."""
    description: str
    """A template of Prometheus."""
    wait: str = ""
    """How long it must hold before it fires."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """More labels; an empty one takes a label of the series off the alert."""


def to_yaml(groups: Mapping[str, Sequence[AlertRule]], runbooks: str) -> str:
    """A rule file; every text is quoted as JSON, which is YAML too."""
    lines = ["# Written by `holter alerts`; a test compares it with what the code would write now.", "groups:"]
    for name, rules in groups.items():
        lines += [f"  - name: {name}", "    rules:"]
        lines += [line for rule in rules for line in _rule(rule, runbooks)]
    return "\n".join(lines) + "\n"


def _rule(rule: AlertRule, runbooks: str) -> Iterator[str]:
    yield f"      - alert: {rule.alert}"
    yield f"        expr: {_quoted(rule.expr)}"
    if rule.wait:
        yield f"        for: {rule.wait}"
    yield "        labels:"
    for name, value in {"severity": rule.severity, "layer": rule.layer, **rule.labels}.items():
        yield f"          {name}: {_quoted(value)}"
    yield "        annotations:"
    yield f"          summary: {_quoted(rule.summary)}"
    yield f"          description: {_quoted(rule.description)}"
    yield f"          runbook_url: {_quoted(f'{runbooks}/{rule.page}.md')}"
    for name, value in annotations(place_of(rule.layer, rule.page)).items():
        yield f"          {name}: {_quoted(value)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
