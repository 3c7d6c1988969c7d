"""Alert rules from the list of causes and detectors, and the pages behind them: one source, many files.

causes.yml     an alert a cause, one for each open incident however many ranks it has
detectors.yml  a detector's finding that stands and that no incident explains
watcher.yml    holter itself: absent, blind, dropping, failing

The detector is the only judge: these fire on its verdicts and know no threshold of the training.
"""

import sys

from holter import faults
from holter.diagnosis import pages
from holter.exporters import runbooks, watcher_rules
from holter.exporters.naming import alert_name
from holter.exporters.rule import AlertRule, to_yaml
from holter.faults.cause import CauseEntry

LIVES = "holter_job_ranks"
"""A coordinator that is scraped always has it."""
KEPT = "15m"
"""So long an alert stays when its coordinator is not heard any more: one that ends has not mended the run."""
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


def groups() -> dict[str, list[AlertRule]]:
    """All rules, by group."""
    return {
        "holter-causes": [_cause_rule(entry) for entry in faults.CAUSES.values()],
        "holter-detectors": [_detector_rule(detector) for detector in faults.ALL],
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
