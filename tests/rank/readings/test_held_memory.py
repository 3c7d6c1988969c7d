"""What a device owes an answer about is not held: a script that lets go of gradients, or of a model, has the memory back, however far the device is behind."""

import gc
from collections.abc import Callable
from typing import Any

import fake_cuda
import pytest
import torch
import torch.distributed as dist
from tests.rank.conftest import Worn
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.device, pytest.mark.slow]

WARM_STEPS = 2
LATE_STEPS = 3
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True),
    "fused sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, fused=True),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=True),
    "loop": lambda ps: torch.optim.SGD(ps, lr=0.05, foreach=False),
}


class Agent:
    """Wants to know before a step whether it is finite; is never told that it is not."""

    def is_wanted(self) -> bool:
        return True

    def is_due(self, _step: int) -> bool:
        return False

    def hold(self, step: int, why: str, num_skipped: int = 0) -> None:
        raise AssertionError(step, why, num_skipped)


def storage(gradient: torch.Tensor) -> StorageWeakRef:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return StorageWeakRef(local.untyped_storage())


def left_behind(
    kind: str, *, rank: int = 0, wrap: str = "", clips: bool = False, micro_steps: int = 1, **settings: Any
) -> tuple[int, int, int]:
    """After steps behind a closed gate, while answers are owed: how many gradients there were, how many of them are held, and, once the model was let go, of its parameters."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
    if wrap:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        module = module.to(torch.device("cuda", rank))
    worn = Worn(world_size=2 if wrap else 1, **settings)
    worn.monitor.context.hold.agent = Agent()
    model = {"": lambda m: m, "ddp": DistributedDataParallel, "fsdp": fully_shard}[wrap](module)
    optimizer = OPTIMIZERS[kind](model.parameters())
    inputs = torch.ones(4, 16, device=f"cuda:{rank}")
    gradients: list[StorageWeakRef] = []

    def step() -> None:
        for _ in range(micro_steps):
            model(inputs).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        gradients.extend(storage(p.grad) for p in model.parameters() if p.grad is not None)
        optimizer.zero_grad(set_to_none=True)

    try:
        for _ in range(WARM_STEPS):
            step()
            fake_cuda.drain()
        gradients.clear()
        with fake_cuda.closed():
            for _ in range(LATE_STEPS):
                step()
            gc.collect()
            num_held = sum(not gradient.expired() for gradient in gradients)
            assert worn.monitor.context.readings._open, "nothing was owed"
            weights = [storage(p.data) for p in model.parameters()]
            if not wrap:
                del model, optimizer, module
            gc.collect()
            num_weights_held = 0 if wrap else sum(not weight.expired() for weight in weights)
        fake_cuda.drain()
        assert not worn.monitor.context.guard.failures, worn.monitor.context.guard.failures
    finally:
        worn.close()
    if wrap:
        dist.barrier()
        dist.destroy_process_group()
    return len(gradients), num_held, num_weights_held


NUM_GRADIENTS = 4 * LATE_STEPS
ALONE: dict[str, dict[str, Any]] = {
    "fused": {"kind": "fused"},
    "fused sgd": {"kind": "fused sgd"},
    "foreach": {"kind": "foreach"},
    "loop": {"kind": "loop"},
    "clipped": {"kind": "fused", "clips": True},
    "accumulated": {"kind": "foreach", "micro_steps": 2},
    "snapshots": {"kind": "foreach", "snapshot_every": 1},
    "waits": {"kind": "loop", "guard_wait_s": 0.05},
    "in turns": {"kind": "foreach", "budget": 1e-9},
}


OFTEN = ("fused", "waits")


@pytest.mark.parametrize("how", [pytest.param(how, marks=() if how in OFTEN else pytest.mark.release) for how in ALONE])
def test_gradients_and_weights_are_freed_while_answers_about_them_are_owed(how) -> None:
    assert (NUM_GRADIENTS, 0, 0) == left_behind(**ALONE[how])


@pytest.mark.release
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_gradients_of_several_ranks_are_too(wrap, kind) -> None:
    found = fake_cuda.run_ranks(lambda rank: left_behind(kind, rank=rank, wrap=wrap))
    assert [(NUM_GRADIENTS, 0, 0)] * 2 == found
