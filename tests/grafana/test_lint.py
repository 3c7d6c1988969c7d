"""The committed dashboards keep the rules of Grafana's linter, and each rule sees what breaks it."""

import copy
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grafana_lint import EXCLUDED, RULES, TOTALS, queries
from prometheus_server import filled_in

FILES = sorted((Path(__file__).resolve().parents[2] / "grafana" / "dashboards").glob("*.json"))


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_rules_are_kept(path, rule):
    assert [] == list(RULES[rule](load(path)))


def _without(*keys: Any) -> Callable[[dict[str, Any]], None]:
    def spoil(dashboard: Any) -> None:
        for key in keys[:-1]:
            dashboard = dashboard[key]
        del dashboard[keys[-1]]

    return spoil


def _with(value: Any, *keys: Any) -> Callable[[dict[str, Any]], None]:
    def spoil(dashboard: Any) -> None:
        for key in keys[:-1]:
            dashboard = dashboard[key]
        dashboard[keys[-1]] = value

    return spoil


EXPR = ("panels", 0, "targets", 0, "expr")
SPOILED = {
    "template-datasource-rule": [_without("templating", "list", 0)],
    "template-run-rule": [_without("templating", "list", 2), _with("constant", "templating", "list", 1, "type")],
    "template-label-promql-rule": [_with("holter_step", "templating", "list", 1, "query", "query")],
    "template-on-time-change-reload-rule": [_with(1, "templating", "list", 1, "refresh")],
    "uneditable-dashboard-rule": [_with(True, "editable")],
    "panel-datasource-rule": [
        _with({"type": "prometheus", "uid": "mine"}, "panels", 0, "datasource"),
        _without("panels", 1, "targets", 0, "datasource"),
        _without("annotations", "list", 0, "datasource"),
    ],
    "panel-title-description-rule": [_with("", "panels", 0, "title"), _with("", "panels", 0, "description")],
    "panel-units-rule": [
        _without("panels", 0, "fieldConfig", "defaults", "unit"),
        _with("seconds", "panels", 0, "fieldConfig", "defaults", "unit"),
    ],
    "panel-no-targets-rule": [_with([], "panels", 0, "targets")],
    "target-rate-interval-rule": [_with('rate(holter_nonfinite_total{run_id="$run"}[5m])', *EXPR)],
    "target-counter-agg-rule": [_with('sum(holter_nonfinite_total{run_id="$run"})', *EXPR)],
    "target-run-rule": [
        _with("holter_incident_open", *EXPR),
        _with('holter_step{run_id="$run"}', *EXPR),
        _with('holter_device_power_watts{run_id="$run"}', *EXPR),
        _with("max by (UUID) (DCGM_FI_DEV_GPU_UTIL)", *EXPR),
    ],
}


@pytest.mark.parametrize(("rule", "spoil"), [(rule, spoil) for rule, spoils in SPOILED.items() for spoil in spoils])
def test_each_rule_sees_what_breaks_it(rule, spoil):
    dashboard = copy.deepcopy(load(next(path for path in FILES if path.stem == "holter-overview")))
    spoil(dashboard)
    assert [] != list(RULES[rule](dashboard))


def test_no_rule_is_untested_and_no_exclusion_stale():
    assert set(SPOILED) == set(RULES)
    assert not set(EXCLUDED) & set(RULES)
    known = {(path.stem, panel["id"]) for path in FILES for panel in load(path)["panels"] if "_total" in str(panel)}
    assert set(TOTALS) <= known


def test_promtool_parses_every_expression(tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not on PATH")
    dashboards = [load(path) for path in FILES]
    asked = [expr for dashboard in dashboards for _, _, expr in queries(dashboard)]
    asked += [mark["target"]["expr"] for dashboard in dashboards for mark in dashboard["annotations"]["list"]]
    for dashboard in dashboards:
        questions = [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
        asked += [query.removeprefix("label_values(").rsplit(", ", 1)[0] for query in questions]
    rules = [{"record": f"rule:{number}", "expr": filled_in(expr, "r")} for number, expr in enumerate(asked)]
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    checked = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True, check=False)
    assert 0 == checked.returncode, checked.stderr
    assert f"{len(asked)} rules found" in checked.stdout
