"""A NaN that a layer makes on a device is traced to the layer: before a step that waits for the device, and after one that the device has left out by itself."""

from collections.abc import Callable
from typing import Any

import fake_cuda
import pytest
import torch
from tests.rank.conftest import Worn
from torch import nn

from holter.rank.hold import finite_guard
from holter.records import Origin

pytestmark = pytest.mark.device

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True),
    "fused sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, fused=True),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=True),
    "loop": lambda ps: torch.optim.SGD(ps, lr=0.05, foreach=False),
}
AT = 4


class StandingError(BaseException):
    """The rank stands, and its test goes on."""


class Agent:
    """Has every bad step held."""

    def is_wanted(self) -> bool:
        return True

    def is_due(self, _step: int) -> bool:
        return False

    def hold(self, step: int, _why: str, num_skipped: int = 0) -> None:
        raise StandingError(step, num_skipped)


class Root(nn.Module):
    """The square root, of what may be below zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 50).sqrt()


class Job:
    """Dropout and batch normalisation move more than weights."""

    def __init__(self, kind: str, *, num_passes: int = 1, width: int = 8) -> None:
        torch.manual_seed(0)
        layers = [nn.Dropout(0.2), nn.Sequential(Root()), nn.Linear(width, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)]
        self.model = nn.Sequential(*layers).cuda()
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.num_passes, self.width = num_passes, width

    def step(self, number: int, *, where: str = "") -> None:
        self.optimizer.zero_grad()
        for each in range(self.num_passes):
            generator = torch.Generator().manual_seed(100 * number + each)
            inputs = torch.randn(6, self.width, generator=generator)
            inputs[2] -= 100.0 * (where == "layer")
            output = self.model(inputs.pin_memory().cuda(non_blocking=True))
            (
                output - output.detach()
            ).sqrt().mean().backward() if where == "loss" else output.square().mean().backward()

    def run(
        self, where: str, *, is_ahead: bool, before_step: Callable[[], None] = lambda: None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Until the rank stands; what moves with a step, before and after it was asked about."""
        for number in range(AT + 6):
            self.step(number, where=where if number == AT else "")
            if not is_ahead:
                fake_cuda.drain()
            before_step()
            before = self._moving()
            try:
                self.optimizer.step()
            except StandingError:
                return before, self._moving()
        raise AssertionError("it was not held")

    def _moving(self) -> list[torch.Tensor]:
        kept = [torch.get_rng_state(), torch.cuda.get_rng_state()]
        fake_cuda.drain()
        # NaN is equal to nothing, and the statistics of a bad batch are NaN.
        return [*kept, *(buffer.cpu().nan_to_num(-1.0) for buffer in self.model.buffers())]


def origin(kind: str, where: str, *, is_ahead: bool = True, is_told: bool = False, **job: int) -> Origin:
    worn, made = Worn(guard_wait_s=60.0), Job(kind, **job)
    worn.monitor.context.hold.agent = Agent()
    poll = worn.monitor.context.readings.poll
    before, after = made.run(where, is_ahead=is_ahead, before_step=poll if is_told else lambda: None)
    assert all(map(torch.equal, before, after)), "a replay leaves nothing behind"
    assert {} == worn.monitor.context.guard.failures
    (told,) = worn.said(Origin)
    assert AT == told.step
    return told.body


OFTEN = [("fused", "ahead"), ("foreach", "synchronous")]


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param(kind, how, marks=() if (kind, how) in OFTEN else pytest.mark.release)
        for kind in OPTIMIZERS
        for how in ("ahead", "synchronous")
    ],
)
def test_the_layer_is_named(kind: str, how: str) -> None:
    found = origin(kind, "layer", is_ahead=how == "ahead")
    assert ("1.0", "Root", True, True) == (found.module, found.module_class, found.is_input_finite, found.replayed)
    assert found.output_nans > 0


@pytest.mark.parametrize("kind", ["fused", pytest.param("foreach", marks=pytest.mark.release)])
def test_what_is_told_before_the_step_is_asked_about_once(kind: str) -> None:
    found = origin(kind, "layer", is_ahead=False, is_told=True)
    assert ("1.0", "Root", True) == (found.module, found.module_class, found.replayed)


@pytest.mark.parametrize(("kind", "is_proven"), [("fused", False), ("foreach", True)])
def test_where_every_layer_is_finite_the_loss_is_what_is_left_unless_steps_went_by(kind: str, is_proven: bool) -> None:  # noqa: FBT001
    found = origin(kind, "loss")
    assert ("", is_proven) == (found.module, found.replayed)


@pytest.mark.parametrize("kind", ["fused", pytest.param("foreach", marks=pytest.mark.release)])
def test_of_several_micro_batches_none_is_blamed(kind: str) -> None:
    found = origin(kind, "layer", num_passes=2)
    assert not found.replayed
    assert "micro-batches" in found.reason


def test_a_large_batch_is_not_kept_for_it() -> None:
    finite_guard.MAX_KEPT_BYTES = 1 << 10
    worn, job = Worn(guard_wait_s=60.0), Job("fused", width=256)
    worn.monitor.context.hold.agent = Agent()
    job.run("layer", is_ahead=True)
    assert [] == worn.said(Origin)
