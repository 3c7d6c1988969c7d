"""A step on the device of the tests: whatever a reading does, the step is told; and each gradient is read once."""

from collections import Counter

import fake_cuda
import pytest
import torch
from tests.rank.conftest import Worn
from torch import nn

from holter.records import StepDone
from holter_kernels import Pass, devices, triton_kernels

pytestmark = pytest.mark.device

NUM_STEPS = 5


class Agent:
    """Wants to know of every step whether it is finite."""

    def is_wanted(self) -> bool:
        return True

    def is_due(self, _step: int) -> bool:
        return False

    def hold(self, step: int, why: str, num_skipped: int = 0) -> None:
        raise AssertionError(step, why, num_skipped)


def told(*, dtype: torch.dtype = torch.float32, buffer: torch.Tensor | None = None) -> tuple[list[int], Worn]:
    """The steps that a sidecar hears of."""
    worn = Worn()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).to("cuda", dtype)
    if buffer is not None:
        model.register_buffer("odd", buffer)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(torch.ones(2, 8, device="cuda", dtype=dtype)).square().mean().backward()
        optimizer.step()
        fake_cuda.drain()
    worn.monitor.uninstall()
    return [each.step for each in worn.said(StepDone)], worn


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError("no C compiler")


def test_steps_are_told_where_no_reading_can_be_made() -> None:
    Pass.start = refuse
    steps, _ = told()
    assert list(range(NUM_STEPS)) == steps


def test_steps_are_told_where_triton_raises_and_gradients_are_read_by_torch() -> None:
    for name in ("float_pass", "mixed_pass", "element_pass"):
        getattr(triton_kernels, name).run = refuse
    steps, worn = told()
    assert list(range(NUM_STEPS)) == steps
    assert {} == worn.monitor.context.guard.failures
    assert all(each.body.gradient_norm for each in worn.said(StepDone))
    assert devices._triton_failed


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.uint16, torch.complex32])
def test_steps_are_told_and_read_beside_a_tensor_of_an_unknown_dtype(dtype) -> None:
    steps, worn = told(buffer=torch.ones(8, dtype=torch.uint8, device="cuda").view(dtype))
    assert list(range(NUM_STEPS)) == steps
    assert {} == worn.monitor.context.guard.failures
    assert all(each.body.gradient_norm for each in worn.said(StepDone))


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}])
def test_a_rank_that_is_alone_reads_each_gradient_once_a_step(how) -> None:
    worn = Worn(guard_wait_s=60.0)
    worn.monitor.context.hold.agent = Agent()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).cuda()
    worn.monitor.add_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **how)
    asked: Counter[str] = Counter()
    readings = worn.monitor.context.readings
    read = readings.read

    def count(name: str, *args: object, **kwargs: object) -> object:
        asked[name.rstrip("0123456789")] += 1
        return read(name, *args, **kwargs)

    readings.read = count
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(torch.ones(2, 8, device="cuda")).square().mean().backward()
        optimizer.step()
        fake_cuda.drain()
    # Histograms (vitals) are a reading of their own, now and then.
    assert {"gradient": NUM_STEPS} == {
        name: asked[name] for name in asked if name in ("gradient", "applied", "reduced_gradient")
    }
