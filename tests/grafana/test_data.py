"""Every panel's query, on a Prometheus that scraped real jobs: there is data in each."""

import json
import math
import statistics
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from draw_dashboards import SAYS, drawn
from prometheus_server import filled_in

GRAFANA = Path(__file__).resolve().parents[2] / "grafana"
HEALTHY, SPOILED = "healthy", "spoiled"
pytestmark = pytest.mark.job


def dashboard(uid: str) -> dict[str, Any]:
    """As it is committed."""
    return json.loads((GRAFANA / "dashboards" / f"{uid}.json").read_text())


def targets() -> list[Any]:
    """(dashboard, panel, target) of every query there is."""
    found = []
    for path in sorted((GRAFANA / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                name = f"{path.stem}-{panel['id']}-{target['refId']}"
                found.append(pytest.param(path.stem, panel, target, id=name))
    return found


@pytest.mark.parametrize(("uid", "panel", "target"), targets())
def test_every_query_has_data(scraped, uid, panel, target):
    expr = filled_in(target["expr"], ".*" if uid == "holter-fleet" else SPOILED)
    if target["instant"]:
        # The loss of a run that has met a NaN is NaN: data, and the news.
        has_data = bool(scraped.prometheus.at(expr, scraped.end_s))
    else:
        # A quantile of nothing is NaN too: over the whole run there must be numbers.
        found = scraped.prometheus.between(expr, scraped.start_s, scraped.end_s)
        has_data = any(not math.isnan(float(value)) for series in found for _, value in series["values"])
    assert has_data, (panel["title"], expr)


def test_the_run_that_met_a_nan_is_the_one_in_trouble(scraped):
    assert 1 <= value(scraped, "holter-overview", 6)
    assert 1 == value(scraped, "holter-incidents", 1)
    # Of severity critical: a busy machine makes a slow rank, which is a warning.
    assert 0 == value(scraped, "holter-incidents", 1, run_id="healthy")
    assert 1 == value(scraped, "holter-fleet", 3, run_id=".*")
    assert 2 == value(scraped, "holter-fleet", 1, run_id=".*")
    assert 4 == value(scraped, "holter-fleet", 2, run_id=".*")


def test_what_both_coordinator_and_sidecar_export_counts_once(scraped):
    twice = scraped.prometheus.at(f'holter_step{{run_id="{SPOILED}", rank="0"}}', scraped.end_s)
    assert {"coordinators", "sidecars"} == {series["metric"]["job"] for series in twice}
    assert 1 == value(scraped, "holter-overview", 5)
    shares = scraped.prometheus.at(filled_in(expression("holter-ranks", 6), SPOILED), scraped.end_s)
    assert pytest.approx(1, abs=0.01) == sum(float(series["value"][1]) for series in shares)


def test_the_late_rank_is_the_row_in_full_colour(scraped):
    found = scraped.prometheus.between(
        filled_in(expression("holter-ranks", 1), SPOILED), scraped.start_s, scraped.end_s
    )
    lags = {series["metric"]["rank"]: [float(lag) for _, lag in series["values"]] for series in found}
    # It took 80 ms longer than its peer in each of these steps; half of that leaves room for a busy machine.
    assert max(lags["1"]) > 0.04
    assert statistics.mean(lags["1"]) > statistics.mean(lags["0"])


def test_phases_are_named_as_the_ranks_name_them(scraped):
    panel = next(panel for panel in dashboard("holter-ranks")["panels"] if panel["id"] == 5)
    names = {
        number: shown["text"] for number, shown in panel["fieldConfig"]["defaults"]["mappings"][0]["options"].items()
    }
    numbers = scraped.prometheus.at(filled_in(expression("holter-ranks", 5), SPOILED), scraped.end_s)
    active = scraped.prometheus.at(f'holter_phase{{run_id="{SPOILED}", job="sidecars"}} == 1', scraped.end_s)
    # Coordinator and sidecar are scraped apart; of what they say at the same time the later phase is drawn.
    assert {"0", "1"} == {series["metric"]["rank"] for series in numbers}
    assert {series["metric"]["phase"] for series in active} <= set(names.values())
    assert {names[series["value"][1]] for series in numbers} <= set(names.values())


def test_the_variables_offer_both_runs_and_both_ranks(scraped):
    query = {one["name"]: one["query"]["query"] for one in dashboard("holter-ranks")["templating"]["list"][1:]}
    assert {"healthy", "spoiled"} == offered(scraped, query["run"])
    assert {"0", "1"} == offered(scraped, query["rank"])


@pytest.mark.parametrize("uid", [path.stem for path in sorted((GRAFANA / "dashboards").glob("*.json"))])
def test_the_marks_are_where_the_incident_opened_and_where_the_run_was_halted(scraped, uid):
    marks = {mark["name"]: mark for mark in dashboard(uid)["annotations"]["list"]}
    assert ["nonfinite_input"] == [one["metric"]["cause"] for one in marked(scraped, marks["Incidents"], SPOILED)]
    assert [] == marked(scraped, marks["Halts"], SPOILED)
    (halt,) = marked(scraped, marks["Halts"], HEALTHY)
    assert {"run_id": HEALTHY, "outcome": "completed"} == halt["metric"]
    assert scraped.end_s < float(halt["values"][0][0])


def test_what_the_driver_and_dcgm_tell_of_a_device_is_found_under_its_rank(scraped):
    temperature, used = (
        {
            one["metric"]["rank"]: float(one["value"][1])
            for one in scraped.prometheus.at(filled_in(expression("holter-ranks", number), SPOILED), scraped.end_s)
        }
        for number in (12, 15)
    )
    assert temperature["0"] < temperature["1"]
    assert {"0": 61_000, "1": 61_001} == used
    assert [] == scraped.prometheus.at(filled_in(expression("holter-ranks", 15), HEALTHY), scraped.end_s)


TABLES = [target for target in targets() if target.values[1]["type"] == "table" and target.values[2]["refId"] == "A"]


@pytest.mark.parametrize(("uid", "panel", "target"), TABLES)
def test_the_columns_of_a_table_are_labels_that_are_there(scraped, uid, panel, target):
    found = scraped.prometheus.at(filled_in(target["expr"], ".*" if uid == "holter-fleet" else SPOILED), scraped.end_s)
    columns = {name for name in panel["transformations"][-1]["options"]["renameByName"] if not name.startswith("Value")}
    # Prometheus has no empty labels: a device, where there is none.
    assert columns - {"gpu_uuid", "collective", "tensors"} <= set(found[0]["metric"]) <= columns


@pytest.mark.parametrize("uid", [path.stem for path in sorted((GRAFANA / "dashboards").glob("*.json"))])
def test_every_dashboard_can_be_drawn(scraped, uid):
    text = drawn(dashboard(uid), scraped.prometheus, SPOILED, scraped.start_s, scraped.end_s)
    picture = ET.fromstring(text)  # noqa: S314 - our own
    words = [element.text for element in picture.iter() if element.tag.endswith("}text")]
    titles = {panel["title"] for panel in dashboard(uid)["panels"]}
    assert titles | {SAYS, dashboard(uid)["title"]} <= set(words)
    assert 0 == words.count("No data")


def marked(scraped: Any, mark: dict[str, Any], run_id: str) -> list[dict[str, Any]]:
    """Series of a mark, until after the halt; of critical incidents alone: a busy machine makes a slow rank, which is a warning."""
    found = scraped.prometheus.between(filled_in(mark["target"]["expr"], run_id), scraped.start_s, scraped.halted_s)
    return [one for one in found if one["metric"].get("severity", "critical") == "critical"]


def offered(scraped: Any, query: str) -> set[str]:
    """What `label_values(metric, label)` gives."""
    metric, label = query.removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
    found = scraped.prometheus.at(f"group by ({label}) ({filled_in(metric, SPOILED)})", scraped.end_s)
    return {series["metric"][label] for series in found}


def value(scraped: Any, uid: str, number: int, run_id: str = SPOILED) -> float:
    """The one number of a panel, at the end."""
    (found,) = scraped.prometheus.at(filled_in(expression(uid, number), run_id), scraped.end_s)
    return float(found["value"][1])


def expression(uid: str, number: int) -> str:
    """A panel's first query."""
    return next(panel["targets"][0]["expr"] for panel in dashboard(uid)["panels"] if panel["id"] == number)
