"""Alert rules for Prometheus and the page behind each, generated from the lists of causes, detectors and watcher rules.

causes.yml     an alert a cause, one for each open incident however many ranks it has
detectors.yml  a detector's finding that stands and that no incident explains
watcher.yml    holter itself: absent, blind, dropping, failing

The detectors are the only judges: rules of causes and detectors fire on their verdicts and hold no threshold of the training.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from holter import faults
from holter.diagnosis import pages
from holter.diagnosis.pages import indented
from holter.exporters import watcher_rules
from holter.exporters.alert_text import alert_name, panel_annotations, panel_of
from holter.exporters.watcher_rules import WatcherRule
from holter.faults.family import CauseEntry

LIVES = "holter_job_ranks"
"""Every coordinator that is scraped has this series."""
KEPT = "15m"
"""How long an alert stays after its coordinator fell silent: a coordinator that ends has not mended the run."""
RUNBOOKS = "https://holter.example/runbooks"
"""Where `grafana/runbooks` is served; `holter alerts --runbooks URL` writes another address into the rules."""
SAYS_WHERE = "".join(
    f"{{{{ if $labels.{label} }}}} {word} {{{{ $labels.{label} }}}}.{{{{ end }}}}"
    for label, word in (
        ("ranks", "Rank"),
        ("tensors", "Tensor"),
        ("collective", "Collective"),
        ("step", "Since step"),
    )
)
OFF = dict.fromkeys(("ranks", "tensors", "collective", "step", "url", "instance", "job"), "")
"""Labels that the description tells but that do not identify the alert: a better diagnosis of the same incident must not page again."""
INDENT = "    "
EXPRESSION = "## Fires on"
_SETTING = re.compile(r"    \w+\.\w+ = ")

Layer = Literal["incident", "finding", "watcher"]
"""What an alert is about: a diagnosed fault of the job, a finding that no incident explains, or holter itself."""


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


def groups() -> dict[str, list[AlertRule]]:
    """All rules, by group."""
    return {
        "holter-causes": [_cause_rule(entry) for entry in faults.CAUSES.values()],
        "holter-detectors": [_detector_rule(detector) for detector in faults.ALL],
        "holter-watcher": [_watcher_rule(watch) for watch in watcher_rules.ALL],
    }


def rule_file(base: str = RUNBOOKS) -> str:
    """All of them as one file."""
    return _to_yaml(groups(), base)


def rule_files(base: str = RUNBOOKS) -> dict[str, str]:
    """File name -> content, a group each."""
    return {f"{name.removeprefix('holter-')}.yml": _to_yaml({name: rules}, base) for name, rules in groups().items()}


def runbook_files() -> dict[str, str]:
    """File name -> content: a page for everything that an alert can speak of."""
    return {f"{name}.md": page_markdown(name) or "" for name in page_names()}


def page(name: str) -> str | None:
    """What `holter explain NAME` prints; None if there is no such page."""
    watch = next((one for one in watcher_rules.ALL if one.name == name), None)
    return pages.page(name) if watch is None else _watcher_page(watch)


def page_markdown(name: str) -> str | None:
    """The page of NAME as Markdown: `grafana/runbooks` and the pages of the documentation are made with this, and with nothing else."""
    text = page(name)
    return None if text is None else _to_markdown(text)


def page_names() -> tuple[str, ...]:
    """Everything that has a page: detectors, causes, then alerts about holter itself."""
    return tuple(dict.fromkeys((*pages.names(), *(watch.name for watch in watcher_rules.ALL))))


def page_of_alert(alert: str) -> str | None:
    """`HolterNonfiniteInput`, as a pager says it, is explained on the page `nonfinite_input`."""
    return next((rule.page for rules in groups().values() for rule in rules if rule.alert == alert), None)


def _cause_rule(entry: CauseEntry) -> AlertRule:
    return AlertRule(
        alert=alert_name(entry.cause),
        page=entry.cause,
        expr=_standing(f'holter_incident_info{{cause="{entry.cause}"}}'),
        layer="incident",
        severity="{{ $labels.severity }}",
        summary=entry.happened,
        description=(
            f"Run {{{{ $labels.run_id }}}}: {entry.cause}.{SAYS_WHERE} Diagnosis: {{{{ $labels.url }}}} (incident "
            f"{{{{ $labels.incident }}}}); what to do: holter explain {entry.cause}."
        ),
        labels=OFF,
    )


def _standing(info: str) -> str:
    """Incidents that are open, or were in the last scrape of a coordinator that is not heard any more."""
    seen, heard = (f"max_over_time(timestamp({name})[{KEPT}:15s])" for name in (info, LIVES))
    kept = f"({seen} >= on (run_id) group_left () max by (run_id) ({heard})) unless on (run_id) {LIVES}"
    # One of them even if a coordinator is scraped twice: labels that are taken off must not leave two alike.
    return f"topk by (run_id, incident) (1, {info} or ({kept}))"


def _unexplained(detector: str, severity: str, by: str) -> str:
    found = (
        f'max by (run_id, detector, severity) (holter_finding_active{{detector="{detector}", severity="{severity}"}})'
    )
    return f'({found} unless on (run_id) holter_incident_open{{severity=~"{by}"}})'


def _detector_rule(detector: faults.Detector) -> AlertRule:
    docstring = (sys.modules[type(detector).__module__].__doc__ or "").strip()
    return AlertRule(
        alert=alert_name(f"unexplained_{detector.name}"),
        page=detector.name,
        # What is less grave explains nothing: a plateau may stand for days, a slow rank for a night.
        expr=" or ".join(
            (
                _unexplained(detector.name, "critical", by="critical"),
                _unexplained(detector.name, "warning", by="critical|warning"),
            )
        ),
        layer="finding",
        severity="{{ $labels.severity }}",
        summary=docstring.splitlines()[0],
        description=(
            f"Run {{{{ $labels.run_id }}}}: a finding of {detector.name} has stood for two minutes, and no incident explains it; "
            "`holter status` shows its words, with ranks and step."
        ),
        wait="2m",
    )


def _watcher_rule(watch: WatcherRule) -> AlertRule:
    return AlertRule(
        alert=alert_name(watch.name),
        page=watch.name,
        expr=watch.expr,
        layer="watcher",
        severity=watch.severity,
        summary=watch.happened,
        description=f"Run {{{{ $labels.run_id }}}}: {watch.says}",
        wait=watch.wait,
    )


def _to_yaml(groups: Mapping[str, Sequence[AlertRule]], runbooks: str) -> str:
    """A rule file. Every text is quoted as JSON, which is YAML too."""
    lines = ["# Written by `holter alerts`; a test compares it with what the code would write now.", "groups:"]
    for name, rules in groups.items():
        lines += [f"  - name: {name}", "    rules:"]
        lines += [line for rule in rules for line in _rule_lines(rule, runbooks)]
    return "\n".join(lines) + "\n"


def _rule_lines(rule: AlertRule, runbooks: str) -> Iterator[str]:
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
    for name, value in panel_annotations(panel_of(rule.layer, rule.page)).items():
        yield f"          {name}: {_quoted(value)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _watcher_page(watch: WatcherRule) -> str:
    """The page of an alert about holter itself, in the form of a cause's page."""
    sections = (
        ("What happened", watch.happened),
        ("Why it matters", watch.why),
        ("When it stays quiet", watch.quiet),
        ("Do", watch.do),
        ("Fires on", watch.expr),
    )
    return "\n".join(
        [f"{watch.name} (alert)", "", *("\n".join([title, indented(text), ""]) for title, text in sections)]
    )


def _to_markdown(page: str) -> str:
    """A title is a line before an indented one; settings are a list; an alert's expression, its last section, stays indented, as code."""
    lines = page.rstrip().splitlines()
    out: list[str] = []
    for line, following in pairwise([*lines, ""]):
        is_title = not line.startswith(INDENT) and following.startswith(INDENT)
        if line.endswith((" (detector)", " (cause)", " (alert)")) and not line.startswith(INDENT):
            out.append(f"# {line}")
        elif is_title:
            out += [f"## {line}", ""]
        else:
            out.append(line if EXPRESSION in out else _body(line))
    return "\n".join(out) + "\n"


def _body(line: str) -> str:
    text = line.removeprefix(INDENT)
    return f"- `{text}`" if _SETTING.match(line) else text
