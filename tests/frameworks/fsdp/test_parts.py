"""Parts of flat shards, joined: the whole, or which elements are in no part."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holter.errors import VaultError
from holter.frameworks.fsdp import parts

WEIGHT, MOMENT = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4) / 7

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def part(start: int, end: int, mean: float = 0.0) -> dict[str, Any]:
    """What a rank writes that holds these elements of the weight."""
    stretch = {"start": start, "value": WEIGHT.flatten()[start:end].clone()}
    moment = {"start": start, "value": MOMENT.flatten()[start:end].clone()}
    return {
        "model": {"a.weight": {"shape": [3, 4], **stretch}},
        "optim": {"a.weight": {"exp_avg": moment, "step": torch.tensor(6.0)}} if end > start else {},
        "whole": {"mean": torch.full((2,), mean)},
        "groups": [{"lr": 0.01, "params": ["a.weight"]}],
        "others": {"scheduler": {"last_epoch": 6}},
        "step": 6,
    }


def write(folder: Path, *contents: dict[str, Any]) -> Path:
    state = folder / "state"
    state.mkdir(parents=True)
    for rank, content in enumerate(contents):
        torch.save(content, parts.path_of(state, rank))
    (state / "random_states_0.pkl").write_bytes(b"states")
    return folder


@pytest.mark.parametrize(
    "stretches", [[(0, 5), (5, 12)], [(0, 12), (12, 12)], [(0, 6), (6, 12), (0, 6), (6, 12)]], ids=str
)
def test_stretches_are_joined_wherever_they_were_cut(stretches: list[tuple[int, int]], tmp_path: Path) -> None:
    directory = write(tmp_path / "6", *(part(start, end) for start, end in stretches))
    assert 4 == parts.assemble(directory, directory / "assembled", len(stretches))
    state = {
        "model": {"a.weight": torch.zeros(3, 4), "mean": torch.ones(2)},
        "optim": {
            "state": {"a.weight": {"exp_avg": torch.zeros(3, 4), "step": torch.tensor(0.0)}},
            "param_groups": [{"lr": 0.0, "params": [""]}],
        },
        "scheduler": {"last_epoch": 0},
        "step": 0,
    }
    dcp.load(state, checkpoint_id=directory / "assembled", no_dist=True)
    assert torch.equal(WEIGHT, state["model"]["a.weight"])
    assert torch.equal(MOMENT, state["optim"]["state"]["a.weight"]["exp_avg"])
    assert (6, 6, 0.01) == (state["step"], state["scheduler"]["last_epoch"], state["optim"]["param_groups"][0]["lr"])
    assert b"states" == (directory / "assembled" / "random_states_0.pkl").read_bytes()


def test_what_ranks_hold_by_one_name_and_not_in_common_is_found_below_the_ranks_own(tmp_path: Path) -> None:
    directory = write(tmp_path / "6", part(0, 5), part(5, 12, mean=3.0))
    parts.assemble(directory, directory / "assembled", 2)
    state = {"rank_1": {"model": {"mean": torch.zeros(2)}}}
    dcp.load(state, checkpoint_id=directory / "assembled", no_dist=True)
    assert [3.0, 3.0] == state["rank_1"]["model"]["mean"].tolist()


@pytest.mark.parametrize(
    ("stretches", "says"),
    [
        ([(0, 5), (7, 12)], "elements 5 to 7 of a.weight"),
        ([(0, 5), (5, 9)], "elements 9 to 12 of a.weight"),
        ([(0, 5)], "the part of rank 1 is not there"),
    ],
)
def test_a_hole_is_named_and_nothing_is_written(stretches: list[tuple[int, int]], says: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "6", *(part(start, end) for start, end in stretches))
    with pytest.raises(VaultError, match=says):
        parts.assemble(directory, directory / "assembled", 2)
    assert not (directory / "assembled").exists()
