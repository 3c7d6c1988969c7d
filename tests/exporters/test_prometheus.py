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

from holter.exporters import CoordinatorSnapshot, RankSnapshot, StepHistogram, expose, families
from holter.exporters.prometheus import DETAILED_RANKS
from holter.records import Phase

GOLDEN = Path(__file__).parent / "golden" / "metrics.txt"
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
    overhead_ratio=0.004,
    nonfinite={"gradient": 3},
    dropped=2,
    steps=StepHistogram().add(0.2).add(0.3).add(500.0),
)
COORDINATOR = CoordinatorSnapshot(
    detectors=("dead_rank", "nonfinite_values"),
    detector_s={"dead_rank": 0.001},
    detector_failures={"nonfinite_values": 1},
    findings=(("dead_rank", "critical"),),
    open_incidents=(("rank_dead", "critical"),),
    incidents={"rank_dead": 1},
)


def text(accept: str = "") -> str:
    return expose(families("run-1", "0.1.0", [RANK, RankSnapshot(0, "node-b")], COORDINATOR), accept)[0].decode()


def _samples(metrics: Iterable[Metric]) -> set[tuple[str, tuple[tuple[str, str], ...], float]]:
    found = (sample for family in metrics for sample in family.samples)
    return {(sample.name, tuple(sorted(sample.labels.items())), sample.value) for sample in found}


def test_the_exposition_is_what_it_was() -> None:
    assert GOLDEN.read_text() == text()


def test_both_formats_parse_and_say_the_same() -> None:
    plain, modern = _samples(parse_text(text())), _samples(parse_openmetrics(text(OPENMETRICS)))
    assert plain == modern
    assert len(plain) > 50


def test_the_scraper_chooses_the_format() -> None:
    assert expose([], "")[1].startswith("text/plain")
    assert expose([], OPENMETRICS)[1].startswith("application/openmetrics-text")
    assert text(OPENMETRICS).endswith("# EOF\n")


def test_counters_begin_at_0_and_unknown_values_are_absent() -> None:
    lines = expose(families("r", "v", [RankSnapshot(0, "h")]), "")[0].decode()
    assert 'holter_observations_dropped_total{rank="0",run_id="r"} 0.0' in lines
    assert 'holter_nonfinite_total{rank="0",run_id="r",where="loss"} 0.0' in lines
    assert "holter_loss" not in lines
    assert "holter_step{" not in lines


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


def test_promtool_finds_nothing_to_say() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not on PATH")
    checked = subprocess.run([promtool, "check", "metrics"], input=text(), text=True, capture_output=True, check=False)
    assert (0, "") == (checked.returncode, checked.stderr)
