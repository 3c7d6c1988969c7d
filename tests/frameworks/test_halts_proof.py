"""What a rank wrote is what it held, bit for bit; read back without running anything that a file says."""

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from holter.errors import VaultError
from holter.frameworks.halts import prove
from holter.frameworks.saving.reading import tensors_in
from holter.halting.vault import manifest as manifests
from holter.rank.framework import Task


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "layer.weight": torch.randn(3, 4),
        "half": torch.randn(5).bfloat16(),
        "count": torch.tensor(7),
        "odd": torch.arange(3).to(torch.uint16),
        "wave": torch.randn(2, dtype=torch.complex64),
    }


def by_safetensors(folder: Path) -> None:
    plain = {name: tensor for name, tensor in state().items() if name != "wave"}
    save_file(plain, folder / "model.safetensors")
    torch.save({"wave": state()["wave"]}, folder / "rest.pt")


def by_torch(folder: Path) -> None:
    nested = OrderedDict(model=state(), history=defaultdict(list, {1: [1.0]}))
    torch.save(nested, folder / "model.bin")


def by_dcp(folder: Path) -> None:
    dcp.save({"model": state(), "step": 30}, checkpoint_id=str(folder), no_dist=True)


WRITERS = {"safetensors": by_safetensors, "torch": by_torch, "dcp": by_dcp}


@dataclass
class Kept:
    """Holds what it is told to hold."""

    tensors: dict[str, torch.Tensor] = field(default_factory=state)
    framework: str = "accelerate"
    rescues_alone: bool = True

    def save(self, task: Task) -> None:
        raise NotImplementedError

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


def task(directory: Path, rank: int = 0, **changes: object) -> Task:
    about = {
        "directory": directory,
        "step": 30,
        "rank": rank,
        "world_size": 2,
        "savers": (0, 1),
        "lost": (),
        "is_rescue": False,
        "writes_shared": rank == 0,
        "rewinds": {},
    }
    return Task(**(about | changes))


def part(directory: Path, rank: int = 0) -> manifests.RankPart:
    return manifests.read_part(directory / "parts" / f"{rank}.json")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_every_tensor_is_found_again_whatever_wrote_it(directory: Path, write: Callable[[Path], None]):
    write(directory / "state")
    prove(task(directory, is_rescue=True), Kept())
    found = part(directory)
    assert (5, [], {}) == (found.num_live, found.missing, found.unread)
    assert set(found.files) == {f"state/{path.name}" for path in (directory / "state").iterdir()}
    assert {tuple(tensor.shape) for tensor in state().values()} <= {tensor.shape for tensor in found.tensors}
    assert not found.is_sharded


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_one_bit_of_one_live_tensor_is_missed(directory: Path, write: Callable[[Path], None]):
    write(directory / "state")
    tensors = state()
    tensors["half"].view(torch.int16)[3] ^= 1
    prove(task(directory), Kept(tensors))
    assert ["half"] == [tensor.name for tensor in part(directory).missing]


def test_what_trains_may_not_be_infinite_and_a_mask_may(directory: Path):
    inf = torch.full((2,), -torch.inf)
    weight = torch.nn.Parameter(inf.clone())
    frozen = torch.nn.Parameter(inf.clone(), requires_grad=False)
    tensors = {"weight": weight, "frozen": frozen, "mask": inf, "optimizer 0: 0.exp_avg": inf, "nan": inf * 0}
    prove(task(directory), Kept(tensors))
    assert ["weight", "optimizer 0: 0.exp_avg", "nan"] == part(directory).with_nan


def test_a_finite_weight_that_no_training_makes_is_told_with_its_size_and_a_mask_is_not(directory: Path):
    huge = torch.full((2,), 1e37)
    tensors = {
        "weight": torch.nn.Parameter(huge.clone()),
        "half": torch.nn.Parameter(torch.full((2,), 6e4, dtype=torch.float16)),
        "sound": torch.nn.Parameter(torch.full((2,), 1e4)),
        "mask": -huge,
        "optimizer 0: 0.exp_avg_sq": torch.full((2,), 1e12),
    }
    prove(task(directory), Kept(tensors))
    found = part(directory)
    assert ([], {"weight", "half"}) == (found.with_nan, set(found.oversized))
    assert pytest.approx(1e37) == found.oversized["weight"]


def test_equal_values_of_another_dtype_or_shape_are_not_the_same(directory: Path):
    by_torch(directory / "state")
    tensors = {"a": state()["layer.weight"].reshape(4, 3), "b": state()["half"].float()}
    prove(task(directory), Kept(tensors))
    assert ["a", "b"] == [tensor.name for tensor in part(directory).missing]


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("/tmp/holter-test-bomb"),)  # noqa: S108


def test_nothing_that_a_file_names_is_run(directory: Path):
    bomb = Path("/tmp/holter-test-bomb")  # noqa: S108
    bomb.unlink(missing_ok=True)
    random_states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - what accelerate saves
        "torch": torch.get_rng_state(),
        "bomb": Bomb(),
    }
    torch.save(random_states, directory / "state" / "random_states_0.pkl")
    found = dict(tensors_in(directory / "state" / "random_states_0.pkl"))
    assert torch.equal(found["torch"], random_states["torch"])
    assert not bomb.exists()


def test_what_cannot_be_read_is_said_and_still_listed(directory: Path):
    by_torch(directory / "state")
    (directory / "state" / "odd.bin").write_bytes(b"no tensors")
    prove(task(directory), Kept())
    found = part(directory)
    assert ["state/odd.bin"] == list(found.unread)
    assert "cannot be read" in found.unread["state/odd.bin"]
    assert 10 == found.files["state/odd.bin"]
    assert [] == found.missing


def test_each_file_is_read_back_by_the_rank_that_wrote_it(directory: Path):
    for name in (
        "model.bin",
        "random_states_0.pkl",
        "random_states_1.pkl",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ):
        torch.save({"t": torch.ones(1)}, directory / "state" / name)
    for rank in (0, 1):
        prove(task(directory, rank), Kept({}))
    assert ["state/model.bin", "state/random_states_0.pkl"] == sorted(part(directory, 0).files)
    assert ["state/random_states_1.pkl", "state/zero_pp_rank_1_mp_rank_00_optim_states.pt"] == sorted(
        part(directory, 1).files
    )
    assert (False, True) == (part(directory, 0).is_sharded, part(directory, 1).is_sharded)
    # In a rescue the first one writes the random states of all.
    prove(task(directory, 1, savers=(1,), lost=(0,), is_rescue=True), Kept({}))
    assert 4 == len(part(directory, 1).files)
    prove(task(directory, 0, is_rescue=True), Kept({}, "dcp", rescues_alone=False))
    assert "state/random_states_1.pkl" not in part(directory, 0).files


@pytest.mark.parametrize("name", ["cut.safetensors", "cut.pt", "cut.distcp"])
def test_a_file_that_is_cut_off_is_unreadable_and_nothing_worse(tmp_path: Path, name: str):
    whole = tmp_path / name
    if name.endswith("safetensors"):
        save_file({"w": torch.ones(100)}, whole)
    else:
        torch.save({"w": torch.ones(100)}, whole)
    whole.write_bytes(whole.read_bytes()[:-50])
    with pytest.raises(VaultError, match="cut"):
        list(tensors_in(whole))
