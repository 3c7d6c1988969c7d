"""What a halt saves against what all ranks held, tensor by tensor, in every framework; and that a state which looks wrong is not called healthy."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BIN
from tests.e2e.resuming import HALT, halt_json

SCRIPT = Path(__file__).parent / "scripts" / "every_framework.py"
BUCKETS = Path(__file__).parent / "scripts" / "ddp_buckets.py"
AT = 6
ZERO = {"ACCELERATE_USE_CPU": "false", "DS_ACCELERATOR": "cpu"}
FRAMEWORKS = (
    "ddp", "accelerate", "fsdp1", "fsdp2", "tp", "pipeline", "pipeline_gpipe", "split", "experts",
    "zero1", "zero2", "zero3", "accelerate_zero1", "accelerate_zero2", "accelerate_zero3",
)  # fmt: skip
BROADCAST = ("ddp", "accelerate", "experts")
"""DDP gives rank 0's buffers to all before it calls the model: what another rank had of its own is of no use to it."""
OTHER_BUCKETS = ("ddp", "accelerate", "experts")
"""On more than two ranks a new DDP adds up its first gradients in another order (`ddp_buckets.py`)."""

pytestmark = pytest.mark.job


def start(nursery: Any, folder: Path, kind: str, ranks: int, *arguments: object, action: str = "halt") -> Any:
    (folder / "out").mkdir(parents=True)
    words = [str(SCRIPT), "--out", str(folder / "out"), "--kind", kind, *map(str, arguments)]
    env = {**HALT, "HOLTER_ACTION": action, **(ZERO if "zero" in kind else {})}
    return nursery.run(folder, words, ranks=ranks, env=env)


def held(folder: Path, rank: int, moment: object) -> dict[str, Any]:
    return torch.load(folder / "out" / f"{rank}-{moment}.pt", weights_only=False)


def assemble(checkpoint: Path) -> Path:
    """As an operator does it."""
    command = [BIN / "holter", "checkpoint", "assemble", checkpoint.parent]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert 0 == told.returncode, told.stdout + told.stderr
    return checkpoint.parent / "assembled"


def resume(nursery: Any, folder: Path, kind: str, ranks: int, checkpoint: Path) -> Path:
    ended = start(nursery, folder / "resumed", kind, ranks, "--resume", checkpoint, action="notify")
    assert 0 == ended.code, ended.stderr[-3000:]
    return folder / "resumed"


def same(one: dict[str, Any], other: dict[str, Any], *, but: str = "") -> None:
    assert one.keys() == other.keys()
    parted = [
        name
        for name, value in one.items()
        if name != "losses" and not (but and name.endswith(but)) and not torch.equal(value, other[name])
    ]
    assert [] == parted


def check(nursery: Any, folder: Path, kind: str, ranks: int, *arguments: object, lost: int = -1) -> dict[str, Any]:
    """Halt, load, compare; go on to the end, compare with a run that never stopped. `lost` has no memory of its buffers."""
    faulted = start(nursery, folder / "faulted", kind, ranks, *arguments)
    # A rank that was killed ends first, and not by decision.
    assert (93 if lost < 0 else -9) == faulted.code, faulted.stderr[-3000:]
    halt = halt_json(faulted.run_dir)
    assert (AT, "healthy") == (halt["step"], halt["verdict"]), halt["why"]
    checkpoint = faulted.run_dir / halt["checkpoint"]
    if "assemble" in halt["why"]:
        checkpoint = assemble(checkpoint)
    resumed = resume(nursery, folder, kind, ranks, checkpoint)
    for rank in range(ranks):
        but = "mean" if kind in BROADCAST or rank == lost else ""
        same(held(folder / "faulted", rank, AT), held(resumed, rank, "loaded"), but=but)
    if ranks == 2 or kind not in OTHER_BUCKETS:
        reference = start(nursery, folder / "reference", kind, ranks, action="notify")
        assert 0 == reference.code, reference.stderr[-3000:]
        for rank in range(ranks):
            whole, rest = held(folder / "reference", rank, "end"), held(resumed, rank, "end")
            same(whole, rest, but="mean" if rank == lost else "")
            assert rest["losses"] == {step: loss for step, loss in whole["losses"].items() if step >= AT}
    return halt


@pytest.mark.release
@pytest.mark.parametrize(
    ("kind", "ranks"), [*((kind, 2) for kind in FRAMEWORKS), *((kind, 4) for kind in (*FRAMEWORKS, "hsdp", "tp_fsdp2"))]
)
def test_what_all_ranks_held_is_loaded_again_and_the_run_goes_on_with_the_same_bits(
    kind: str, ranks: int, nursery: Any, tmp_path: Path
) -> None:
    check(nursery, tmp_path, kind, ranks, "--fault", "nan")


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("fsdp1", 2),
        *(
            pytest.param(kind, ranks, marks=pytest.mark.release)
            for kind, ranks in (
                ("fsdp1", 4), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("zero3", 4),
                ("accelerate_zero2", 2), ("accelerate_zero3", 2), ("tp", 2), ("pipeline", 2),
            )
        ),
    ],
)  # fmt: skip
def test_ranks_that_are_blocked_save_their_parts_each_by_itself(
    kind: str, ranks: int, nursery: Any, tmp_path: Path
) -> None:
    assert "rank_stuck_in_python" == check(nursery, tmp_path, kind, ranks, "--fault", "sleep")["cause"]


@pytest.mark.release
@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_ranks_shard_is_its_counterparts_under_hsdp(rank: int, nursery: Any, tmp_path: Path) -> None:
    halt = check(nursery, tmp_path, "hsdp", 4, "--fault", "kill", "--rank", rank, lost=rank)
    assert ("rank_dead", [rank]) == (halt["cause"], halt["ranks"])
    assert f"running statistics that rank {rank} had of its own are lost" in halt["why"]


@pytest.mark.release
@pytest.mark.parametrize(
    "case",
    [
        ("fsdp2", "weight", 1e37, 1, "second.weight"),
        ("fsdp2", "weight", 1e4, 1, "second.weight"),
        ("fsdp2", "weight", 1e4, 0, "second.weight"),
        ("fsdp2", "moment", 1e6, 1, "exp_avg_sq"),
        ("fsdp2", "frozen", 1e4, 1, "frozen.weight"),
        ("zero3", "weight", 1e4, 1, "first.weight"),
        ("fsdp1", "weight", 1e4, 1, "second._fsdp_wrapped_module.weight"),
        ("tp", "weight", 1e4, 1, "second.weight"),
        ("pipeline", "moment", 1e6, 1, "exp_avg_sq"),
    ],
)  # fmt: skip
def test_a_state_of_which_a_tensor_is_not_as_its_history_has_it_is_suspect(
    case: tuple[str, str, float, int, str], nursery: Any, tmp_path: Path
) -> None:
    kind, where, value, rank, named = case
    fault = ("--fault", "nan", "--big", value, "--big-in", where, "--rank", rank)
    halt = halt_json(start(nursery, tmp_path, kind, 2, *fault).run_dir)
    assert halt["verdict"] in ("suspect", "poisoned"), halt["why"]
    # An incident that explains it comes first.
    assert halt["verdict"] == "poisoned" or named in halt["why"]


@pytest.mark.release
@pytest.mark.parametrize("kind", ["pipeline", "pipeline_gpipe", "split"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_stage_that_makes_a_nan_is_named_and_not_those_that_receive_it(
    kind: str, rank: int, nursery: Any, tmp_path: Path
) -> None:
    ended = start(nursery, tmp_path, kind, 4, "--big", "inf", "--big-at", AT, "--rank", rank)
    assert [rank] == halt_json(ended.run_dir)["ranks"]


@pytest.mark.release
@pytest.mark.parametrize("by", ["state_dict", "accelerate"])
def test_a_new_ddp_on_four_ranks_parts_in_its_last_bits_without_holter_too(by: str) -> None:
    command = [BIN / "torchrun", "--standalone", "--nproc-per-node", "4", BUCKETS, "--by", by]
    env = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PATH": "/usr/bin:/bin"}
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env)
    assert '"warmed": null' in told.stdout, told.stdout + told.stderr[-3000:]
    assert '"resumed": null' not in told.stdout, "if this is so everywhere, halts.md need not speak of it any more"
