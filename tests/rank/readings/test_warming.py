"""Kernels are compiled in a thread when a model is first called on a device: the step is told meanwhile, a NaN is held meanwhile, and the sidecar knows."""

import threading
import time
from typing import Any

import pytest
import torch
from tests.rank.conftest import Worn
from torch import nn

from holter.rank.readings import warming
from holter.records import Preparing, StepDone
from holter_kernels import devices, warm

pytestmark = pytest.mark.device


class Compiler:
    """Takes as long as the test says."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.threads: list[str] = []
        self.asked: list[list[torch.dtype]] = []
        warming.is_needed = lambda _: True
        warm._kernels = self._kernels

    def _kernels(self, dtypes: list[torch.dtype], _passes: Any) -> Any:
        self.asked.append(dtypes)
        yield "slow", self._compile

    def _compile(self) -> object:
        self.threads.append(threading.current_thread().name)
        self.gate.wait(60)
        return object()


class HeldError(BaseException):
    """The process would end here."""


class Agent:
    """Ends whoever is held."""

    def is_wanted(self) -> bool:
        return True

    def is_due(self, _step: int) -> bool:
        return False

    def hold(self, step: int, why: str, num_skipped: int = 0) -> None:
        raise HeldError(step, why, num_skipped)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, worth: float = 1.0) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        (model(torch.ones(2, 4, device="cuda")).square().mean() * worth).backward()
        optimizer.step()


def until(is_so: Any) -> None:
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() < began + 60
        time.sleep(0.01)


def test_steps_are_told_while_kernels_are_compiled_and_read_once_they_are_there() -> None:
    compiler, worn = Compiler(), Worn()
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worn.monitor.add_model(model)
    train(model, optimizer, 3)
    assert [0, 1, 2] == [said.step for said in worn.said(StepDone)]
    assert [None] * 3 == [said.body.gradient_norm for said in worn.said(StepDone)]
    assert [False] == [said.body.is_over for said in worn.said(Preparing)]
    assert worn.monitor.context.readings.declined["warming up"] >= 3
    compiler.gate.set()
    until(lambda: not devices.warming)
    train(model, optimizer, 3)
    torch.cuda.synchronize()
    train(model, optimizer, 1)
    assert [False, True] == [said.body.is_over for said in worn.said(Preparing)]
    assert worn.said(Preparing)[1].body.seconds > 0
    assert any(said.body.gradient_norm for said in worn.said(StepDone))
    assert (["holter-kernels"], [[torch.float32]]) == (compiler.threads, compiler.asked)
    assert not worn.monitor.context.guard.failures


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}])
def test_a_nan_is_held_while_kernels_are_compiled_and_its_tensors_are_named_once_they_are_there(how) -> None:
    compiler, worn = Compiler(), Worn(guard_wait_s=30.0)
    worn.monitor.context.hold.agent = Agent()
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **how)
    worn.monitor.add_model(model)
    train(model, optimizer, 2)
    threading.Timer(1.0, compiler.gate.set).start()
    with pytest.raises(HeldError) as held:
        train(model, optimizer, 1, float("nan"))
    assert (2, "nonfinite", 0) == held.value.args
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    (bad,) = [said for said in worn.said(StepDone) if said.body.nonfinite]
    assert {"weight", "bias"} <= {entry.name for entry in bad.body.nonfinite}


def test_a_compiler_that_fails_gives_up_triton_and_the_device_is_read_by_torch() -> None:
    compiler, worn = Compiler(), Worn()
    compiler.gate.set()
    warm._kernels = lambda *_: (_ for _ in ()).throw(OSError("no triton"))
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worn.monitor.add_model(model)

    def train_until_compiled() -> None:
        train(model, optimizer, 1)
        until(lambda: not devices.warming)

    with pytest.warns(RuntimeWarning, match="Triton could not run"):
        train_until_compiled()
    train(model, optimizer, 3)
    torch.cuda.synchronize()
    train(model, optimizer, 1)
    assert any(said.body.gradient_norm for said in worn.said(StepDone))
    assert [False, True] == [said.body.is_over for said in worn.said(Preparing)]
