"""Parameters whose gradients the script reduces itself are replicas; those beside them are not."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from holter.records import Census, PackedTable, StepDone
from holter.records.rank import is_ignored

pytestmark = pytest.mark.usefixtures("swept")


class Bloom(nn.Module):
    """A replicated norm beside weights of which every rank has its own part."""

    def __init__(self) -> None:
        super().__init__()
        self.shard, self.ln = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ln(self.shard(x)).square().sum()


def train(model: nn.Module, *, steps: int = 3, is_async: bool = False, scale: float = 1.0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(2, 4)).backward()
        for parameter in model.ln.parameters():
            work = dist.all_reduce(parameter.grad.data, async_op=is_async)
            if work is not None:
                work.wait()
        for parameter in model.ln.parameters():
            parameter.grad.data.mul_(scale)
        optimizer.step()


def compared(worn, tensor_class: str) -> list[list[bool]]:
    found = [o.body for o in worn.said(PackedTable) if o.body.tensor_class == tensor_class]
    return [[value != 0 for value in np.frombuffer(t.fingerprints, dtype="<u8")] for t in found]


@pytest.mark.usefixtures("gloo")
def test_only_what_is_reduced_is_compared(wear):
    worn = wear(world_size=2)
    train(Bloom())
    for tensor_class in ("parameters_before", "parameters_after", "gradients", "gradients_reduced"):
        assert [[False, False, True, True]] * 3 == compared(worn, tensor_class), tensor_class
    entries = worn.said(Census)[-1].body.entries
    assert {"ln.weight", "ln.bias"} == {entry.name for entry in entries if entry.is_replicated}
    assert not worn.monitor.context.guard.failures


@pytest.mark.usefixtures("gloo")
def test_reduced_gradients_are_those_before_clipping_from_the_first_step_on(wear):
    worn = wear(world_size=2)
    train(Bloom(), scale=0.5)
    assert all(o.body.roots["gradients_reduced"] != o.body.roots["gradients"] for o in worn.said(StepDone))


@pytest.mark.usefixtures("gloo")
def test_a_reduction_that_may_still_run_is_not_read(wear):
    worn = wear(world_size=2)
    train(Bloom(), is_async=True)
    assert not compared(worn, "gradients_reduced")
    assert [[False, False, True, True]] * 3 == compared(worn, "gradients")


@pytest.mark.usefixtures("gloo")
def test_a_loss_that_is_averaged_for_the_log_makes_no_replica(wear):
    worn = wear(world_size=2)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        dist.all_reduce(loss.detach().clone())
        dist.all_reduce(torch.ones(4, 4))
        optimizer.step()
    assert [{}, {}, {}] == [o.body.roots for o in worn.said(StepDone)]


def test_all_reduce_is_as_it_was_afterwards(wear):
    original = dist.all_reduce
    worn = wear(world_size=2)
    assert dist.all_reduce is not original
    assert dist.all_reduce is dist.distributed_c10d.all_reduce
    worn.monitor.uninstall()
    assert dist.all_reduce is original


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize(("reduced", "forgotten"), [("weight", "shard.bias"), ("bias", None)])
def test_a_bias_beside_a_reduced_weight_was_forgotten_a_weight_beside_a_reduced_bias_is_cut(wear, reduced, forgotten):
    worn = wear(world_size=2)
    model = Bloom()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.rand(2, 4)).backward()
        for parameter in (getattr(model.shard, reduced), *model.ln.parameters()):
            dist.all_reduce(parameter.grad)
        optimizer.step()
    (ours,) = worn.monitor.context.models.active()
    left_out = [name for name, p in ours.parameters if is_ignored(getattr(ours.holders.get(id(p)), "axis", ""))]
    assert ([forgotten] if forgotten else []) == left_out
