"""A device answers late: nothing is waited for, and a step is told when its readings are in."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from holter.rank.readings.fused_pass import Readings, outline, outline_by_numpy
from holter.records import StepDone
from holter_kernels import Pass, summarize


def train(worn, num_steps: int, nan_step: int = -1) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worn.monitor.add_model(model)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).pow(2).mean()
        if step == nan_step:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()


def test_a_late_answer_belongs_to_its_own_step(worn):
    train(worn, 20)
    at_once = [observation.body.gradient_norm for observation in worn.said(StepDone)]
    worn.forget()
    worn.answer_late()
    train(worn, 20)
    late = [observation.body.gradient_norm for observation in worn.said(StepDone)]
    assert at_once[: len(late)] == late
    assert 10 < len(late) < 20


def test_steps_are_told_in_order(worn):
    worn.answer_late()
    train(worn, 30)
    steps = [observation.step for observation in worn.said(StepDone)]
    assert steps == list(range(len(steps)))


def test_a_late_nan_is_told_with_its_step(worn):
    worn.answer_late()
    train(worn, 30, nan_step=10)
    first = next(observation for observation in worn.said(StepDone) if observation.body.nonfinite)
    assert first.step == 10
    assert {"loss", "gradient", "reduced_gradient"} == {entry.where for entry in first.body.nonfinite}


def test_a_reading_that_is_never_answered_does_not_hold_the_steps_back(worn):
    class Mute(Pass):
        def start(self, tensors):
            super().start(tensors)
            return SimpleNamespace(poll=lambda: None)

    worn.monitor.context.readings = Readings(Mute)
    train(worn, 30)
    steps = [observation.step for observation in worn.said(StepDone)]
    assert steps == list(range(30 - 8))


class StandIn:
    """Passes that answer when they are told to."""

    def __init__(self) -> None:
        self.readings: list[SimpleNamespace] = []
        self.answers: list[object] = []

    def make(self, *_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(start=self._start, declined=Counter())

    def _start(self, _: list[torch.Tensor]) -> SimpleNamespace:
        number = len(self.answers)
        self.answers.append(None)
        return SimpleNamespace(poll=lambda: self.answers[number], device_s=lambda: 0.5)

    def answer(self, number: int) -> None:
        self.answers[number] = SimpleNamespace(number=number, left_out=1)


def test_answers_are_handed_out_in_the_order_of_the_readings():
    device, heard = StandIn(), []
    readings = Readings(device.make)
    for name in ("a", "b", "a"):
        readings.read(name, [torch.ones(1)], lambda table: heard.append(table.number))
    for number, expected in ((2, []), (1, []), (0, [0, 1, 2])):
        device.answer(number)
        readings.poll()
        assert expected == heard
    assert (1.5, 3) == (readings.device_s, readings.left_out)


def test_an_answer_that_never_comes_is_given_up_when_many_others_have_come():
    device, heard = StandIn(), []
    readings = Readings(device.make)
    for number in range(70):
        readings.read("a", [torch.ones(1)], lambda table: heard.append(table.number))
        if number:
            device.answer(number)
    readings.poll()
    assert list(range(1, 70)) == heard
    assert 1 == readings.declined["unanswered"]


def test_whoever_gets_an_answer_may_read_again():
    device, heard = StandIn(), []
    readings = Readings(device.make)

    def again(table):
        heard.append(table.number)
        if table.number < 2:
            readings.read("a", [torch.ones(1)], again)

    for _ in range(2):
        readings.read("a", [torch.ones(1)], again)
    device.answer(0)
    device.answer(1)
    readings.poll()
    device.answer(2)
    readings.poll()
    assert [0, 1, 2] == heard


def test_a_reading_that_raises_or_is_declined_is_counted_and_never_answered(caplog):
    def refuse(_: object) -> None:
        raise RuntimeError("no compiler")

    heard = []
    readings = Readings(lambda *_, **__: SimpleNamespace(start=refuse))
    for _ in range(3):
        assert readings.read("a", [torch.ones(1)], heard.append) is None
    assert {"raised": 3} == dict(readings.declined)
    assert 1 == len([record for record in caplog.records if "no compiler" in record.getMessage()])
    readings = Readings(lambda *_, **__: SimpleNamespace(start=lambda _: None, declined=Counter(capturing=1)))
    assert readings.read("a", [torch.ones(1)], heard.append) is None
    assert {"capturing": 1} == dict(readings.declined)
    assert [] == heard


@pytest.mark.parametrize(
    ("value", "has_nonfinite", "has_zero"),
    [(1.0, False, False), (0.0, False, True), (float("nan"), True, False), (float("-inf"), True, False)],
)
def test_the_outline_of_a_table_is_what_numpy_says(value, has_nonfinite, has_zero):
    torch.manual_seed(0)
    tensors = [torch.randn(3000), torch.full((7,), value), torch.empty(0)]
    table = summarize(tensors, histogram="off")
    found, defined = outline(table), outline_by_numpy(table)
    assert (has_nonfinite, has_zero) == found[:2] == defined[:2]
    assert defined.square_sum == pytest.approx(found.square_sum, rel=1e-12)
