"""ZeRO-Offload's gradients are read only when no stream can still be copying into them."""

from types import SimpleNamespace

import pytest
import torch

from holter.frameworks.deepspeed import framework


class Stream:
    def __init__(self, *, is_idle: bool) -> None:
        self._is_idle = is_idle

    def query(self) -> bool:
        return self._is_idle


@pytest.mark.parametrize(
    ("current", "own", "expected"), [(True, True, 1), (True, False, 0), (False, True, 0), (False, False, 0)]
)
def test_a_gradient_that_may_be_in_the_middle_of_a_copy_is_left_out(monkeypatch, current, own, expected):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(is_idle=current))
    flat = torch.ones(4, requires_grad=True)
    flat.grad = torch.ones(4)
    zero = SimpleNamespace(single_partition_of_fp32_groups=[flat], reduction_stream=Stream(is_idle=own))
    assert expected == len(list(framework._gradients(zero, {})))


def test_without_a_device_they_are_read():
    flat = torch.ones(4, requires_grad=True)
    flat.grad = torch.ones(4)
    assert 1 == len(list(framework._gradients(SimpleNamespace(single_partition_of_fp32_groups=[flat]), {})))
