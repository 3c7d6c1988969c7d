"""ZeRO-Offload's gradients are read only when no stream can still be copying into them."""

from types import SimpleNamespace

import fake_cuda
import pytest
import torch

from holter.frameworks.deepspeed import framework


def offloaded() -> SimpleNamespace:
    """As ZeRO keeps them: a flat parameter in pinned memory, whose gradient comes from the device on a stream of its own."""
    flat = torch.ones(4, requires_grad=True)
    flat.grad = torch.zeros(4).pin_memory()
    return SimpleNamespace(single_partition_of_fp32_groups=[flat], reduction_stream=torch.cuda.Stream())


@pytest.mark.device
@pytest.mark.parametrize("where", ["its own stream", "the current stream"])
def test_a_gradient_in_the_middle_of_a_copy_is_left_out_until_the_copy_is_over(where) -> None:
    zero, there = offloaded(), torch.ones(4, device="cuda")
    fake_cuda.drain()
    stream = zero.reduction_stream if where == "its own stream" else torch.cuda.current_stream()
    with fake_cuda.closed(stream), torch.cuda.stream(stream):
        zero.single_partition_of_fp32_groups[0].grad.copy_(there, non_blocking=True)
        with torch.cuda.stream(torch.cuda.default_stream()):
            fake_cuda.syncs()
            assert [] == list(framework._gradients(zero, {}))
            assert [] == fake_cuda.syncs(), "nobody waits"
    fake_cuda.drain()
    ((_, gradient),) = framework._gradients(zero, {})
    assert [1.0] * 4 == gradient.tolist()


def test_without_a_device_they_are_read():
    flat = torch.ones(4, requires_grad=True)
    flat.grad = torch.ones(4)
    assert 1 == len(list(framework._gradients(SimpleNamespace(single_partition_of_fp32_groups=[flat]), {})))
