"""Ranks that hold different tensors by the same names: a halt saves each of them, tensor by tensor what all ranks held."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.e2e.resuming import HALT, halt_json

SCRIPT = Path(__file__).parent / "scripts" / "split_model.py"
AT = 6

pytestmark = [
    pytest.mark.job,
    # The test itself reads the files, as one process.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("split", 2),
        ("experts", 2),
        pytest.param("split", 4, marks=pytest.mark.release),
        pytest.param("experts", 4, marks=pytest.mark.release),
    ],
)
def test_what_each_rank_held_is_found_below_its_name(kind: str, ranks: int, nursery: Any, tmp_path: Path) -> None:
    ended = nursery.run(
        tmp_path, [str(SCRIPT), "--out", str(tmp_path), "--kind", kind, "--at", str(AT)], ranks=ranks, env=HALT
    )
    halt = halt_json(ended.run_dir)
    assert (AT, "healthy") == (halt["step"], halt["verdict"]), halt["why"]
    assert "rank_<its number>" in halt["why"]
    for rank in range(ranks):
        held = torch.load(tmp_path / f"{rank}-{AT}.pt", weights_only=True)
        state = {
            "model": {name: torch.zeros_like(value) for name, value in held["model"].items()},
            "optim": {"state": {name: {"exp_avg": torch.zeros_like(value)} for name, value in held["model"].items()}},
        }
        dcp.load({f"rank_{rank}": state}, checkpoint_id=ended.run_dir / halt["checkpoint"], no_dist=True)
        for name, value in held["model"].items():
            assert torch.equal(value, state["model"][name]), (rank, name)
            assert torch.equal(held["moments"][f"{name}.exp_avg"], state["optim"]["state"][name]["exp_avg"]), (
                rank,
                name,
            )
