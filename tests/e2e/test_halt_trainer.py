"""Hugging Face Trainer, its log hiding NaN: halted before the weights have it, and resumed by the Trainer itself with the same bits."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.resuming import HALT

SCRIPT = Path(__file__).parent / "scripts" / "resumable_trainer.py"
STEPS, EVERY = 30, 2


def run(nursery: Any, folder: Path, *arguments: object) -> Any:
    folder.mkdir()
    return nursery.run(folder, [str(SCRIPT), "--out", str(folder / "out"), *map(str, arguments)], env=HALT)


def losses_and_weights(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"out-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def reference(nursery: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of a run without a fault computed."""
    folder = tmp_path_factory.mktemp("trainer") / "reference"
    ended = run(nursery, folder)
    assert ended.code == 0, ended.stderr[-3000:]
    return losses_and_weights(folder)


@pytest.mark.job
@pytest.mark.parametrize(
    ("fault", "at"),
    [
        pytest.param("nan", 20, id="nan"),
        pytest.param("nan", 16, id="nan-first-step-of-an-epoch", marks=pytest.mark.release),
        pytest.param("spin", 20, id="stuck", marks=pytest.mark.release),
    ],
)
def test_resumed_from_the_preserved_checkpoint_it_ends_with_the_bits_of_a_run_without_the_fault(
    fault: str, at: int, nursery: Any, reference: list[dict[str, Any]], tmp_path: Path
) -> None:
    ended = run(nursery, tmp_path / "faulted", "--fault", fault, "--at", at, "--rank", 1, "--save-steps", 8)
    assert ended.code == 93, ended.stderr[-3000:]
    halt = json.loads((ended.run_dir / "halt.json").read_text())
    assert (at, f"checkpoints/{at}/state", "healthy", [1]) == tuple(
        halt[key] for key in ("step", "checkpoint", "verdict", "ranks")
    )
    # The Trainer's own checkpoints are neither rotated nor joined by ours.
    assert {"checkpoint-8", "checkpoint-16"} == {path.name for path in (tmp_path / "faulted/out-checkpoints").iterdir()}

    resumed = run(nursery, tmp_path / "resumed", "--resume", ended.run_dir / halt["checkpoint"])
    assert resumed.code == 0, resumed.stderr[-3000:]
    for healthy, again in zip(reference, losses_and_weights(tmp_path / "resumed"), strict=True):
        assert list(again["losses"]) == [str(micro) for micro in range(at * EVERY, STEPS * EVERY)]
        assert {micro: healthy["losses"][micro] for micro in again["losses"]} == again["losses"]
        assert (healthy["weights"], healthy["rates"]) == (again["weights"], again["rates"])
