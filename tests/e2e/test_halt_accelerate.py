"""accelerate, DDP on two ranks: halted by a fault of rank 1 and resumed without it, the run ends with the bits of one that never had it."""

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.resuming import HALT

SCRIPT = Path(__file__).parent / "scripts" / "resumable.py"
AT = 30
"""Completed steps when the fault happens, in the second micro-batch of the next one."""
PATIENCE_S = 60.0
"""From fault to exit; 15 on a machine that does nothing else."""
CAUSES = {
    "nan": "nonfinite_input",
    "suspend": "rank_suspended",
    "spin": "rank_stuck_in_python",
    "lock": "interpreter_locked",
    "kill": "rank_dead",
}
LOADERS: dict[str, list[str]] = {"own": [], "plain": ["--plain"]}
"""With a generator of its own; without one, as most scripts have it."""


def losses_and_weights(out: Path) -> list[dict[str, Any]]:
    return [json.loads(out.with_name(f"{out.name}-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def reference(nursery: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """What each rank of a run without a fault computed, with a loader of this kind."""

    @functools.cache
    def run(loader: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("reference")
        ended = nursery.run(folder, [str(SCRIPT), "--out", str(folder / "out"), *LOADERS[loader]], env=HALT)
        assert ended.code == 0, ended.stderr[-3000:]
        assert not (ended.run_dir / "halt.json").exists()
        return losses_and_weights(folder / "out")

    return run


@pytest.mark.job
@pytest.mark.parametrize(
    "case",
    [
        ("nan", "own"),
        ("spin", "own"),
        *(pytest.param((fault, "own"), marks=pytest.mark.release) for fault in ("suspend", "lock", "kill")),
        *(pytest.param((fault, "plain"), marks=pytest.mark.release) for fault in ("nan", "spin")),
    ],
    ids="-".join,
)
def test_resumed_after_a_fault_it_ends_with_the_bits_of_a_run_that_never_had_it(
    case: tuple[str, str], jobs: Any, nursery: Any, reference: Any, tmp_path: Path
) -> None:
    fault, loader = case
    how = LOADERS[loader]
    words = ["--out", tmp_path / "faulted", "--fault", fault, "--at", AT, *how]
    job = jobs.start(SCRIPT, *words, by="accelerate", env=HALT)
    ended = job.wait()
    took_s = time.time() - float(ended.stdout.split("fault at ")[1].split()[0])
    print(f"{fault}: {took_s:.1f} s from the fault to the launcher's exit")
    assert took_s < PATIENCE_S
    assert ended.code != 0
    assert "exitcode  : 93" in ended.stderr, ended.stderr[-3000:]
    halt = json.loads((ended.run_dir / "halt.json").read_text())
    assert (AT, "checkpoints/30/state", "healthy", 93) == tuple(
        halt[key] for key in ("step", "checkpoint", "verdict", "exit_code")
    )
    assert ([1], CAUSES[fault]) == (halt["ranks"], halt["cause"])
    assert not list(tmp_path.glob("faulted-*.json"))

    folder = tmp_path / "resumed"
    folder.mkdir()
    arguments = [str(SCRIPT), *how, "--out", str(folder / "out"), "--resume", str(ended.run_dir / halt["checkpoint"])]
    resumed = nursery.run(folder, [*arguments, "--completed", str(halt["step"])], env=HALT)
    assert resumed.code == 0, resumed.stderr[-3000:]
    for healthy, again in zip(reference(loader), losses_and_weights(folder / "out"), strict=True):
        assert list(again["losses"]) == [str(micro) for micro in range(AT * 2, 80)]
        assert {micro: healthy["losses"][micro] for micro in again["losses"]} == again["losses"]
        assert (healthy["weights"], healthy["rates"]) == (again["weights"], again["rates"])
