"""A step on the device of the tests: whatever a reading does, the step is told; each gradient is read once; and what the step did to the weights is looked at."""

from collections import Counter

import fake_cuda
import pytest
import torch
from tests.rank.conftest import Worn
from torch import nn

from holter.rank.hold import finite_guard
from holter.rank.hooks.closures import is_followed
from holter.records import StepDone, Vitals
from holter_kernels import Pass, devices, gpu, triton_kernels

pytestmark = pytest.mark.device

NUM_STEPS = 5


class Agent:
    """Wants to know of every step whether it is finite."""

    is_released = False
    """Steps that are held go on."""

    def __init__(self) -> None:
        self.held: list[tuple[int, str]] = []

    def is_wanted(self) -> bool:
        return True

    def is_due(self, _step: int) -> bool:
        return False

    def hold(self, step: int, why: str, num_skipped: int = 0) -> None:
        self.held.append((step, why))
        if not self.is_released:
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
    triton_kernels.read_pass.run = refuse
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


def trained(how: dict[str, bool], *, bad: int = -1, is_drained: bool = False) -> Worn:
    """A monitor that holds steps, after a few of them."""
    worn = Worn(guard_wait_s=60.0)
    worn.monitor.context.hold.agent = Agent()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).cuda()
    worn.monitor.add_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **how)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(torch.full((2, 8), float("nan") if step == bad else 1.0, device="cuda")).square().mean().backward()
        optimizer.step()
        if is_drained:
            fake_cuda.drain()
    fake_cuda.drain()
    worn.monitor.context.readings.poll()
    return worn


def test_the_flag_of_the_reading_is_what_a_fused_optimizer_is_given() -> None:
    finite_guard.flag_of = refuse
    worn = trained({"fused": True})
    assert {} == worn.monitor.context.guard.failures
    assert worn.monitor.context.hold.flags._num_given > 0


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}])
def test_weights_are_looked_at_where_the_device_is_asked_to_leave_steps_out(how) -> None:
    worn = trained(how)
    monitor = worn.monitor
    assert list(range(NUM_STEPS)) == [each.step for each in worn.said(Vitals)]
    assert [] == monitor.context.state_history.unread(monitor.context.models, monitor.optimizers)
    assert {} == monitor.context.guard.failures


@pytest.mark.parametrize("is_drained", [False, True])
def test_nothing_is_said_of_weights_that_stood_still_since_the_device_left_their_step_out(is_drained: bool) -> None:  # noqa: FBT001
    worn = trained({"fused": True}, bad=NUM_STEPS - 2, is_drained=is_drained)
    held = worn.monitor.context.hold.agent.held
    assert bool(held) or not is_drained
    # The host goes on from there. Whether it learns of the bad step before the last one is else the device's pace: the last is then applied, and looked at.
    last = [NUM_STEPS - 1] if held else []
    assert [*range(NUM_STEPS - 2), *last] == [each.step for each in worn.said(Vitals)]


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}])
def test_optimizers_that_step_inside_of_backward_are_followed_into_autograds_thread(how) -> None:
    worn = Worn(guard_wait_s=60.0)
    agent = worn.monitor.context.hold.agent = Agent()
    agent.is_released = True
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).cuda()
    worn.monitor.add_model(model)
    each = {p: torch.optim.AdamW([p], lr=0.1, **how) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: each[p].step() or each[p].zero_grad())
    for step in range(NUM_STEPS):
        model(torch.full((2, 8), float("nan") if step == 2 else 1.0, device="cuda")).square().mean().backward()
        fake_cuda.drain()
    worn.monitor.uninstall()
    assert list(range(NUM_STEPS)) == [each.step for each in worn.said(StepDone)]
    assert (2, "nonfinite") == agent.held[0]
    assert {} == worn.monitor.context.guard.failures


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}])
def test_a_step_is_held_where_the_device_has_no_room_for_a_reading(how) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    gpu.Ring = refuse
    worn = trained(how, bad=2)
    assert (2, "nonfinite") == worn.monitor.context.hold.agent.held[0]


def test_muon_and_adafactor_are_held_inside_of_their_steps_too() -> None:
    model = nn.Linear(4, 4, bias=False)
    assert all(is_followed(kind(model.parameters())) for kind in (torch.optim.Muon, torch.optim.Adafactor))
    assert not is_followed(torch.optim.LBFGS(model.parameters()))
