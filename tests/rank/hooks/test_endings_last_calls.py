"""What a rank leaves of its recorder when an exception ends it."""

import sys

import pytest
import torch
import torch.distributed as dist

from holter.flight import from_json
from holter.rank.hooks import endings
from holter.records import Farewell, LastCalls


def end_by(error, monkeypatch, worn):
    heard = []
    monkeypatch.setattr(worn.monitor._ending, "_previous", lambda *args: heard.append(args))
    sys.excepthook(type(error), error, None)
    return heard


@pytest.mark.usefixtures("gloo")
def test_an_exception_leaves_the_newest_calls_and_is_passed_on(worn, monkeypatch):
    for number in range(100):
        dist.all_reduce(torch.ones(number + 1))
    error = RuntimeError("connection reset by peer")
    assert [(RuntimeError, error, None)] == end_by(error, monkeypatch, worn)
    (left,) = worn.said(LastCalls)
    calls = from_json(left.body.dump, 1).calls
    assert (endings.MAX_CALLS, ((100,),)) == (len(calls), calls[-1].sizes)
    (said,) = worn.said(Farewell)
    assert "exception" == said.body.kind


@pytest.mark.usefixtures("gloo")
def test_an_ordinary_end_leaves_the_whole_recorder(worn):
    for number in range(100):
        dist.all_reduce(torch.ones(number + 1))
    worn.monitor._ending._end()
    (left,) = worn.said(LastCalls)
    assert left.body.is_orderly
    assert 100 <= len(from_json(left.body.dump, 1).calls)


@pytest.mark.usefixtures("gloo")
def test_ctrl_c_leaves_none(worn, monkeypatch):
    dist.all_reduce(torch.ones(1))
    end_by(KeyboardInterrupt(), monkeypatch, worn)
    assert not worn.said(LastCalls)


def test_a_recorder_that_fails_stops_nothing(wear, monkeypatch):
    worn = wear()
    monkeypatch.setattr(endings, "dump", lambda: b"no JSON")
    assert end_by(ValueError("as asked"), monkeypatch, worn)
    assert worn.said(Farewell)
