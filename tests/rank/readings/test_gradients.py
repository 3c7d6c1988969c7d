"""The gradients of a step, as they are."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

from holter.rank.publish.budget import StepPlan
from holter.records import Census, StepDone


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()


def test_sparse_gradients_are_left_alone(worn):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, torch.tensor([1, 2]))
    (done,) = (o.body for o in worn.said(StepDone))
    expected = math.sqrt(sum(float(p.grad.pow(2).sum()) for p in model[1].parameters()))
    assert math.isclose(expected, done.gradient_norm, rel_tol=1e-6)


def test_the_norm_is_that_of_the_gradient(worn):
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 4))
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item()
    # Sums of squares of ten values in double precision against single precision.
    assert math.isclose(expected, worn.said(StepDone)[0].body.gradient_norm, rel_tol=1e-6)


@pytest.mark.usefixtures("gloo")
def test_the_norm_of_gradients_that_are_read_before_the_step_alone_counts_them_once(worn):
    model = nn.Linear(4, 2)
    worn.monitor.add_model(fully_shard(model, mesh=init_device_mesh("cpu", (1,))))
    names, read = [], worn.monitor.context.readings.read
    worn.monitor.context.readings.read = lambda name, *args, **how: (names.append(name), read(name, *args, **how))[1]
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 4))
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor().item()
    assert math.isclose(expected, worn.said(StepDone)[0].body.gradient_norm, rel_tol=1e-6)
    assert 1 == names.count("reduced_gradient0")


def test_the_norm_is_that_of_all_models(worn):
    one, other = nn.Linear(4, 4), nn.Linear(4, 1)
    worn.monitor.add_model(one)
    worn.monitor.add_model(other)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    other(one(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    gradients = [p.grad.flatten() for model in (one, other) for p in model.parameters()]
    expected = torch.linalg.vector_norm(torch.cat(gradients)).item()
    assert math.isclose(expected, worn.said(StepDone)[0].body.gradient_norm, rel_tol=1e-6)


def test_a_model_without_gradients_does_not_hold_a_step_back(worn):
    model, idle = nn.Linear(4, 1), nn.Linear(4, 1)
    worn.monitor.add_model(model)
    worn.monitor.add_model(idle)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 4))
    assert 1 == len(worn.said(StepDone))


def test_a_first_backward_that_fails_leaves_no_hook(worn):
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):  # noqa: ARG004
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):  # noqa: ARG004
            raise RuntimeError("out of memory")

    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            Bad.apply(model(torch.ones(1, 4)).sum()).backward()
    for _ in range(5):
        step(model, optimizer, torch.ones(1, 4))
    assert [0, 0] == [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    assert 1 == len(worn.said(Census))


def test_where_tensors_are_read_in_turns_the_norm_is_of_all_as_last_read(worn):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    worn.monitor.context.schedule.plan = StepPlan(gradient_stride=2, check_interval=64)
    for _ in range(3):
        step(model, optimizer, torch.ones(3, 4))
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item()
    first, *others = (o.body.gradient_norm for o in worn.said(StepDone))
    assert first is None
    assert all(math.isclose(expected, norm, rel_tol=1e-6) for norm in others)


def test_an_answer_that_is_still_owed_holds_no_gradient(wear):
    worn = wear()
    worn.answer_late()
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    model(torch.ones(1, 4)).sum().backward()
    assert worn.monitor.context.log.now.num_owed
    held = weakref.ref(model.weight.grad)
    model.zero_grad()
    gc.collect()
    assert held() is None
