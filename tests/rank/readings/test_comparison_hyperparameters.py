"""Settings of optimizers, as every replica has them."""

import struct

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holter.records import PackedTable, StepDone


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def told(worn) -> list[dict[str, float]]:
    found = [o.body for o in worn.said(PackedTable) if o.body.tensor_class == "hyperparameters"]
    return [dict(zip(t.names, struct.unpack(f"<{len(t.names)}d", t.fingerprints), strict=True)) for t in found]


@pytest.mark.usefixtures("gloo")
def test_every_number_of_a_group_and_the_count_of_steps_is_told(wear):
    worn = wear(world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.8, 0.9), weight_decay=0.25)
    step(model, optimizer)
    step(model, optimizer)
    second = told(worn)[1]
    prefix = "optimizer0.group0."
    assert (0.5, 0.8, 0.9, 0.25) == tuple(second[prefix + key] for key in ("lr", "betas.0", "betas.1", "weight_decay"))
    assert (0.0, 1.0) == (second[prefix + "amsgrad"], second[prefix + "step"])


@pytest.mark.usefixtures("gloo")
def test_the_root_is_told_at_every_step_and_the_table_when_something_changed(wear):
    worn = wear(world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.0)
    for rate in (0.5, 0.5, 0.25, 0.25):
        optimizer.param_groups[0]["lr"] = rate
        step(model, optimizer)
    roots = [o.body.roots["hyperparameters"] for o in worn.said(StepDone)]
    assert (roots[0], roots[2]) == (roots[1], roots[3])
    assert roots[0] != roots[2]
    assert [0.5, 0.25] == [values["optimizer0.group0.lr"] for values in told(worn)][-2:]


@pytest.mark.usefixtures("gloo")
def test_optimizers_are_numbered_in_the_order_of_their_first_step(wear):
    worn = wear(world_size=2)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    one, other = (
        torch.optim.SGD(part.parameters(), lr=rate) for part, rate in zip(model.module, (0.5, 0.25), strict=True)
    )
    for _ in range(3):
        step(model, one, other)
    assert (0.5, 0.25) == tuple(told(worn)[-1][f"optimizer{k}.group0.lr"] for k in range(2))


def test_a_model_that_nobody_replicates_has_settings_of_its_own(wear):
    worn = wear(world_size=2)
    model = nn.Linear(4, 2)
    step(model, torch.optim.SGD(model.parameters(), lr=0.5))
    assert not told(worn)


@pytest.mark.usefixtures("gloo")
def test_a_group_without_replicas_is_the_ranks_own(wear):
    worn = wear(world_size=2)
    inner = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["0.weight"])
    model = DistributedDataParallel(inner)
    groups = [{"params": [inner[0].weight], "lr": 0.125}, {"params": [inner[1].weight], "lr": 0.25}]
    step(model, torch.optim.SGD(groups))
    assert {"optimizer0.group1.lr"} == {name for name in told(worn)[0] if name.endswith(".lr")}
