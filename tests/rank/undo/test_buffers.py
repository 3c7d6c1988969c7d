"""Buffers come back as the forward pass found them; large ones are not all copied, and then it is known whether they moved."""

import pytest
import torch
from torch import nn

from holter.errors import RewindError
from holter.rank.undo.buffers import SMALL_BYTES, MovingBuffers

LARGE = SMALL_BYTES
"""Elements of four bytes."""
ROOM_BYTES = 2 * 4 * LARGE


class Quantised(nn.Module):
    """Two large buffers, of which the second is larger than all copies may be, and small ones behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(LARGE))
        self.register_buffer("weights", torch.ones(4 * LARGE))
        self.norm = nn.BatchNorm1d(8)


class ScarceTensor(torch.Tensor):
    """There is no memory for a copy."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.clone:
            raise torch.OutOfMemoryError
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.fixture
def model(worn):
    model = nn.Sequential(Quantised())
    worn.monitor.add_model(model)
    return model


@pytest.fixture
def buffers(worn):
    return MovingBuffers(worn.monitor.context, ROOM_BYTES)


def own_bytes(buffers: MovingBuffers) -> int:
    return sum(tensor.nbytes for _, _, tensor, is_moving in buffers.found() if not is_moving)


def test_what_has_a_copy_is_put_back_and_what_rests_needs_none(model, buffers):
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _ in range(2):
        buffers.keep()
        assert 4 * LARGE <= own_bytes(buffers) <= ROOM_BYTES
        model[0].mask.zero_()
        model[0].norm(torch.randn(4, 8))
        buffers.restore()
        assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def replace_in_the_same_memory(inner: Quantised) -> None:
    values = inner.weights.numpy()
    values += 1
    inner.weights = torch.from_numpy(values)


@pytest.mark.parametrize("change", [lambda inner: inner.weights.add_(1), replace_in_the_same_memory])
def test_one_without_a_copy_that_changed_is_named_and_nothing_is_put_back(model, buffers, change):
    buffers.keep()
    change(model[0])
    model[0].mask.zero_()
    with pytest.raises(RewindError, match=r"the buffer 0\.weights has changed"):
        buffers.restore()
    assert not model[0].mask.any()
    buffers.keep()
    buffers.restore()


def test_buffers_of_one_job_share_the_room(worn, buffers):
    models = [Quantised() for _ in range(4)]
    for each in models:
        worn.monitor.add_model(each)
    buffers.keep()
    large = [tensor for _, name, tensor, is_moving in buffers.found() if name == "mask" and not is_moving]
    assert 2 == len(large)
    assert all(not is_moving for _, name, _, is_moving in buffers.found() if name.startswith("running"))


def test_when_memory_is_short_nothing_is_held_and_no_large_one_is_tried_again(model, buffers):
    model[0].mask = torch.ones(LARGE).as_subclass(ScarceTensor)
    with pytest.raises(torch.OutOfMemoryError):
        buffers.keep()
    assert 0 == own_bytes(buffers)
    with pytest.raises(RewindError, match="memory was short"):
        buffers.restore()
    buffers.keep()
    assert 0 < own_bytes(buffers) < 4 * LARGE
    model[0].norm(torch.randn(4, 8))
    buffers.restore()
    assert 0 == model[0].norm.num_batches_tracked


def test_running_statistics_of_any_size_come_back_as_this_step_found_them(worn, buffers):
    wide = nn.BatchNorm1d(LARGE)
    model = nn.Sequential(nn.Linear(1, 1), wide)
    worn.monitor.add_model(model)
    for _ in range(3):
        buffers.keep()
        found = wide.running_mean.clone()
        wide(torch.randn(4, LARGE))
    buffers.restore()
    assert torch.equal(found, wide.running_mean)


def test_a_large_one_that_native_code_moved_long_ago_is_named(model, buffers):
    buffers.keep()
    buffers.keep()
    model[0].mask.numpy()[0] = 7
    with pytest.raises(RewindError, match=r"the buffer 0\.mask has changed, and torch did not count when"):
        buffers.restore()


@pytest.fixture
def given_to_all(worn, request) -> nn.Module:
    request.getfixturevalue("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    worn.monitor.add_model(model)
    return model


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_what_the_first_rank_gives_to_all_is_taken_over_by_who_saves_for_it(given_to_all, buffers):
    buffers.keep()
    given_to_all(torch.randn(4, 4))
    first, given = copied(given_to_all), buffers.given()
    given_to_all(torch.randn(4, 4))
    assert buffers.take_over(given)
    assert all(torch.equal(first[name], buffer) for name, buffer in given_to_all.named_buffers())


def test_where_one_of_them_is_not_known_none_is_changed(given_to_all, buffers):
    buffers.keep()
    own, given = copied(given_to_all), buffers.given()
    given_to_all(torch.randn(4, 4))
    moved = copied(given_to_all)
    for known in ({}, dict(list(given.items())[1:]), dict.fromkeys(given, b"too short")):
        assert not buffers.take_over(known)
        assert all(torch.equal(moved[name], buffer) for name, buffer in given_to_all.named_buffers())
    assert not torch.equal(own["module.1.running_mean"], moved["module.1.running_mean"])


@pytest.mark.usefixtures("gloo")
def test_buffers_that_each_rank_has_of_its_own_are_given_to_nobody(worn, buffers):
    model = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(8), forward_sync_buffers=False)
    worn.monitor.add_model(model)
    buffers.keep()
    assert {} == buffers.given()
    assert buffers.take_over({})
