"""Generate Prometheus' alert rules from the lists of causes and detectors; rules about holter itself are written below.

    causes.yml     an alert for each cause; it fires once for each open incident, however many ranks that has
    detectors.yml  an alert for each detector, for a standing finding that no incident explains
    watcher.yml    alerts about holter itself: absent, blind, dropping, failing

Only detectors judge: rules of causes and detectors fire on their verdicts and hold no threshold of the training. The
numbers in the rules about holter itself concern the watching.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from holter import faults
from holter.exporters.alert_text import RUNBOOKS, alert_name, panel_annotations, panel_of
from holter.faults.family import CauseEntry
from holter.records.titles import titled

LIVES = "holter_job_ranks"
"""A metric that every scraped coordinator exports."""
KEPT = "15m"
"""How long an alert persists after its coordinator fell silent; the end of a coordinator does not mean that the run is
well."""
SAYS_WHERE = "".join(
    f"{{{{ if $labels.{label} }}}} {word} {{{{ $labels.{label} }}}}.{{{{ end }}}}"
    for label, word in (("ranks", "Rank"), ("tensors", "Tensor"), ("collective", "Collective"), ("step", "Since step"))
)
OFF = dict.fromkeys(("ranks", "tensors", "collective", "step", "url", "instance", "job"), "")
"""Labels that the description mentions but that do not identify the alert: a better diagnosis of the same incident must
not page again."""

Layer = Literal["incident", "finding", "watcher"]
"""Subject of an alert: a diagnosed fault of the job, a finding that no incident explains, or holter itself."""


@dataclass(frozen=True)
class AlertRule:
    """One rule: when it fires, and what it says."""

    alert: str
    page: str
    """Name of its page, as in `holter explain PAGE`; `runbook_url` ends with it."""
    expr: str
    layer: Layer
    severity: str
    summary: str
    """Fixed text, because pagers group by it."""
    description: str
    """Text with Prometheus' template expressions."""
    wait: str = ""
    """How long the expression must hold before the alert fires, such as `2m`; empty: not at all."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Additional labels; an empty one removes a label of the series from the alert."""


@dataclass(frozen=True)
class WatcherRule:
    """A rule about holter itself, with the content of its page."""

    name: str
    expr: str
    severity: str
    happened: str
    says: str
    """The alert's description, a template."""
    why: str
    quiet: str
    """In which situations it stays quiet on purpose."""
    do: str
    wait: str = ""


def groups() -> dict[str, list[AlertRule]]:
    """Return all rules by group."""
    return {
        "holter-causes": [_cause_rule(entry) for entry in faults.CAUSES.values()],
        "holter-detectors": [_detector_rule(detector) for detector in faults.ALL],
        "holter-watcher": [_watcher_rule(watch) for watch in WATCHER_RULES],
    }


def rule_file(base: str = RUNBOOKS) -> str:
    """Return all rules as one file."""
    return _to_yaml(groups(), base)


def rule_files(base: str = RUNBOOKS) -> dict[str, str]:
    """Return a rule file for each group, by file name."""
    return {f"{name.removeprefix('holter-')}.yml": _to_yaml({name: rules}, base) for name, rules in groups().items()}


def page_of_alert(alert: str) -> str | None:
    """Return the page that explains an alert: `nonfinite_input` for `HolterNonfiniteInput`. None if there is no such alert."""
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
            f"Run {{{{ $labels.run_id }}}}: {titled(entry.cause)}.{SAYS_WHERE} Diagnosis: {{{{ $labels.url }}}} (incident "
            f"{{{{ $labels.incident }}}}); what to do: holter explain {entry.cause}."
        ),
        labels=OFF,
    )


def _standing(info: str) -> str:
    """Return a query for incidents that are open, or were in the last scrape of a coordinator that has fallen silent."""
    seen, heard = (f"max_over_time(timestamp({name})[{KEPT}:15s])" for name in (info, LIVES))
    kept = f"({seen} >= on (run_id) group_left () max by (run_id) ({heard})) unless on (run_id) {LIVES}"
    # Only one series, even if a coordinator is scraped twice: without the removed labels two would be alike.
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
        # A less severe incident explains nothing: a plateau may stand for days, a slow rank for a night.
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
    """Return the content of a rule file. Every text is quoted as JSON, which is valid YAML."""
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


_LATEST = '{__name__=~"holter_(job_)?last_progress_timestamp_seconds"}'
_EXPLAINED = f'max by (run_id) (holter_incident_opened_timestamp_seconds{{severity="critical"}}) > on (run_id) (max by (run_id) ({_LATEST}) - 300)'
"""Query for critical incidents that explain why the ranks stopped: opened when they stopped or later, with five minutes
allowed for ranks that took longer to stop. An older incident explains nothing."""
_BAD_HALTS = 'holter_halts_total{outcome=~"failed|incomplete"}'
_LOST_RANKS = 'printf "topk(5, holter_sidecar_up{run_id=%q} == 0)" $labels.run_id | query | sortByLabel "rank"'


def _sent(outcome: str) -> str:
    return f'sum by (run_id) (increase(holter_webhook_messages_total{{outcome="{outcome}"}}[10m]))'


WATCHER_RULES: tuple[WatcherRule, ...] = (
    WatcherRule(
        name="coordinator_absent",
        expr="(max by (run_id) (holter_coordinator_up) == 0) or (count by (run_id) (holter_coordinator_up) unless on (run_id) holter_detector_failures_total)",
        severity="critical",
        wait="2m",
        happened="Ranks are training and their coordinator is not there, or cannot be scraped.",
        says="no coordinator judges this run, or Prometheus does not reach it; training goes on unobserved and no incident can reach you.",
        why="The coordinator compares the ranks, explains and decides. Without it no fault of this run becomes an incident.",
        quiet="A run that has ended: its sidecars are gone with it.",
        do="`holter status RUN` on rank 0's host. Its log is logs/coordinator.log in the run directory. Rank 0's sidecar starts it again as often as it dies, after at most a minute; `holter coordinator --run-dir RUN --port PORT` starts it by hand on the same address. If it runs, Prometheus does not reach it: look at its target's error.",
    ),
    WatcherRule(
        name="sidecar_absent",
        expr="count by (run_id) (holter_sidecar_up == 0)",
        severity="warning",
        wait="2m",
        happened="Ranks are training without a sidecar.",
        says=f"{{{{ $value }}}} ranks have no sidecar on the line{{{{ with {_LOST_RANKS} }}}}, among them rank{{{{ range . }}}} {{{{ .Labels.rank }}}}{{{{ end }}}}{{{{ end }}}}.",
        why="Nobody sees these ranks hang or die, and what they compute is not compared.",
        quiet="A rank that ended: its sidecar said goodbye and has no series any more. One that has not come two minutes after the first.",
        do="`holter status RUN` names ranks and hosts. A rank that never came was not attached: is holter installed on its host, does its log say why, does it reach the coordinator? On the host: is the sidecar's process there (`pgrep -af 'holter.cli sidecar'`), and does it reach the coordinator's port? Its log is logs/sidecar-RANK.log in the run directory. The rank itself is not harmed; a sidecar that died comes back with the next start of the rank.",
    ),
    WatcherRule(
        name="detector_failing",
        expr="sum by (run_id, detector) (increase(holter_detector_failures_total[5m])) > 0",
        severity="warning",
        happened="A detector fails to judge.",
        says="the detector {{ $labels.detector }} fails; what it would find is not found.",
        why="A fault of its kind would be taken for health.",
        quiet="A failure that is more than five minutes old.",
        do="`blind` in /api/v1/status says how it fails, and the traceback is in logs/coordinator.log of the run directory. It is a defect of holter: report it with the journal of the run, on which `holter replay` shows it again.",
    ),
    WatcherRule(
        name="observations_dropped",
        expr="(sum by (run_id) (max by (run_id, rank) (increase(holter_observations_dropped_total[10m]))) > 0) or (max by (run_id) (increase(holter_job_observations_dropped_total[10m])) > 0)",
        severity="warning",
        happened="Observations are lost on their way from the ranks.",
        says='about {{ $value | printf "%.0f" }} observations were lost in ten minutes.',
        why="A fault may be in what was lost; verdicts rest on fewer steps.",
        quiet="Losses that are more than ten minutes old.",
        do="`holter status RUN` shows which ranks drop. One rank: its host is too busy to let the sidecar run. All: the line to the coordinator is too slow, or the ring is too small for the model (`HOLTER_RING_BYTES`).",
    ),
    WatcherRule(
        name="no_progress",
        expr=f"(time() - max by (run_id) ({_LATEST}) > 1800) unless on (run_id) ({_EXPLAINED})",
        severity="critical",
        wait="1m",
        happened="No rank has moved for half an hour, and no critical incident says why.",
        says="no rank has moved for {{ $value | humanizeDuration }}, and holter has found nothing that explains it: it may be blind.",
        why="A hang that holter does not recognise costs as much as one that it does.",
        quiet="A critical incident was opened when the ranks stopped, or since: then that is the news. For saves and evaluations that take more than half an hour and report no step, set a silence in Alertmanager.",
        do="`holter status RUN`: which phase are the ranks in? `py-spy dump --native --pid PID` on a rank shows what it waits for. If the job only works long (evaluation, a first compile), silence this alert for the run; if it hangs, keep the run directory: its journal shows what holter missed.",
    ),
    WatcherRule(
        name="blind_spots",
        expr="max by (run_id) (holter_blind_spots) > 0",
        severity="warning",
        wait="10m",
        happened="There is something about this run that holter cannot see.",
        says="{{ $value }} things cannot be seen; `blind` in /api/v1/status names them.",
        why="What cannot be seen must not be taken for healthy.",
        quiet="What could not be seen for less than ten minutes.",
        do="`holter status RUN --json` and read `blind`: lost sidecars, detectors that fail, hooks that a rank switched off to protect itself. Each sentence says what is missing.",
    ),
    WatcherRule(
        name="incidents_not_listed",
        expr="sum by (run_id) (holter_incident_open) > on (run_id) count by (run_id) (holter_incident_info)",
        severity="warning",
        wait="1m",
        happened="More incidents are open than are described one by one.",
        says="{{ $value }} incidents are open; those that have no alert of their own are in `holter report`.",
        why="Alerts are made of the described ones.",
        quiet="Every open incident has a series of its own.",
        do="`holter report RUN` prints all of them.",
    ),
    WatcherRule(
        name="webhook_failing",
        expr=f"({_sent('dropped')} > 0) or ({_sent('failed')} > 0 unless on (run_id) {_sent('delivered')} > 0)",
        severity="warning",
        happened="Messages to the webhook are not delivered.",
        says="messages about incidents could not be delivered to `HOLTER_WEBHOOK`.",
        why="Where the webhook is the only way to the pager, nobody is woken.",
        quiet="An attempt that failed, if a later one succeeded.",
        do="`warnings` in /api/v1/status has the last error. Check address, token file (`HOLTER_WEBHOOK_TOKEN_FILE`), and the way out of the cluster from rank 0's host.",
    ),
    WatcherRule(
        name="halt_failed",
        expr=f"max by (run_id, outcome) (increase({_BAD_HALTS}[15m]) > 0 or ({_BAD_HALTS} > 0 unless {_BAD_HALTS} offset 15m))",
        severity="critical",
        happened="A halt did not end as it should: the checkpoint may be missing or not whole.",
        says="a halt ended as {{ $labels.outcome }}.",
        why="The state that was to be preserved may not be there.",
        quiet="Halts that completed, and those that were called off or refused: the run goes on as it did. What is more than a quarter of an hour old.",
        do="`holter checkpoint list RUN` shows what there is and what it is worth; `holter report RUN` says why the run was halted. Do not start it again before a good checkpoint is chosen.",
    ),
)  # fmt: skip
