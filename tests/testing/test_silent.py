"""The silent faults do what they say, nothing beside it, and can be taken back."""

import math

import pytest
import torch
from torch import nn

from holter import testing


@pytest.fixture
def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def backward(net):
    net.zero_grad()
    out = net(torch.ones(2, 4))
    out.sum().backward()
    return out


@pytest.mark.parametrize("bit", [0, 12, 30, 31])
def test_one_bit_flips_and_flips_back(bit):
    tensor = torch.ones(3)
    testing.flip_bit(tensor, index=1, bit=bit)
    assert [False, True, False] == (tensor != 1).tolist()
    testing.flip_bit(tensor, index=1, bit=bit)
    assert torch.equal(torch.ones(3), tensor)


def test_a_bit_or_an_element_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="bit must be"):
        testing.flip_bit(torch.ones(3), bit=32)
    with pytest.raises(ValueError, match="index must be"):
        testing.flip_bit(torch.ones(3), index=3)


def test_noise_has_the_size_that_was_asked_for_and_draws_nothing_from_the_job():
    tensor, state = torch.full((10_000,), 5.0), torch.get_rng_state()
    testing.perturb(tensor, scale=0.01)
    assert 0.05 == pytest.approx(float((tensor - 5).std()), rel=0.05)
    assert torch.equal(state, torch.get_rng_state())


def test_gradients_are_scaled_where_there_are_any(net):
    backward(net)
    before = net[0].weight.grad.clone()
    net[1].weight.grad = None
    testing.scale_gradients(net.parameters(), 0.5)
    assert torch.equal(before * 0.5, net[0].weight.grad)


def test_a_round_trip_loses_the_low_bits_and_keeps_the_dtype():
    tensor = torch.tensor([1.0 + 2**-20])
    testing.round_trip(tensor, torch.bfloat16)
    assert (1.0, torch.float32) == (float(tensor), tensor.dtype)


def test_updates_are_lost_for_these_tensors_alone_until_it_is_undone(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    first, second = net[0].weight.detach().clone(), net[1].weight.detach().clone()
    with testing.lose_updates(optimizer, net[0].weight):
        backward(net)
        optimizer.step()
    assert torch.equal(first, net[0].weight)
    assert not torch.equal(second, net[1].weight)
    optimizer.step()
    assert not torch.equal(first, net[0].weight)


def test_nothing_flows_back_through_a_detached_output(net):
    with testing.detach_output(net[0]):
        backward(net)
        assert net[0].weight.grad is None
        assert net[1].weight.grad is not None
    backward(net)
    assert net[0].weight.grad is not None


def test_an_output_is_spoilt_as_often_as_was_said(net):
    with testing.spoil_output(net[0]):
        assert net(torch.ones(1, 4)).isnan().all()
        assert net(torch.ones(1, 4)).isfinite().all()


def test_a_gradient_is_spoilt_and_the_output_is_sound(net):
    with testing.spoil_gradient(net[0], math.nan):
        assert backward(net).isfinite().all()
        assert net[0].weight.grad.isnan().any()
        assert net[1].weight.grad.isfinite().all()
        backward(net)
        assert net[0].weight.grad.isfinite().all()


def test_a_module_outside_autocast_gives_float32_until_it_is_undone(net):
    with torch.autocast("cpu", torch.bfloat16):
        with testing.leave_autocast(net[1]):
            assert torch.float32 == net(torch.ones(1, 4)).dtype
        assert torch.bfloat16 == net(torch.ones(1, 4)).dtype
