"""Incidents in the script's own tracker: written once, from a thread, whatever the tracker does."""

import random
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from tests.conftest import wait_for
from tests.exporters.test_phone_text import diagnosis

from holter.files import as_json
from holter.frameworks.tracker_marks import TrackerMarks, mark_of
from holter.rank.guard import Guard


def write(run_dir: Path, one) -> None:
    folder = run_dir / "incidents" / one.id
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "diagnosis.json").write_bytes(as_json(one))


class Run:
    """As wandb's and trackio's."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, str]] = []
        self.summary: dict[str, object] = {}

    def alert(self, **told: str) -> None:
        self.alerts.append(told)


class Board:
    """As TensorBoard's writer."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, str, int]] = []

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts.append((tag, text, step))

    def flush(self) -> None:
        pass


def test_each_tracker_that_is_used_is_told_once_and_again_when_it_is_over(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", types.SimpleNamespace(AlertLevel=str))
    marks, run, board, other = TrackerMarks(str(tmp_path), Guard()), Run(), Board(), Run()
    write(tmp_path, diagnosis())
    for _ in range(3):
        marks.seen("wandb", run)
        marks.seen("torch", board)
        marks.seen("trackio", other)
    wait_for(lambda: run.alerts and board.texts and other.alerts, 30, "the trackers")
    assert "holter: critical: Non-finite input (nonfinite_input) on rank 1 at step 30" == run.alerts[0]["title"]
    assert ("ERROR", "error") == (run.alerts[0]["level"], other.alerts[0]["level"])
    assert 1 == run.summary["holter/incidents"]
    assert ("holter/incident 1", 30) == (board.texts[0][0], board.texts[0][2])
    write(tmp_path, diagnosis(closed_at="2026-11-15T10:20:00Z"))
    wait_for(lambda: len(run.alerts) == 2, 30, "the end")
    assert "over: critical" in run.alerts[1]["title"]
    time.sleep(1.2)
    assert (2, 2, 2) == (len(run.alerts), len(board.texts), len(other.alerts))


def test_a_run_of_mlflow_is_told_by_its_id(tmp_path, monkeypatch):
    tags: dict[tuple[str, str], str] = {}
    client = types.SimpleNamespace(set_tag=lambda run, name, value: tags.__setitem__((run, name), value))
    active = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    library = types.SimpleNamespace(active_run=lambda: active, MlflowClient=lambda: client)
    monkeypatch.setitem(sys.modules, "mlflow", library)
    write(tmp_path, diagnosis())
    TrackerMarks(str(tmp_path), Guard()).seen("mlflow", None)
    wait_for(lambda: len(tags) == 2, 30, "the tags")
    assert "Do first: Look at the shard" in tags["r1", "holter.incident.1"]


def test_one_that_raises_and_one_that_blocks_cost_the_script_nothing(tmp_path):
    guard, release = Guard(), threading.Event()
    marks = TrackerMarks(str(tmp_path), guard)

    class Broken(Run):
        def alert(self, **_: str) -> None:
            raise RuntimeError("no network")

    class Stuck(Run):
        def alert(self, **_: str) -> None:
            release.wait(60)

    broken, stuck = Broken(), Stuck()
    write(tmp_path, diagnosis())
    before = random.getstate(), torch.get_rng_state()
    marks.seen("wandb", broken)
    wait_for(lambda: guard.failures, 30, "the failure")
    marks.seen("wandb", stuck)
    wait_for(lambda: "holter/incidents" in stuck.summary, 30, "the one that blocks")
    began_s = time.monotonic()
    for _ in range(1000):
        marks.seen("wandb", stuck)
    assert time.monotonic() - began_s < 5
    assert before[0] == random.getstate()
    assert torch.equal(before[1], torch.get_rng_state())
    assert 1 == sum(guard.failures.values()), "it was told once"
    release.set()


def test_a_halt_says_from_where_to_go_on():
    halted = diagnosis()
    action = halted.action.__class__(directive="halt", reason="", checkpoint="checkpoints/30", exit_code=93)
    assert "Halted; go on from checkpoints/30." in mark_of(diagnosis(action=action), 1)[1]


def told_for_real(tmp_path, library, owner, is_told) -> None:
    """By the real package; the random generators stay as they were."""
    guard = Guard()
    marks = TrackerMarks(str(tmp_path / "run"), guard)
    before = random.getstate(), torch.get_rng_state()
    marks.seen(library, owner)
    time.sleep(1.2)
    write(tmp_path / "run", diagnosis())
    wait_for(is_told, 60, library)
    assert not guard.failures
    assert before[0] == random.getstate()
    assert torch.equal(before[1], torch.get_rng_state())


@pytest.mark.release
@pytest.mark.filterwarnings("ignore")
def test_the_real_tensorboard_keeps_the_text(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

    writer = SummaryWriter(str(tmp_path / "board"))

    def is_told() -> bool:
        return any(b"Non-finite input" in path.read_bytes() for path in (tmp_path / "board").glob("events*"))

    told_for_real(tmp_path, "torch", writer, is_told)
    writer.close()


@pytest.mark.release
@pytest.mark.filterwarnings("ignore")
def test_the_real_mlflow_keeps_the_tags(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    with mlflow.start_run() as run:
        client = mlflow.MlflowClient()

        def is_told() -> bool:
            return "holter.incident.1" in client.get_run(run.info.run_id).data.tags

        told_for_real(tmp_path, "mlflow", None, is_told)


@pytest.mark.release
@pytest.mark.filterwarnings("ignore")
def test_the_real_wandb_keeps_summary_and_alert_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="p", dir=str(tmp_path))
    told_for_real(tmp_path, "wandb", run, lambda: run.summary.get("holter/incidents") == 1)
    run.finish()

    def is_kept() -> bool:
        kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*.wandb"))
        return b"holter/last_incident" in kept and b"Do first: Look at the shard" in kept

    wait_for(is_kept, 60, "summary and alert in the file")


@pytest.mark.release
@pytest.mark.filterwarnings("ignore")
def test_the_real_trackio_keeps_the_alert(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trackio = pytest.importorskip("trackio")
    run = trackio.init(project="p", embed=False)

    def is_told() -> bool:
        return any(b"Non-finite input" in path.read_bytes() for path in tmp_path.rglob("*.db*"))

    told_for_real(tmp_path, "trackio", run, is_told)
    trackio.finish()
