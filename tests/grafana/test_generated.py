"""The committed dashboards are what the code generates, and what Grafana's own schema allows."""

import json
import re
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from prometheus_server import filled_in

from holter import cli
from holter.exporters import alert_text
from holter.exporters.dashboards import ALL, render
from holter.exporters.dashboards.promql import END

GRAFANA = Path(__file__).resolve().parents[2] / "grafana"
VALIDATOR = jsonschema.Draft7Validator(json.loads((GRAFANA / "schema" / "dashboard.schema.json").read_text()))


def mistakes(dashboard: dict[str, Any]) -> list[str]:
    """What the schema does not allow. Of the kinds that a panel may be of, the one that it says it is counts."""
    found = []
    for error in VALIDATOR.iter_errors(dashboard):
        of_its_kind = [
            inner
            for inner in error.context or []
            if error.validator_value[inner.schema_path[0]]["properties"].get("type", {}).get("const") == error.instance.get("type")
        ]  # fmt: skip
        found += [f"{list(one.absolute_path)}: {one.message}" for one in of_its_kind or [error]]
    return found


@pytest.mark.parametrize("uid", ALL)
def test_the_committed_file_is_what_the_code_generates(uid):
    assert render(uid) == (GRAFANA / "dashboards" / f"{uid}.json").read_text(), (
        "run `holter dashboards --write grafana/dashboards`"
    )


def test_there_are_no_other_files():
    assert set(ALL) == {path.stem for path in (GRAFANA / "dashboards").iterdir()}


@pytest.mark.parametrize("uid", ALL)
def test_grafanas_schema_allows_it(uid):
    assert [] == mistakes(json.loads(render(uid)))


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("panels", 0, "type"), "speedometer"),
        (("panels", 0, "options", "grafMode"), "area"),
        (("panels", 7, "options", "legend", "displayMode"), "fancy"),
        (("panels", 7, "targets", 0, "expr"), 1),
        (("panels", 7, "fieldConfig", "defaults", "custom", "lineWidth"), "thin"),
        (("annotations", "list", 0, "iconColor"), None),
        (("templating", "list", 1, "refresh"), "often"),
        (("refreshEvery",), "30s"),
    ],
)
def test_the_schema_sees_what_is_wrong(keys, value):
    dashboard = place = json.loads(render("holter-overview"))
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    assert [] != mistakes(dashboard)


@pytest.mark.parametrize("uid", ALL)
def test_panels_have_numbers_of_their_own_and_do_not_overlap(uid):
    panels = json.loads(render(uid))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    positions = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y) for at in positions for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert 24 > max(x for x, _ in cells)


def test_the_published_table_names_every_panel():
    line = re.compile(r"^\| `(holter-\w+)` \| (\d+) \| (.+) \| (.+) \|$", re.MULTILINE)
    told = [(uid, int(number), *words) for uid, number, *words in line.findall((GRAFANA / "README.md").read_text())]
    panels = [(uid, panel) for uid in ALL for panel in json.loads(render(uid))["panels"]]
    assert [(uid, panel["id"], panel["title"], panel["description"]) for uid, panel in panels] == told


@pytest.mark.parametrize("uid", ALL)
def test_there_is_a_picture_that_says_what_it_is(uid):
    picture = (GRAFANA / "pictures" / f"{uid}.svg").read_text()
    assert "No Grafana was run." in picture
    assert ("DCGM_" in render(uid)) == ("What devices tell is made up" in picture)
    assert all(escape(panel["title"]) in picture for panel in json.loads(render(uid))["panels"])


def test_no_panel_draws_a_line_for_each_of_thousands_of_ranks():
    # Rows of a table are scrolled through, and chosen by the variable.
    for uid in ALL:
        for panel in json.loads(render(uid))["panels"]:
            by_rank = [target["expr"] for target in panel["targets"] if "{{rank}}" in target["legendFormat"]]
            assert all("topk(" in expr or "bottomk(" in expr for expr in by_rank), (uid, panel["title"])


@pytest.mark.parametrize("uid", ["holter-overview", "holter-fleet"])
def test_what_is_about_the_job_asks_for_the_jobs_own_series(uid):
    named = {1, 2, 3, 4, 7, 8, 9, 10} if uid == "holter-overview" else {2, 4, 6, 7, 9}
    panels = {panel["id"]: panel for panel in json.loads(render(uid))["panels"]}
    asked = [target["expr"] for number in named for target in panels[number]["targets"]]
    assert all("holter_job_" in expr and "$rank" not in expr for expr in asked)


def test_what_dcgm_tells_is_found_under_each_rank_that_has_the_device(tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not on PATH")
    panels = {panel["id"]: panel["targets"][0]["expr"] for panel in json.loads(render("holter-ranks"))["panels"]}
    told = {
        'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-1", gpu="0"}': "50x5",
        'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-1", gpu="0", GPU_I_ID="1"}': "70x5",
        'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-2", gpu="1"}': "90x5",
        'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-3", gpu="2"}': "10x5",
        'holter_rank_info{run_id="r", rank="0", gpu_uuid="GPU-1", job="coordinators"}': "1x5",
        'holter_rank_info{run_id="r", rank="0", gpu_uuid="GPU-1", job="sidecars"}': "1x5",
        'holter_rank_info{run_id="r", rank="1", gpu_uuid="GPU-2"}': "1x5",
        'holter_rank_info{run_id="r", rank="2", gpu_uuid="GPU-2"}': "1x5",
        'holter_rank_info{run_id="r", rank="3", gpu_uuid=""}': "1x5",
        'holter_rank_info{run_id="other", rank="0", gpu_uuid="GPU-3"}': "1x5",
    }
    # There is no end of a time that is shown in a test of promtool.
    asked = {"expr": filled_in(panels[14], "r").replace(END, ""), "eval_time": "3m"}
    expected = [{"labels": f'{{rank="{rank}"}}', "value": value} for rank, value in ((0, 70), (1, 90), (2, 90))]
    series = [{"series": name, "values": values} for name, values in told.items()]
    case = {"interval": "1m", "input_series": series, "promql_expr_test": [asked | {"exp_samples": expected}]}
    path = tmp_path / "joined.json"
    path.write_text(json.dumps({"rule_files": [], "evaluation_interval": "1m", "tests": [case]}))
    ran = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, check=False)
    assert 0 == ran.returncode, ran.stdout + ran.stderr


def test_links_lead_to_dashboards_that_are_there():
    for uid in ALL:
        assert set(re.findall(r"/d/([\w-]+)", render(uid))) <= set(ALL)


def test_incidents_are_marked_and_lead_to_their_page():
    for uid in ALL:
        marks = {mark["name"]: mark for mark in json.loads(render(uid))["annotations"]["list"]}
        assert {"Incidents", "Halts"} == set(marks)
        assert 'href="{{url}}"' in marks["Incidents"]["textFormat"]
    for uid in ("holter-overview", "holter-incidents"):
        (table,) = (
            panel
            for panel in json.loads(render(uid))["panels"]
            if panel["title"] == "Open incidents" and panel["type"] == "table"
        )
        (page,) = (
            override for override in table["fieldConfig"]["overrides"] if override["matcher"]["options"] == "Page"
        )
        assert "${__value.raw}" == page["properties"][0]["value"][0]["url"]


def test_alerts_lead_to_panels_that_are_there():
    there = {(uid, panel["id"]) for uid in ALL for panel in json.loads(render(uid))["panels"]}
    assert {
        alert_text.INCIDENT_PANEL,
        alert_text.FINDING_PANEL,
        alert_text.WATCHER_PANEL,
        *alert_text.PANEL_OF_ALERT.values(),
    } <= there
    assert ("holter-self", 7) == alert_text.panel_of("watcher", "sidecar_absent")
    assert alert_text.INCIDENT_PANEL == alert_text.panel_of("incident", "nonfinite_input")
    said = alert_text.panel_annotations(alert_text.INCIDENT_PANEL)
    assert ("holter-incidents", "6") == (said["__dashboardUid__"], said["__panelId__"])
    assert "/d/holter-incidents?viewPanel=6&var-run={{ $labels.run_id }}" == said["dashboard"]


def test_the_command_prints_one_or_all(capsys):
    assert 0 == cli.main(["dashboards", "holter-ranks"])
    assert render("holter-ranks") == capsys.readouterr().out
    assert 0 == cli.main(["dashboards"])
    assert list(ALL) == [dashboard["uid"] for dashboard in json.loads(capsys.readouterr().out)]


def test_the_command_writes_files(tmp_path, capsys):
    assert 0 == cli.main(["dashboards", "--write", str(tmp_path / "new")])
    assert set(ALL) == {path.stem for path in (tmp_path / "new").iterdir()}
    assert len(ALL) == len(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("words", [["dashboards", "nothing"], ["dashboards", "--write", "/dev/null/place"]])
def test_wrong_use_is_one_sentence(words, capsys):
    assert 2 == cli.main(words)
    assert 1 == len(capsys.readouterr().err.splitlines())


def test_without_the_sdk_the_same_dashboards_are_printed():
    # None in sys.modules: as if it were not installed.
    program = "import sys; sys.modules['grafana_foundation_sdk'] = None; from holter import cli; sys.exit(cli.main(['dashboards', 'holter-ranks']))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    committed = (GRAFANA / "dashboards" / "holter-ranks.json").read_text()
    assert (0, committed) == (ended.returncode, ended.stdout)
