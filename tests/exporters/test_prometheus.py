"""The exposition, letter by letter, and what a scraper may rely on."""

import dataclasses
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from holter.exporters.prometheus import DETAILED_RANKS, MAX_INFOS, MAX_LATEST, MAX_MODULES, METRICS, expose, families
from holter.exporters.snapshot import (
    CoordinatorSnapshot,
    IncidentInfo,
    JobFigures,
    ModuleFigures,
    RankSnapshot,
    StepHistogram,
)
from holter.faults.window import Spread
from holter.records import Device, Phase
from holter.records.goodput import Life, goodput

GOLDEN = Path(__file__).parent / "golden"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"

RANK = RankSnapshot(
    rank=1,
    hostname='node "a"',
    gpu_uuid="GPU-1",
    step=42,
    last_progress_s=1763287200.5,
    phase=Phase.BACKWARD,
    loss=1.25,
    gradient_norm=float("inf"),
    lag_s=0.05,
    overhead_ratio=0.004,
    nonfinite={"gradient": 3},
    dropped=2,
    steps=StepHistogram().add(0.2).add(0.3).add(500.0),
    device=Device(
        uuid="GPU-1",
        throttled_by=["thermal"],
        clock_mhz=1200.0,
        clock_limit_mhz=1980.0,
        temperature_c=91.0,
        power_w=650.5,
        memory_used_bytes=60 << 30,
        memory_total_bytes=80 << 30,
        counters={"ecc_uncorrected": 2, "pcie_replays": 5, "thermal_held_ns": 7},
        states=["row_remap_pending"],
    ),
    is_coordinator_there=True,
    is_unwatched=False,
)
JOB = JobFigures(
    world_size=2,
    step=41,
    sidecars={"connected": 1, "gone": 1},
    phases={Phase.BACKWARD: 1},
    last_progress_s=1763287200.5,
    lag_s=0.05,
    dropped=2,
    overhead_ratio=0.004,
    spreads={
        "loss": Spread(1.5, 1.25, 1.75, 1, 0, 2),
        "gradient_norm": Spread(3.0, 1.0, 5.0, 0, 1, 2),
        "learning_rate": Spread(0.001, 0.001, 0.001, 0, 0, 2),
        "seconds": Spread(0.2, 0.2, 0.2, 0, 0, 2),
        "loss_scale": Spread(65536.0, 65536.0, 65536.0, 0, 0, 2),
    },
    modules=(
        ModuleFigures("head", 0.5, 2.0, 0.001, 0.0),
        ModuleFigures("encoder", float("inf"), 1.0, float("nan"), 0.25),
    ),
    exponents=(0.25, 0.75),
)
COORDINATOR = CoordinatorSnapshot(
    goodput=goodput(
        [Life(started_ns=0, until_ns=100 * 10**9, steps=40, parts={"progress": 90.0, "start": 7.5, "data": 2.5})]
    ),
    detectors=("dead_rank", "nonfinite_values"),
    detector_s={"dead_rank": 0.001},
    detector_failures={"nonfinite_values": 1},
    findings=(("dead_rank", "critical"),),
    open_incidents=(("rank_dead", "critical"),),
    opened_s={"critical": 1794737700.0},
    incidents={"rank_dead": 1, "slow_input": 0},
    infos=(
        IncidentInfo(
            "20261115T101500-1", "rank_dead", "critical", "1", "", "all_reduce #7 of dp", "41", "http://a:1/x"
        ),
    ),
    halts={"completed": 1},
    last_good_step=40,
    num_blind_spots=1,
    webhook={"delivered": 2},
    job=JOB,
)


def text(accept: str = "") -> str:
    return expose(families("run-1", "0.1.0", [RANK, RankSnapshot(0, "node-b")], COORDINATOR), accept)[0].decode()


def _samples(metrics: Iterable[Metric]) -> set[tuple[str, tuple[tuple[str, str], ...], float]]:
    found = (sample for family in metrics for sample in family.samples)
    return {(sample.name, tuple(sorted(sample.labels.items())), sample.value) for sample in found}


@pytest.mark.parametrize(("accept", "name"), [("", "metrics.txt"), (OPENMETRICS, "openmetrics.txt")])
def test_the_exposition_is_what_it_was(accept: str, name: str) -> None:
    assert (GOLDEN / name).read_text() == text(accept)


def test_every_metric_of_the_table_is_in_it() -> None:
    shown = {line.split()[2] for line in text().splitlines() if line.startswith("# TYPE")}
    shown.add("holter_hub_run")  # by `holter hub` alone
    assert {f"holter_{name}" for name in METRICS} == shown


def test_openmetrics_tells_the_units() -> None:
    assert "# UNIT holter_device_power_watts watts\n" in text(OPENMETRICS)
    assert "# UNIT holter_step_seconds seconds\n" in text(OPENMETRICS)


def test_both_formats_parse_and_say_the_same() -> None:
    plain, modern = _samples(parse_text(text())), _samples(parse_openmetrics(text(OPENMETRICS)))
    assert plain == modern
    assert len(plain) > 50


def test_the_scraper_chooses_the_format() -> None:
    assert expose([], "")[1].startswith("text/plain")
    assert expose([], OPENMETRICS)[1].startswith("application/openmetrics-text")
    assert text(OPENMETRICS).endswith("# EOF\n")


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2", True),
        ('APPLICATION/OpenMetrics-Text; Version="1.0.0" ; Q=1, */*', True),
        ("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;q=0.1", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=much", False),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;version=abc", False),
        ("text/plain;version=1.0.0-rc1", False),
        ("*/*", False),
        (";;=,,=;", False),
    ],
)  # fmt: skip
def test_whatever_a_scraper_writes_it_is_answered_in_a_format_that_we_speak(accept: str, *, is_open: bool) -> None:
    body, content_type = expose(families("r", "v", []), accept)
    formats = ("text/plain; version=0.0.4; charset=utf-8", "application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert content_type.startswith(formats[is_open])
    assert is_open == body.endswith(b"# EOF\n")


def test_counters_begin_at_0_and_unknown_values_are_absent() -> None:
    lines = expose(families("r", "v", [RankSnapshot(0, "h")]), "")[0].decode()
    assert 'holter_observations_dropped_total{rank="0",run_id="r"} 0.0' in lines
    assert 'holter_nonfinite_total{rank="0",run_id="r",where="loss"} 0.0' in lines
    assert "holter_loss" not in lines
    assert "holter_step{" not in lines
    job = expose(families("r", "v", [], CoordinatorSnapshot(detectors=("dead_rank",))), "")[0].decode()
    for outcome in ("completed", "called_off", "refused", "incomplete", "failed"):
        assert f'holter_halts_total{{outcome="{outcome}",run_id="r"}} 0.0' in job
    assert 'holter_detector_failures_total{detector="dead_rank",run_id="r"} 0.0' in job
    assert 'holter_job_observations_dropped_total{run_id="r"} 0.0' in job
    assert "holter_checkpoint_last_good_step" not in job
    assert 'holter_webhook_messages_total{outcome="failed",run_id="r"} 0.0' in job


def test_of_very_many_modules_and_incidents_the_worst_are_shown() -> None:
    modules = tuple(ModuleFigures(f"layer.{n}", float(n), 1.0, 0.1, 0.0) for n in range(1000))
    infos = tuple(IncidentInfo(str(n), "rank_dead", "critical", "", "", "", "", "") for n in range(100))
    shown = families("r", "v", [], CoordinatorSnapshot(infos=infos, job=JobFigures(modules=modules)))
    by_name = {family.name: family.samples for family in shown}
    norms = by_name["holter_module_gradient_norm"]
    assert MAX_MODULES == len(norms) == len(by_name["holter_module_update_ratio"])
    assert ("layer.999", 999.0) == (norms[0].labels["module"], norms[0].value)
    assert MAX_INFOS == len(by_name["holter_incident_info"])


def test_names_that_a_script_chose_are_bounded_and_make_no_series_twice() -> None:
    modules = tuple(ModuleFigures(f"{n}{'.x' * 500}", float(n), 1.0, 0.1, 0.0) for n in range(3))
    shown = families("r", "v", [], CoordinatorSnapshot(job=JobFigures(modules=modules)))
    norms = next(family.samples for family in shown if family.name == "holter_module_gradient_norm")
    assert [(2.0, 120)] == [(sample.value, len(sample.labels["module"])) for sample in norms]


def test_every_series_names_its_run_and_a_rank_has_at_most_60() -> None:
    samples = [sample for family in families("r", "v", [RANK]) for sample in family.samples]
    assert all(sample.labels["run_id"] == "r" for sample in samples)
    assert sum("rank" in sample.labels for sample in samples) <= 60


def test_a_rank_whose_sidecar_is_gone_shows_that_and_nothing_stale() -> None:
    gone = dataclasses.replace(RANK, is_sidecar_up=False)
    samples = [sample for family in families("r", "v", [gone]) for sample in family.samples if "rank" in sample.labels]
    assert [("holter_sidecar_up", 0)] == [(sample.name, sample.value) for sample in samples]


def test_a_job_of_thousands_is_a_scrape_of_two_series_a_rank() -> None:
    many = [RankSnapshot(rank, "h", step=1) for rank in range(DETAILED_RANKS + 1)]
    samples = [sample for family in families("r", "v", many) for sample in family.samples if "rank" in sample.labels]
    assert 2 * len(many) == len(samples)


def test_the_latest_ranks_of_a_job_of_thousands_are_told_by_their_lag() -> None:
    many = [RankSnapshot(rank, "h", step=1, lag_s=0.0) for rank in range(4096)]
    for rank in range(1000, 1040):
        many[rank] = dataclasses.replace(many[rank], lag_s=rank / 1e3)
    many[1039] = dataclasses.replace(many[1039], is_sidecar_up=False)
    (lag,) = (family for family in families("r", "v", many) if family.name == "holter_collective_lag_seconds")
    told = [(sample.labels["rank"], sample.value) for sample in lag.samples]
    assert [(str(rank), rank / 1e3) for rank in range(1038, 1038 - MAX_LATEST, -1)] == told


def test_a_loss_that_is_not_finite_on_some_ranks_is_counted_beside_the_mean_of_the_others() -> None:
    job = JobFigures(spreads={"loss": Spread(1.5, 1.25, 1.75, 1, 0, 8, num_nonfinite=3)})
    shown = families("r", "v", [], CoordinatorSnapshot(job=job))
    (bad,) = (family for family in shown if family.name == "holter_job_nonfinite_ranks")
    assert [({"run_id": "r", "number": "loss"}, 3)] == [(sample.labels, sample.value) for sample in bad.samples]


def test_promtool_finds_nothing_to_say() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not on PATH")
    checked = subprocess.run([promtool, "check", "metrics"], input=text(), text=True, capture_output=True, check=False)
    assert (0, "") == (checked.returncode, checked.stderr)
