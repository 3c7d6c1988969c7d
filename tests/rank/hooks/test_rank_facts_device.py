"""The rank says its device once, and starts none."""

from types import SimpleNamespace

import pytest
import torch

from holter.rank import accelerator
from holter.records import OnDevice


def train(num: int = 3) -> None:
    model = torch.nn.Linear(4, 1)
    for _ in range(num):
        model(torch.ones(2, 4)).sum().backward()


def pretend(monkeypatch) -> None:
    """There is a CUDA device, and the script uses it."""
    monkeypatch.setattr(accelerator, "_ask", lambda: torch.device("cuda"))
    # As if a backend had been imported just now; afterwards it is as it was.
    monkeypatch.setattr(accelerator, "_known", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def test_without_a_device_nothing_is_said(worn):
    train()
    assert [] == worn.said(OnDevice)


@pytest.mark.parametrize(("uuid", "expected"), [("8a1c-22", ["GPU-8a1c-22"]), ("MIG-7", ["MIG-7"]), ("", [])])
def test_the_device_is_said_once(worn, monkeypatch, uuid, expected):
    pretend(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {3: SimpleNamespace(uuid=uuid)}.get)
    train()
    assert expected == [observation.body.uuid for observation in worn.said(OnDevice)]


def test_a_driver_that_fails_costs_one_look(worn, monkeypatch):
    def fail() -> int:
        raise RuntimeError("driver")

    pretend(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_device", fail)
    train()
    assert {"DeviceProbe.look": 1} == worn.monitor.context.guard.failures
    worn.monitor.context.guard.failures.clear()
    assert [] == worn.said(OnDevice)
