"""The rules that are committed are the rules that the code makes, and each fires and stays quiet as it should."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from holter import cli, faults
from holter.exporters import alerts, pages
from holter.exporters.alert_text import RUNBOOKS, alert_name, describe, panel_annotations, panel_of
from holter.exporters.alerts import AlertRule
from holter.exporters.snapshot import IncidentInfo
from holter.faults import CAUSES

GRAFANA = Path(__file__).resolve().parents[2] / "grafana"
RULES = [rule for rules in alerts.groups().values() for rule in rules]


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not on PATH")
    return found


def committed(folder: str, kind: str) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in (GRAFANA / folder).glob(kind)}


def test_what_is_committed_is_what_would_be_written_now() -> None:
    assert alerts.rule_files() == committed("alerts", "*.yml"), "run `holter alerts --write grafana`"
    assert pages.runbook_files() == committed("runbooks", "*.md"), "run `holter alerts --write grafana`"


def test_every_cause_every_detector_and_every_blindness_has_one_alert() -> None:
    expected = [alert_name(cause) for cause in CAUSES]
    expected += [alert_name(f"unexplained_{detector.name}") for detector in faults.ALL]
    expected += [alert_name(watch.name) for watch in alerts.WATCHER_RULES]
    assert expected == [rule.alert for rule in RULES]
    assert len(set(expected)) == len(expected)
    blindness = {"sidecar_absent", "coordinator_absent", "detector_failing", "observations_dropped", "no_progress"}
    assert blindness <= {watch.name for watch in alerts.WATCHER_RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.alert)
def test_a_rule_keeps_the_conventions(rule: alerts.AlertRule) -> None:
    assert re.fullmatch(r"Holter([A-Z][a-z0-9]*)+", rule.alert)
    assert rule.severity in {"critical", "warning", "info", "{{ $labels.severity }}"}
    assert "{{" not in rule.summary
    assert rule.summary.endswith(".")
    assert "{{ $labels.run_id }}" in rule.description
    assert pages.page(rule.page) is not None
    if rule.layer == "incident":
        assert all(f"$labels.{label}" in rule.description for label in ("ranks", "tensors", "collective", "step"))
    if rule.layer != "watcher":
        verdicts = {"holter_incident_info", "holter_incident_open", "holter_finding_active", alerts.LIVES}
        assert set(re.findall(r"holter_\w+", rule.expr)) <= verdicts, "the detector is the only judge"
        assert not re.search(r"[<>=]=? *\d", rule.expr), "the detector is the only judge"


def test_the_command_prints_one_file_that_prometheus_takes(capsys: Any, promtool: str, tmp_path: Path) -> None:
    assert 0 == cli.main(["alerts", "--runbooks", "https://wiki.corp/holter/"])
    path = tmp_path / "all.yml"
    path.write_text(capsys.readouterr().out)
    rules = [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
    assert len(RULES) == len(rules)
    assert "https://wiki.corp/holter/nonfinite_input.md" == rules[0]["annotations"]["runbook_url"]
    assert 0 == subprocess.run([promtool, "check", "rules", path], capture_output=True, check=False).returncode


def test_writing_takes_away_pages_of_what_is_no_more(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "runbooks").mkdir()
    (tmp_path / "runbooks" / "gremlins.md").write_text("")
    assert 0 == cli.main(["alerts", "--write", str(tmp_path)])
    assert set(pages.runbook_files()) == {path.name for path in (tmp_path / "runbooks").iterdir()}
    assert "gremlins" not in capsys.readouterr().err
    assert 2 == cli.main(["alerts", "--write", str(tmp_path / "runbooks" / "rank_dead.md")])
    assert 2 == cli.main(["alerts", "--runbooks", "somewhere"])


def test_every_page_can_be_printed(capsys: Any) -> None:
    for name in (watch.name for watch in alerts.WATCHER_RULES):
        assert 0 == cli.main(["explain", name])
        assert capsys.readouterr().out.startswith(f"{name} (alert)\n")


def test_what_a_pager_says_can_be_looked_up(capsys: Any) -> None:
    for alert, name in (("HolterNonfiniteInput", "nonfinite_input"), ("HolterUnexplainedSlowRank", "slow_rank")):
        assert (0, 0) == (cli.main(["explain", name]), cli.main(["explain", alert]))
        page, same = capsys.readouterr().out[:-1], pages.page(name)
        assert same is not None
        assert page == f"{same.rstrip()}\n{same.rstrip()}"
    assert 2 == cli.main(["explain", "nonfinite_imput"])
    said = capsys.readouterr().err
    assert "do you mean nonfinite_input" in said
    assert 2 == cli.main(["explain", "x"])
    assert len(capsys.readouterr().err) < 160


@pytest.mark.slow
def test_the_versioned_cases_of_promtool(promtool: str) -> None:
    tests = sorted(GRAFANA.glob("alerts/tests/*.yml"))
    ran = subprocess.run([promtool, "test", "rules", *tests], capture_output=True, text=True, check=False)
    assert 0 == ran.returncode, ran.stdout + ran.stderr
    tested = {match for path in tests for match in re.findall(r"alertname: (\w+)", path.read_text())}
    assert {alert_name(watch.name) for watch in alerts.WATCHER_RULES} <= tested


def test_each_generated_rule_fires_on_its_verdict_and_on_no_other(promtool: str, tmp_path: Path) -> None:
    """Every cause and every detector speaks at once, each of a run of its own: an alert must name its own run and no second."""
    files = [str(GRAFANA / "alerts" / name) for name in ("causes.yml", "detectors.yml")]
    path = tmp_path / "generated_test.yml"
    played = [_incidents(), _findings()]
    path.write_text(yaml.safe_dump({"rule_files": files, "evaluation_interval": "1m", "tests": played}))
    ran = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, check=False)
    assert 0 == ran.returncode, (ran.stdout + ran.stderr)[-4000:]


def _incidents() -> dict[str, Any]:
    where = 'ranks="1", tensors="a.weight", collective="all_reduce #3 of dp", step="7", url="http://c/i"'
    series, expected = [], []
    for cause in CAUSES:
        labels = {"run_id": f"of-{cause}", "incident": "i", "cause": cause, "severity": "warning"}
        info = IncidentInfo("i", cause, "warning", "1", "a.weight", "all_reduce #3 of dp", "7", "http://c/i")
        said = describe(info, f"of-{cause}")
        series += [
            {"series": f"holter_incident_info{{{_selector(labels)}, {where}}}", "values": "_x2 1x5"},
            {"series": f'holter_incidents_total{{run_id="former", cause="{cause}"}}', "values": "1x7"},
            {"series": f'holter_incident_open{{run_id="former", cause="{cause}"}}', "values": "0x7"},
        ]
        expected += [
            _expected(alert_name(cause), "1m", []),
            _expected(alert_name(cause), "5m", [(labels | {"layer": "incident"}, said, cause)]),
        ]
    return {"name": "incidents", "interval": "1m", "input_series": series, "alert_rule_test": expected}


def _findings() -> dict[str, Any]:
    series = [{"series": 'holter_incident_open{run_id="told", cause="x", severity="critical"}', "values": "1x9"}]
    expected = []
    for name in (detector.name for detector in faults.ALL):
        labels = {"run_id": f"of-{name}", "detector": name, "severity": "critical"}
        said = (
            f"Run of-{name}: a finding of {name} has stood for two minutes, and no incident explains it; `holter status` "
            "shows its words, with ranks and step."
        )
        explained = _selector(labels | {"run_id": "told"})
        series += [
            {"series": f"holter_finding_active{{{one}}}", "values": "1x9"} for one in (_selector(labels), explained)
        ]
        alert = alert_name(f"unexplained_{name}")
        expected += [
            _expected(alert, "1m", []),
            _expected(alert, "5m", [(labels | {"layer": "finding"}, said, name)]),
        ]
    return {"name": "findings", "interval": "1m", "input_series": series, "alert_rule_test": expected}


def _expected(alert: str, at: str, fired: list[tuple[dict[str, str], str, str]]) -> dict[str, Any]:
    rule = next(rule for rule in RULES if rule.alert == alert)
    return {
        "eval_time": at,
        "alertname": alert,
        "exp_alerts": [
            {
                "exp_labels": labels,
                "exp_annotations": {
                    "summary": rule.summary,
                    "description": said,
                    "runbook_url": f"{RUNBOOKS}/{page}.md",
                    **_panel(rule, labels.get("run_id", "")),
                },
            }
            for labels, said, page in fired
        ],
    }


def _panel(rule: AlertRule, run_id: str) -> dict[str, str]:
    found = panel_annotations(panel_of(rule.layer, rule.page))
    return {name: text.replace("{{ $labels.run_id }}", run_id) for name, text in found.items()}


def _selector(labels: dict[str, str]) -> str:
    return ", ".join(f'{name}="{value}"' for name, value in labels.items())
