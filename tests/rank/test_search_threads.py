"""A search among all living objects does no harm to what other threads are doing."""

import sys
import threading

import pytest
import torch
from torch import nn

from holter.rank import search

SEARCHES = 15


def _fill_tuples(stop: threading.Event, raised: list[BaseException]) -> None:
    while not stop.is_set():
        try:
            tuple(str(number) for number in range(200))
        except SystemError as error:
            raised.append(error)


@pytest.fixture
def threads_take_turns():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("threads_take_turns")
@pytest.mark.skipif(search._native is None, reason="built without a compiler")
@pytest.mark.parametrize(
    "look", [search.top_level, lambda: search.living(torch.optim.Optimizer)], ids=["models", "optimizers"]
)
def test_a_tuple_that_another_thread_is_filling_is_left_alone(look):
    stop, raised = threading.Event(), []
    thread = threading.Thread(target=_fill_tuples, args=(stop, raised))
    thread.start()
    try:
        for _ in range(SEARCHES):
            look()
    finally:
        stop.set()
        thread.join()
    assert raised == []


def test_a_tuple_that_holds_a_model_is_no_holder():
    model = nn.Linear(2, 2)
    pair = (model, 1)
    assert all(holder is not pair for holder in search._holders(model))


def test_classes_that_compare_as_they_like_are_told_apart():
    class Odd(type):
        def __eq__(cls, other):
            raise AssertionError

        def __hash__(cls):
            raise AssertionError

    class Thing(metaclass=Odd):
        pass

    model, thing = nn.Linear(2, 2), Thing()
    assert any(each is model for each in search.living(nn.Linear))
    assert thing is not None


def test_derived_classes_are_found():
    class Mine(nn.Linear):
        pass

    mine = Mine(2, 2)
    assert any(each is mine for each in search.living(nn.Module))


def test_only_classes_are_asked_for():
    if search._native is not None:
        with pytest.raises(TypeError):
            search._native.of_kinds((nn.Module,))
