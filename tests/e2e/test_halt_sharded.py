"""State in shards: FSDP2 on four ranks, ZeRO-2 and ZeRO-3 through accelerate on two; halted, resumed, the same bits."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import BIN
from tests.e2e.resuming import HALT, halt_json, results, same_bits

SCRIPTS = Path(__file__).parent / "scripts"
LOOP, ZERO = SCRIPTS / "resumable_loop.py", SCRIPTS / "resumable_zero.py"
AT, EVERY = 8, 2

pytestmark = pytest.mark.job


def run(nursery: Any, folder: Path, *arguments: object) -> Any:
    folder.mkdir()
    return nursery.run(folder, [str(LOOP), "--out", str(folder / "out"), *map(str, arguments)], ranks=4, env=HALT)


@pytest.fixture(scope="module")
def reference(nursery: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """FSDP2 without a fault."""
    folder = tmp_path_factory.mktemp("shards") / "reference"
    ended = run(nursery, folder)
    assert ended.code == 0, ended.stderr[-3000:]
    return results(folder / "out", 4)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        pytest.param("nan", "nonfinite_backward", id="nan-in-one-shard"),
        pytest.param("sleep", "rank_stuck_in_python", id="hang-all-alive", marks=pytest.mark.release),
    ],
)
def test_shards_are_saved_by_each_rank_and_resume_with_the_same_bits(
    fault: str, cause: str, nursery: Any, reference: list[dict[str, Any]], tmp_path: Path
) -> None:
    ended = run(nursery, tmp_path / "faulted", "--fault", fault, "--at", AT, "--pause", 0.1)
    assert ended.code == 93, ended.stderr[-3000:]
    halt = halt_json(ended.run_dir)
    assert (AT, f"checkpoints/{AT}/state", "healthy", cause, [1]) == tuple(
        halt[key] for key in ("step", "checkpoint", "verdict", "cause", "ranks")
    ), halt["why"]
    resumed = run(nursery, tmp_path / "resumed", "--resume", ended.run_dir / halt["checkpoint"])
    assert resumed.code == 0, resumed.stderr[-3000:]
    same_bits(reference, results(tmp_path / "resumed" / "out", 4), str(AT * EVERY))


@pytest.mark.release
def test_a_shard_whose_rank_is_dead_is_said_to_be_missing(nursery: Any, tmp_path: Path) -> None:
    ended = run(nursery, tmp_path / "faulted", "--fault", "kill", "--at", AT, "--pause", 0.1)
    halt = halt_json(ended.run_dir)
    assert (None, "incomplete", "rank_dead", [1]) == tuple(
        halt[key] for key in ("checkpoint", "verdict", "cause", "ranks")
    )
    assert "parts are missing" in halt["why"]
    assert "rank 1" in halt["why"]
    assert not (ended.run_dir / "checkpoints" / str(AT)).exists(), "a checkpoint with holes has no good one's name"


class Zero:
    """Jobs of one stage."""

    def __init__(self, stage: int, nursery: Any, folder: Path) -> None:
        self.stage, self.nursery, self.folder = stage, nursery, folder
        self._reference: list[dict[str, Any]] = []

    def start(self, name: str, *arguments: object) -> Any:
        """A job in a folder of its own; its results are `<folder>/out`."""
        folder = self.folder / name
        folder.mkdir()
        words = [str(ZERO), "--out", str(folder / "out"), "--stage", str(self.stage), *map(str, arguments)]
        return self.nursery.start(folder, words, env={**HALT, "ACCELERATE_USE_CPU": "false", "DS_ACCELERATOR": "cpu"})

    def reference(self) -> list[dict[str, Any]]:
        """What a run without a fault computed."""
        if not self._reference:
            ended = self.start("reference").wait()
            assert ended.code == 0, ended.stderr[-3000:]
            self._reference = self.results("reference")
        return self._reference

    def results(self, name: str) -> list[dict[str, Any]]:
        """What the ranks of a job wrote."""
        return results(self.folder / name / "out", 2)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.release), 3], ids=["zero-2", "zero-3"])
def zero(request: pytest.FixtureRequest, nursery: Any, tmp_path_factory: pytest.TempPathFactory) -> Zero:
    return Zero(request.param, nursery, tmp_path_factory.mktemp(f"zero-{request.param}"))


def ask_halt(run_dir: Path) -> dict[str, Any]:
    command = [BIN / "holter", "halt", run_dir, "--reason", "maintenance", "--json"]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert told.returncode == 0, told.stdout + told.stderr
    return json.loads(told.stdout)


@pytest.mark.parametrize("fault", ["nan", pytest.param("operator", marks=pytest.mark.release)])
def test_zero_is_halted_and_resumed_with_the_same_bits(fault: str, zero: Zero, wait_for: Any) -> None:
    reference = zero.reference()
    how = ["--nan-rank", 1, "--nan-step", AT] if fault == "nan" else ["--patient"]
    job = zero.start(fault, *how)
    if fault == "operator":
        wait_for(lambda: "6 steps" in (job.directory / "stdout").read_text(), 120, "the sixth step")
        assert "completed" == ask_halt(job.run_dir)["outcome"]
    ended = job.wait()
    assert ended.code == 93, ended.stderr[-3000:]
    halt = halt_json(ended.run_dir)
    assert ("healthy", "requested" if fault == "operator" else "nonfinite_input") == (halt["verdict"], halt["cause"])
    assert halt["step"] == AT if fault == "nan" else 6 <= halt["step"] <= 20
    resumed = zero.start(f"{fault}-resumed", "--resume", ended.run_dir / halt["checkpoint"]).wait()
    assert resumed.code == 0, resumed.stderr[-3000:]
    same_bits(reference, zero.results(f"{fault}-resumed"), f"{halt['step']}.0")
