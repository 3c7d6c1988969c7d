"""Alert rules from the list of causes and detectors, and the pages behind them: one source, many files.

causes.yml     an alert a cause, one for each open incident however many ranks it has
detectors.yml  a detector's finding that stands and that no incident explains
watcher.yml    holter itself: absent, blind, dropping, failing

The detector is the only judge: these fire on its verdicts and know no threshold of the training.
"""

import sys

from holter import detectors
from holter.diagnosis import causes, pages
from holter.diagnosis.causes import CauseEntry
from holter.exporters import runbooks, watcher_rules
from holter.exporters.naming import alert_name
from holter.exporters.rule import Rule, to_yaml

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
"""Told in the description, but no part of the alert's identity: a better diagnosis of the same incident is not a second page."""


def groups() -> dict[str, list[Rule]]:
    """All rules, by group."""
    return {
        "holter-causes": [_cause_rule(entry) for entry in causes.ALL],
        "holter-detectors": [_detector_rule(detector) for detector in detectors.ALL],
        "holter-watcher": [watch.rule for watch in watcher_rules.ALL],
    }


def rule_file(base: str = RUNBOOKS) -> str:
    """All of them as one file."""
    return to_yaml(groups(), base)


def rule_files(base: str = RUNBOOKS) -> dict[str, str]:
    """File name -> content, a group each."""
    return {f"{name.removeprefix('holter-')}.yml": to_yaml({name: rules}, base) for name, rules in groups().items()}


def runbook_files() -> dict[str, str]:
    """File name -> content: a page for everything that an alert can speak of."""
    return {f"{name}.md": runbooks.to_markdown(page(name) or "") for name in page_names()}


def page(name: str) -> str | None:
    """What `holter explain NAME` prints; None if there is no such page."""
    watch = next((one for one in watcher_rules.ALL if one.name == name), None)
    return pages.page(name) if watch is None else runbooks.watch_page(watch)


def page_names() -> tuple[str, ...]:
    """Everything that has a page: detectors, causes, then alerts about holter itself."""
    return tuple(dict.fromkeys((*pages.names(), *(watch.name for watch in watcher_rules.ALL))))


def _cause_rule(entry: CauseEntry) -> Rule:
    return Rule(
        alert=alert_name(entry.cause),
        page=entry.cause,
        # One of them even if a coordinator is scraped twice: labels that are taken off must not leave two alike.
        expr=f'topk by (run_id, incident) (1, holter_incident_info{{cause="{entry.cause}"}})',
        layer="incident",
        severity="{{ $labels.severity }}",
        summary=entry.happened,
        description=(
            f"Run {{{{ $labels.run_id }}}}: {entry.cause}.{SAYS_WHERE} Diagnosis: {{{{ $labels.url }}}} (incident "
            f"{{{{ $labels.incident }}}}); what to do: holter explain {entry.cause}."
        ),
        keep="15m",
        labels=OFF,
    )


def _detector_rule(detector: detectors.Detector) -> Rule:
    # An incident of severity info, such as a plateau that stands for days, explains nothing grave.
    selected = f'holter_finding_active{{detector="{detector.name}", severity!="info"}}'
    docstring = (sys.modules[type(detector).__module__].__doc__ or "").strip()
    return Rule(
        alert=alert_name(f"unexplained_{detector.name}"),
        page=detector.name,
        expr=(
            f"max by (run_id, detector, severity) ({selected}) unless on (run_id) "
            'holter_incident_open{severity!="info"}'
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
