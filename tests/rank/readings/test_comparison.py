"""Fingerprints of what must be equal on all replicas."""

import gc
import math
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from holter.records import Census, Mark, PackedTable, StepDone
from holter_kernels import fingerprint


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()


def tables(worn, tensor_class: str) -> list[PackedTable]:
    return [o.body for o in worn.said(PackedTable) if o.body.tensor_class == tensor_class]


@pytest.mark.usefixtures("gloo")
def test_equal_weights_have_equal_fingerprints_and_others_do_not(wear):
    worn = wear(world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step(model, optimizer, torch.ones(1, 4))
    step(model, optimizer, torch.ones(1, 4))
    with torch.no_grad():
        model.module.weight[0, 0] = torch.nextafter(model.module.weight[0, 0], torch.tensor(math.inf))
    step(model, optimizer, torch.ones(1, 4))
    before = tables(worn, "parameters_before")
    assert before[0].root == before[1].root == tables(worn, "parameters_after")[0].root
    assert before[1].root != before[2].root
    assert before[1].fingerprints[8:] == before[2].fingerprints[8:], "the bias is as it was"
    assert before[1].fingerprints[:8] != before[2].fingerprints[:8]
    assert not worn.monitor.context.guard.failures


@pytest.mark.usefixtures("gloo")
def test_roots_are_told_with_the_step(wear):
    worn = wear(world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 2))
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 4))
    assert {"parameters_before", "gradients", "parameters_after"} <= set(worn.said(StepDone)[0].body.roots)


@pytest.mark.usefixtures("gloo")
def test_gradients_of_a_closure_are_compared_once_it_has_reduced_them(wear):
    worn = wear(world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    with model.no_sync():
        model(torch.full((1, 4), 3.0)).sum().backward()
    optimizer.step(closure)
    applied = [fingerprint(parameter.grad) for parameter in model.parameters()]
    (compared,) = tables(worn, "gradients")
    assert applied == fingerprints(compared)
    assert not worn.monitor.context.guard.failures


def test_a_model_that_nobody_replicates_is_not_compared(wear):
    worn = wear(world_size=2)
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 4))
    assert [{}] == [o.body.roots for o in worn.said(StepDone)]


@pytest.mark.usefixtures("gloo")
def test_a_single_rank_compares_nothing(wear):
    worn = wear(world_size=1)
    model = DistributedDataParallel(nn.Linear(4, 2))
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 4))
    assert not worn.said(PackedTable)
    assert [{}] == [o.body.roots for o in worn.said(StepDone)]


@pytest.mark.usefixtures("gloo")
def test_parameters_that_ddp_ignores_are_not_replicas(wear):
    worn = wear(world_size=2)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["1.weight"])
    model = DistributedDataParallel(inner)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 4))
    entries = worn.said(Census)[-1].body.entries
    assert {"0.weight", "0.bias", "1.bias"} == {entry.name for entry in entries if entry.is_replicated}
    for table in (o.body for o in worn.said(PackedTable) if not o.body.names and "@" not in o.body.tensor_class):
        assert [True, True, False, True] == [value != 0 for value in fingerprints(table)], table.tensor_class


@pytest.mark.usefixtures("gloo")
def test_a_model_that_is_no_replica_does_not_change_the_root(wear):
    worn = wear(world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step(model, optimizer, torch.ones(1, 4))
    average = nn.Linear(4, 2)
    worn.monitor.add_model(average)
    step(model, optimizer, torch.ones(1, 4))
    first, second = tables(worn, "parameters_before")
    assert first.root == second.root


@pytest.mark.usefixtures("gloo")
def test_a_module_that_was_wrapped_before_anybody_watched_is_known_as_a_replica(wear):
    module = nn.Linear(4, 2)
    model = DistributedDataParallel(module)
    worn = wear(world_size=2)
    worn.monitor.add_model(module)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 4))
    assert "parameters_before" in worn.said(StepDone)[0].body.roots


def fingerprints(table: PackedTable) -> list[int]:
    return np.frombuffer(table.fingerprints, dtype="<u8").tolist()


def roots(worn) -> list[dict[str, int]]:
    return [o.body.roots for o in worn.said(StepDone)]


@pytest.mark.usefixtures("gloo")
def test_frozen_parameters_are_a_class_of_their_own(wear):
    worn = wear(world_size=2)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    inner[0].requires_grad_(False)
    model = DistributedDataParallel(inner)
    step(model, torch.optim.SGD(inner[1].parameters(), lr=0.1), torch.ones(1, 4))
    assert [True, True, False, False] == [value != 0 for value in fingerprints(tables(worn, "frozen")[0])]
    for tensor_class in ("parameters_before", "parameters_after", "gradients", "gradients_reduced"):
        chosen = [value != 0 for value in fingerprints(tables(worn, tensor_class)[0])]
        assert [False, False, True, True] == chosen, tensor_class


@pytest.mark.usefixtures("gloo")
def test_reduced_gradients_are_read_before_they_are_clipped(wear):
    worn = wear(world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for scale in (1.0, 0.5):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        for parameter in model.parameters():
            parameter.grad.data.mul_(scale)
        optimizer.step()
    untouched, clipped = roots(worn)
    assert untouched["gradients_reduced"] == untouched["gradients"]
    assert clipped["gradients_reduced"] == untouched["gradients_reduced"]
    assert clipped["gradients"] != clipped["gradients_reduced"]


@pytest.mark.usefixtures("gloo")
def test_gradients_that_a_pass_did_not_reduce_do_not_count_as_reduced(wear):
    worn = wear(world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert "gradients_reduced" not in roots(worn)[0]


@pytest.mark.usefixtures("gloo")
def test_what_another_model_still_has_in_its_gradients_does_not_count(wear):
    worn = wear(world_size=2)
    one, other = DistributedDataParallel(nn.Linear(4, 2)), DistributedDataParallel(nn.Linear(4, 2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
    step(one, optimizers[0], torch.ones(1, 4))
    for parameter in one.parameters():
        parameter.grad.fill_(torch.rand(()).item())
    step(other, optimizers[1], torch.ones(1, 4))
    assert [0, 0] == fingerprints(tables(worn, "gradients_reduced")[1])[:2]


@pytest.mark.usefixtures("gloo")
def test_buffers_that_are_declared_local_or_that_ddp_ignores_are_not_compared(wear):
    worn = wear(world_size=2, local_buffers=("*.running_*",))
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    inner.register_buffer("queue", torch.ones(3))
    inner.register_buffer("table", torch.ones(3))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["queue"])
    model = DistributedDataParallel(inner)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(3, 4))
    names = [entry.name for entry in worn.said(Census)[-1].body.entries if entry.is_buffer]
    compared = [value != 0 for value in fingerprints(tables(worn, "buffers")[0])]
    assert {"table", "1.num_batches_tracked"} == {name for name, is_ in zip(names, compared, strict=True) if is_}


@pytest.mark.usefixtures("gloo")
def test_sums_norms_and_marks_come_with_the_fingerprints(wear):
    worn = wear(world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 2))
    with torch.no_grad():
        model.module.weight.fill_(0.5)
        model.module.bias.zero_()
    step(model, torch.optim.SGD(model.parameters(), lr=0.0), torch.ones(1, 4))
    table = tables(worn, "parameters_before")[0]
    assert [4.0, 0.0] == np.frombuffer(table.sums, dtype="<f8").tolist()
    assert [Mark.CONSTANT, Mark.CONSTANT | Mark.ZERO] == list(table.marks)
    numbers = worn.said(StepDone)[0].body.numbers
    assert (4.0, math.sqrt(2)) == (numbers["sum.parameters_after"], numbers["norm.parameters_after"])


@pytest.mark.usefixtures("gloo")
def test_much_that_is_frozen_is_read_in_turns(wear, monkeypatch):
    monkeypatch.setattr("holter.rank.readings.comparison.SLICE_BYTES", 4 * 16 * 2)
    worn = wear(world_size=2)
    inner = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)), nn.Linear(4, 2))
    inner[:6].requires_grad_(False)
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(inner[6].parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer, torch.ones(1, 4))
    read = [[k for k, value in enumerate(fingerprints(t)) if value] for t in tables(worn, "frozen")]
    assert [[0, 1], [2, 3], [4, 5]] == read


@pytest.mark.usefixtures("gloo")
def test_the_script_may_let_go_of_a_model_at_once(wear):
    worn = wear(world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, torch.ones(1, 4))
    weight = weakref.ref(model.module.weight)
    del model, optimizer
    gc.collect()
    assert weight() is None
    assert not worn.monitor.context.guard.failures


@pytest.fixture
def mesh_of_four():
    """The place of rank 0 among four ranks, 2 x 2; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def placed(model: nn.Module, mesh, placements) -> nn.Module:
    return distribute_module(
        model,
        mesh,
        lambda _name, module, _mesh: [
            module.register_parameter(name, nn.Parameter(DTensor.from_local(p.detach(), mesh, placements)))
            for name, p in list(module.named_parameters(recurse=False))
        ],
    )


def test_a_partial_gradient_is_compared_only_in_what_the_step_makes_of_it(wear, mesh_of_four):
    worn = wear(world_size=4)
    model = placed(nn.Linear(4, 2), mesh_of_four, [Replicate(), Replicate()])
    worn.monitor.add_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.weight.grad = DTensor.from_local(torch.ones(2, 4), mesh_of_four, [Replicate(), Partial()])
    model.bias.grad = DTensor.from_local(torch.ones(2), mesh_of_four, [Replicate(), Replicate()])
    optimizer.step()
    (given,), (after,) = tables(worn, "gradients"), tables(worn, "parameters_after")
    assert [False, True] == [bool(print_) for print_ in np.frombuffer(given.fingerprints, "<u8")], "an addend differs"
    assert np.frombuffer(after.fingerprints, "<u8").all()


@pytest.mark.usefixtures("gloo")
def test_a_step_says_so_if_its_last_pass_leaves_gradients_local(wear):
    worn = wear(world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # An accumulating loop: what is local is reduced by the last pass. One more after it; none that reduces.
    for passes in ("local reducing", "local reducing local", "local reducing", "local local"):
        for kind in passes.split():
            with model.no_sync() if kind == "local" else nullcontext():
                model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # DDP reduces what was called outside of `no_sync`.
    loss = model(torch.ones(1, 4)).sum()
    with model.no_sync():
        loss.backward()
    optimizer.step()
    said = [o.body.numbers.get("backward.after_reduction") for o in worn.said(StepDone)]
    assert [None, 1.0, None, 1.0, None] == said


def test_what_the_optimizer_remembers_of_a_shard_is_read_after_a_step_and_before_the_next(wear, mesh_of_four):
    worn = wear(world_size=4)
    model = placed(nn.Linear(4, 2), mesh_of_four, [Shard(0), Shard(0)])
    worn.monitor.add_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if number == 2:
            optimizer.state[model.weight]["exp_avg"].to_local().zero_()
        optimizer.step()
    after, before = tables(worn, "state_after@own"), tables(worn, "state_before@own")
    names = ["exp_avg", "exp_avg_sq", "step"]
    assert [f"optimizer: {of}.{name}" for of in ("weight", "bias") for name in names][:3] == list(after[0].names)[:3]
    assert after[0].root == before[0].root, "nothing changed it"
    assert after[1].root != before[1].root
    was, now = (np.frombuffer(told.fingerprints, "<u8") for told in (after[1], before[1]))
    assert ["optimizer: weight.exp_avg"] == [
        name for name, a, b in zip(after[1].names, was, now, strict=True) if a != b
    ]
    assert not worn.monitor.context.guard.failures
