"""What a cluster is given to run: its own checkers find nothing to say, and no secret is in it."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from holter.exporters import alerts
from holter.exporters.alert_text import alert_name

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ALERTMANAGER = yaml.safe_load((DEPLOY / "alertmanager" / "alertmanager.yml").read_text())
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())


@pytest.mark.parametrize(
    ("program", "words", "path"),
    [
        ("promtool", ("check", "config"), "prometheus/prometheus.yml"),
        ("amtool", ("check-config",), "alertmanager/alertmanager.yml"),
    ],
)
def test_its_own_program_takes_it(program: str, words: tuple[str, ...], path: str) -> None:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not on PATH")
    ran = subprocess.run([found, *words, DEPLOY / path], capture_output=True, text=True, check=False)
    assert 0 == ran.returncode, ran.stdout + ran.stderr


def test_secrets_are_files() -> None:
    keys = {key for key, _ in _leaves(ALERTMANAGER)}
    assert {"slack_api_url_file", "routing_key_file", "credentials_file"} <= keys
    assert not keys & {
        "slack_api_url",
        "api_url",
        "routing_key",
        "service_key",
        "credentials",
        "password",
        "bearer_token",
    }


def test_a_run_and_an_alert_are_one_message() -> None:
    assert ["alertname", "run_id"] == ALERTMANAGER["route"]["group_by"]
    assert all("group_by" not in route for route in ALERTMANAGER["route"]["routes"])
    kinds = {kind for receiver in ALERTMANAGER["receivers"] for kind in receiver}
    assert {"name", "pagerduty_configs", "slack_configs", "webhook_configs"} == kinds


def test_whatever_is_held_back_is_held_back_within_one_run_and_exists() -> None:
    known = {rule.alert for rules in alerts.groups().values() for rule in rules}
    for rule in ALERTMANAGER["inhibit_rules"]:
        assert ["run_id"] == rule["equal"]
        text = " ".join(rule["source_matchers"] + rule["target_matchers"])
        assert set(re.findall(r"Holter\w+", text)) <= known
        assert set(re.findall(r'layer="(\w+)"', text)) <= {"incident", "finding", "watcher"}
    named = {alert_name(watch.name) for watch in alerts.WATCHER_RULES}
    assert {"HolterNoProgress", "HolterCoordinatorAbsent"} <= named


def _is_held_back(target: dict[str, str], source: dict[str, str]) -> bool:
    return any(
        _matches(rule["source_matchers"], source) and _matches(rule["target_matchers"], target)
        for rule in ALERTMANAGER["inhibit_rules"]
    )


def _matches(matchers: list[str], labels: dict[str, str]) -> bool:
    parts = [re.fullmatch(r'(\w+)=~?"(.*)"', matcher) for matcher in matchers]
    return all(part is not None and re.fullmatch(part[2], labels.get(part[1], "")) for part in parts)


def test_nothing_is_held_back_by_what_is_less_grave_or_does_not_explain_it() -> None:
    def of(layer: str, severity: str, alertname: str = "HolterAny") -> dict[str, str]:
        return {"layer": layer, "severity": severity, "alertname": alertname}

    assert _is_held_back(of("finding", "critical"), by := of("incident", "critical"))
    assert not _is_held_back(of("finding", "critical"), of("incident", "warning"))
    assert _is_held_back(of("finding", "warning"), of("incident", "warning"))
    assert not _is_held_back(of("finding", "warning"), of("incident", "info"))
    assert not _is_held_back(of("watcher", "critical", "HolterNoProgress"), by), (
        "its rule knows which incident explains it"
    )


def test_prometheus_finds_jobs_both_ways_and_the_rules() -> None:
    jobs = PROMETHEUS["scrape_configs"]
    assert any("file_sd_configs" in job for job in jobs)
    assert [["http://trainer-0:9400/sd"]] == [
        [found["url"] for found in job["http_sd_configs"]] for job in jobs if "http_sd_configs" in job
    ]
    (pattern,) = PROMETHEUS["rule_files"]
    found = {path.name for path in (DEPLOY / "prometheus" / pattern).parent.resolve().glob("*.yml")}
    assert set(alerts.rule_files()) == found


def _leaves(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, dict):
        return [pair for key, value in node.items() for pair in [(key, value), *_leaves(value)]]
    return [pair for value in node for pair in _leaves(value)] if isinstance(node, list) else []
