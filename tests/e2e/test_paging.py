"""From a fault in a real job to one page, through a real Prometheus and a real Alertmanager; and nothing from the healthy twin."""

import datetime as dt
import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.conftest import ROOT, Forked, wait_for
from tests.e2e.paging import Page, Stack, running

SCRIPTS = ROOT / "tests" / "corpus" / "scripts"
PAGED_S = 30.0
"""From the fault to the page."""
LINGER_S = 8.0
"""So long we wait for a page too many; several times what Alertmanager waits before it tells of a change."""

pytestmark = pytest.mark.job


@dataclass
class Watched:
    """What was seen of three jobs while they still ran."""

    stack: Stack
    diagnoses: dict[str, list[dict[str, Any]]]
    """Run -> its incidents."""
    moved: dict[str, float]
    """Run -> when its rank 1 last moved, seconds since the epoch."""
    counts: dict[str, int]
    """PromQL expression -> number of series."""
    pages: list[Page]
    """That had come by then."""

    def of(self, run_id: str, path: str = "/alertmanager") -> list[Page]:
        return [page for page in self.pages if page.path == path and page.run_id == run_id]


COUNTED = (
    'up{job="holter", run_id="nan"} == 1',
    'up{job="holter", run_id="hang"} == 1',
    'up{job="holter-sidecars", run_id="healthy"} == 1',
    'up{job="holter-coordinator"} == 1',
    'holter_step{run_id="healthy", job="holter-sidecars"} > 10',
    'holter_module_gradient_norm{run_id="healthy"}',
    'holter_gradient_exponent_ratio{run_id="healthy"}',
    'holter_job_loss{run_id="healthy", aggregate="mean"}',
    'ALERTS{run_id="healthy"}',
    'ALERTS{run_id="nan", alertstate="firing"}',
    'ALERTS{run_id="hang", alertstate="firing"}',
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("paging")) as made:
        yield made


def _start(stack: Stack, nursery: Any, run_id: str, script: str, *arguments: str, **env: str) -> Forked:
    place = stack.directory / run_id
    place.mkdir()
    words = [str(SCRIPTS / script), *arguments, "--steps", "100000"]
    return nursery.start(place, words, env={"HOLTER_RUN_ID": run_id, "HOLTER_ACTION": "notify"} | env)


@pytest.fixture(scope="module")
def watched(stack: Stack, nursery: Any) -> Watched:
    def start(*words: str, **env: str) -> Forked:
        return _start(stack, nursery, *words, **env)

    disk = {"HOLTER_TARGETS_DIR": str(stack.targets)}
    own = {"HOLTER_WEBHOOK": f"{stack.receiver}/holter", "HOLTER_WEBHOOK_TOKEN_FILE": str(stack.token_file)}
    jobs = {
        "healthy": start("healthy", "nan_in_batch.py", "--healthy", "--pause", "0.2", HOLTER_PORT=str(stack.job_port)),
        "nan": start("nan", "nan_in_batch.py", "--pause", "0.05", **disk, **own),
        "hang": start("hang", "process_faults.py", "suspend", **disk),
        "dead": start("dead", "process_faults.py", "kill", **own),
    }
    try:
        wait_for(lambda: stack.pages_at("/alertmanager", "nan"), 90, "the page about the NaN")
        wait_for(lambda: stack.pages_at("/alertmanager", "hang"), 90, "the page about the hang")
        wait_for(lambda: stack.pages_at("/holter", "dead"), 90, "the page about the dead rank")
        wait_for(lambda: not jobs["dead"].pids("coordinator"), 30, "the end of its coordinator")
        time.sleep(LINGER_S)
        pages = list(stack.pages)
        counts = {expression: len(stack.query(expression)) for expression in COUNTED}
        asked = {run_id: jobs[run_id].coordinator() for run_id in ("healthy", "nan", "hang")}
        diagnoses = {run_id: _get(address, "incidents") for run_id, address in asked.items()}
        moved = {
            run_id: _seconds(_get(address, "status")["ranks"][1]["last_progress_at"])
            for run_id, address in asked.items()
        }
        return Watched(stack, diagnoses, moved, counts, pages)
    finally:
        for job in jobs.values():
            job.end()


def test_a_nan_is_one_page_with_cause_rank_and_step(watched: Watched) -> None:
    (diagnosis,) = watched.diagnoses["nan"]
    (page,) = watched.of("nan")
    assert ("firing", "HolterNonfiniteInput") == (page.body["status"], page.alert)
    (alert,) = page.body["alerts"]
    assert ("critical", "nonfinite_input", diagnosis["id"]) == tuple(
        alert["labels"][name] for name in ("severity", "cause", "incident")
    )
    assert "Rank 1." in alert["annotations"]["description"]
    assert f"Since step {diagnosis['first_step']}." in alert["annotations"]["description"]
    assert page.at_s - _seconds(diagnosis["opened_at"]) + diagnosis["detected_after_s"] < PAGED_S
    assert 1 == watched.counts['ALERTS{run_id="nan", alertstate="firing"}']


def test_a_hang_is_one_page_with_cause_and_rank(watched: Watched) -> None:
    (diagnosis,) = watched.diagnoses["hang"]
    (page,) = watched.of("hang")
    assert ("firing", "HolterRankSuspended", "critical") == (
        page.body["status"],
        page.alert,
        page.body["commonLabels"]["severity"],
    )
    description = page.body["commonAnnotations"]["description"]
    assert "Rank 1." in description
    assert "Collective all_reduce #" in description
    assert diagnosis["id"] == page.body["commonLabels"]["incident"]
    assert page.at_s - watched.moved["hang"] < PAGED_S
    assert 1 == watched.counts['ALERTS{run_id="hang", alertstate="firing"}']


def test_the_healthy_twin_was_watched_and_pages_nobody(watched: Watched) -> None:
    assert [] == watched.diagnoses["healthy"]
    assert {"nan", "hang", "dead"} == {
        page.run_id for page in watched.pages if page.path in {"/alertmanager", "/holter"}
    }
    assert 0 == watched.counts['ALERTS{run_id="healthy"}'], "not even pending"
    assert (2, 1, 2) == (
        watched.counts['up{job="holter-sidecars", run_id="healthy"} == 1'],
        watched.counts['up{job="holter-coordinator"} == 1'],
        watched.counts['holter_step{run_id="healthy", job="holter-sidecars"} > 10'],
    )


def test_the_shared_disk_tells_of_coordinators_and_sidecars(watched: Watched) -> None:
    assert (3, 3) == tuple(watched.counts[f'up{{job="holter", run_id="{run_id}"}} == 1'] for run_id in ("nan", "hang"))


def test_dashboards_have_aggregates_of_a_real_job(watched: Watched) -> None:
    assert watched.counts['holter_module_gradient_norm{run_id="healthy"}'] >= 2
    assert 32 == watched.counts['holter_gradient_exponent_ratio{run_id="healthy"}']
    assert 1 == watched.counts['holter_job_loss{run_id="healthy", aggregate="mean"}']


def test_pagerduty_and_slack_are_told_the_same_with_secrets_from_files(watched: Watched) -> None:
    pagers = [page.body for page in watched.pages if page.path == "/pagerduty"]
    assert {("trigger", "k" * 32, "critical")} == {
        (body["event_action"], body["routing_key"], body["payload"]["severity"]) for body in pagers
    }
    assert ["HolterNonfiniteInput in nan", "HolterRankSuspended in hang"] == sorted(
        body["payload"]["summary"] for body in pagers
    )
    assert all("Rank 1." in body["payload"]["custom_details"]["what"] for body in pagers)
    chats = [page.body["attachments"][0] for page in watched.pages if page.path == "/slack"]
    assert ["HolterNonfiniteInput in nan", "HolterRankSuspended in hang"] == sorted(chat["title"] for chat in chats)
    assert {"Bearer a secret of ours"} == {page.token for page in watched.pages if page.path == "/alertmanager"}


def test_the_jobs_own_webhook_says_what_alertmanager_says(watched: Watched) -> None:
    own, theirs = watched.of("nan", "/holter")[-1], watched.of("nan")[-1]
    assert "Bearer a secret of ours" == own.token
    assert set(theirs.body) <= set(own.body), "what reads Alertmanager's messages reads ours"
    assert theirs.body["commonLabels"] == own.body["commonLabels"]
    assert theirs.body["commonAnnotations"].items() <= own.body["commonAnnotations"].items()


@pytest.mark.release
def test_a_job_that_dies_is_paged_about_though_its_coordinator_ends_with_it(watched: Watched) -> None:
    pages = watched.of("dead", "/holter")
    assert {("firing", "HolterRankDead")} == {(page.body["status"], page.alert) for page in pages}
    # On a busy machine the victim may be heard of first: the last word is the diagnosis that is written down.
    (path,) = watched.stack.directory.glob("dead/run/incidents/*/diagnosis.json")
    (rank,) = json.loads(path.read_text())["causes"][0]["ranks"]
    assert f"Rank {rank}." in pages[-1].body["commonAnnotations"]["description"]
    assert len({page.body["alerts"][0]["fingerprint"] for page in pages}) == 1
    assert len(pages) <= 2


@pytest.mark.release
def test_a_run_that_is_halted_is_one_page_though_it_is_gone(stack: Stack, nursery: Any) -> None:
    more = {"HOLTER_ACTION": "halt", "HOLTER_LINGER_S": "40", "HOLTER_TARGETS_DIR": str(stack.targets)}
    job = _start(stack, nursery, "halted", "nan_in_batch.py", "--pause", "0.05", **more)
    try:
        wait_for(lambda: stack.pages_at("/alertmanager", "halted"), 90, "the page about a halted run")
        wait_for(lambda: job.has_ended, 60, "the end of its ranks")
        time.sleep(LINGER_S)
        (page,) = stack.pages_at("/alertmanager", "halted")
        # The alert outlives the run; nothing asks why what has ended is silent.
        wait_for(lambda: not job.pids("coordinator"), 90, "the end of its coordinator")
        time.sleep(LINGER_S)
        later = stack.pages_at("/alertmanager", "halted")[1:]
        names = {series["metric"]["alertname"] for series in stack.query('ALERTS{run_id="halted"}')}
    finally:
        job.end()
    assert ("firing", "HolterNonfiniteInput") == (page.body["status"], page.alert)
    assert "Rank 1." in page.body["commonAnnotations"]["description"]
    assert {"HolterNonfiniteInput"} >= names
    assert {"resolved"} >= {one.body["status"] for one in later}, "no second page"
    assert json.loads((job.run_dir / "halt.json").read_text())["verdict"] == "healthy"


def test_sixteen_thousand_ranks_are_one_page_and_symptoms_are_held_back(stack: Stack) -> None:
    def alert(name: str, severity: str, layer: str, **more: str) -> dict[str, Any]:
        labels = {"alertname": name, "severity": severity, "layer": layer, "run_id": "large", **more}
        return {"labels": labels, "annotations": {"summary": "s", "description": "d"}}

    ranks = [alert("HolterRankSuspended", "critical", "incident", rank=str(rank)) for rank in range(16_000)]
    stack.raise_alerts(ranks)
    wait_for(lambda: stack.pages_at("/alertmanager", "large"), 30, "the page about 16,000 ranks")
    stack.raise_alerts(
        [
            alert("HolterSlowCompute", "warning", "incident"),
            alert("HolterUnexplainedStalledRank", "critical", "finding"),
            alert("HolterUnexplainedSlowRank", "warning", "finding"),
            alert("HolterSidecarAbsent", "warning", "watcher"),
        ]
    )
    wait_for(lambda: len(stack.pages_at("/alertmanager", "large")) > 1, 30, "the page about the sidecars")
    time.sleep(LINGER_S / 2)
    one, other = stack.pages_at("/alertmanager", "large")
    assert ("HolterRankSuspended", 20, 15_980) == (one.alert, len(one.body["alerts"]), one.body["truncatedAlerts"])
    assert "HolterSidecarAbsent" == other.alert, "what no incident explains is told"


def _get(address: str, what: str) -> Any:
    with urllib.request.urlopen(f"http://{address}/api/v1/{what}", timeout=10) as answer:
        return json.load(answer)


def _seconds(moment: str) -> float:
    return dt.datetime.fromisoformat(moment).timestamp()
