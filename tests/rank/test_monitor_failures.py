"""Whatever a reading does, the step is told: the counter, the heartbeat and StepDone go on, and what cannot be read is said once."""

import pytest
import torch
from torch import nn

from holter.rank.readings import batches, checkup
from holter.rank.readings.fused_pass import Readings
from holter.records import Census, StepDone, Vitals

NUM_STEPS = 6
WHEN = {"first": [0], "middle": [3], "always": range(10_000)}
TIMES = ["always", *(pytest.param(when, marks=pytest.mark.release) for when in ("first", "middle"))]
PLACES = [
    "_gradients.read_local",
    "_gradients.read_applied",
    "_gradients.follow_order",
    "_gradients.unfollow_order",
    "_comparison.is_due",
    "_comparison.is_possible",
    "_comparison.parameters",
    "_comparison.gradients",
    "_comparison.reduced_gradients",
    "_comparison.frozen",
    "_comparison.hyperparameters",
    "_comparison.buffers",
    "_comparison.optimizer_state",
    "_vitals.begin_backward",
    "_vitals.glance",
    "_vitals.before_step",
    "_vitals.after_step",
    "_batches.see_call",
    "_batches.begin_backward",
    "_batches.observe",
    "_data.trained",
    "_components.look",
    "_inspection.begin",
    "_inspection.end",
    "_regions.begin",
    "_regions.end",
    "_calls.find_wrapped",
    "_losses._read",
    "steps._reporter.tell_census",
    "steps._reporter.heed_sidecar",
    "steps._learn_optimizer",
    "context.models.refresh",
    "context.models.note_call",
    "context.models.has_thawed",
    "context.schedule.observe",
    "context.readings.read",
    "context.readings.poll",
    "context.undo.rewind.forward_begins",
    "context.undo.rewind.backward_begins",
    "context.undo.rewind.step_closed",
]


def broken(original, turns):
    calls = iter(range(1_000_000))

    def call(*args, **kwargs):
        if next(calls) in turns:
            raise RuntimeError("cannot be read here")
        return original(*args, **kwargs)

    call.__qualname__ = original.__qualname__
    return call


def train(model: nn.Module, num_steps: int = NUM_STEPS) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def assert_told(worn, num_steps: int = NUM_STEPS) -> None:
    assert list(range(num_steps)) == [observation.step for observation in worn.said(StepDone)]
    assert [1] * num_steps == [observation.body.micro_steps for observation in worn.said(StepDone)]
    assert (num_steps, 0) == (worn.reader.heartbeat().step, worn.reader.heartbeat().micro_step)


@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("place", PLACES)
def test_the_step_is_told_although_this_raises(wear, capsys, monkeypatch, place, when):
    worn = wear()
    *path, name = place.split(".")
    owner = worn.monitor
    for part in path:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, name, broken(getattr(owner, name), WHEN[when]), raising=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    worn.monitor.add_model(model)
    train(model)
    assert_told(worn)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(set(said))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (checkup, "grouped_by_module"),
        (checkup, "Samples"),
        (checkup, "prints"),
        (batches, "sign"),
        (batches, "capture"),
    ],
)
def test_the_step_is_told_although_a_part_of_a_reading_raises(wear, monkeypatch, module, name):
    worn = wear()
    monkeypatch.setattr(module, name, broken(getattr(module, name), WHEN["always"]))
    model = nn.Linear(4, 4)
    worn.monitor.add_model(model)
    train(model)
    assert_told(worn)


def test_what_cannot_be_read_is_said_once_with_the_reason(wear, capsys):
    worn = wear()

    def no_pass(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    worn.monitor.context.readings = Readings(no_pass)
    model = nn.Linear(4, 4)
    worn.monitor.add_model(model)
    train(model)
    assert_told(worn)
    said = capsys.readouterr().err.splitlines()
    assert 1 == sum("reading gradient" in line and "Failed to find C compiler" in line for line in said)
    assert NUM_STEPS == worn.monitor.context.guard.failures["reading gradient"]


def test_a_rank_that_could_not_read_its_gradients_does_not_claim_to_have_seen_them(wear, monkeypatch):
    worn = wear()
    model = nn.Linear(4, 4)
    worn.monitor.add_model(model)
    readings = worn.monitor.context.readings
    monkeypatch.setattr(readings, "read", broken(readings.read, WHEN["always"]))
    model(torch.ones(2, 4)).sum().backward()
    gradients = worn.monitor.context.log.now.gradients
    assert (False, False) == (gradients.is_local_read, gradients.is_local_whole)


def test_an_answer_that_cannot_be_used_does_not_lose_the_others(wear, monkeypatch):
    worn = wear()
    worn.answer_late()
    model = nn.Linear(4, 4)
    worn.monitor.add_model(model)
    gradients = worn.monitor._gradients
    monkeypatch.setattr(gradients, "_sum_of_shares", broken(gradients._sum_of_shares, WHEN["always"]))
    train(model, 12)
    told = [observation.step for observation in worn.said(StepDone)]
    assert list(range(len(told))) == told
    # Nothing is owed for ever: a few steps wait for their late answers, no more.
    assert len(told) > 8
    assert worn.said(Vitals)


def test_a_step_that_cannot_be_described_is_told_without_its_numbers(wear):
    worn = wear()
    model = nn.Linear(4, 4)
    worn.monitor.add_model(model)
    train(model, 2)
    worn.monitor.context.log.now.roots["gradients"] = 1 << 70
    train(model, 1)
    assert_told(worn, 3)


def test_a_census_whose_values_cannot_be_read_is_told_without_them(wear, monkeypatch):
    worn = wear()
    taker = worn.monitor.steps._reporter._census
    monkeypatch.setattr(taker, "_read_new", broken(taker._read_new, WHEN["always"]))
    model = nn.Linear(4, 4)
    worn.monitor.add_model(model)
    train(model)
    assert_told(worn)
    assert worn.said(Census)


class Agent:
    """A halt agent that is asked and releases at once."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.num_due = 0

    def is_wanted(self) -> bool:
        return True

    def is_due(self, _round: int) -> bool:
        self.num_due += 1
        return False

    def hold(self, step: int, _why: str, *, num_skipped: int) -> None:
        assert num_skipped == 0
        self.held.append(step)


@pytest.mark.parametrize("place", ["_finite.finds", "_finite.late", "_finite.is_scaled"])
def test_a_guard_that_raises_holds_nothing_and_a_halt_is_still_asked_for(wear, monkeypatch, place):
    worn = wear()
    agent = worn.monitor.context.hold.agent = Agent()
    owner, name = worn.monitor._finite, place.split(".")[1]
    monkeypatch.setattr(owner, name, broken(getattr(owner, name), WHEN["always"]))
    model = nn.Linear(4, 4)
    worn.monitor.add_model(model)
    train(model)
    assert_told(worn)
    assert ([], NUM_STEPS) == (agent.held, agent.num_due)


def test_a_held_step_is_told_after_all_that_came_before_it(wear):
    worn = wear()
    worn.monitor.context.hold.agent = Agent()
    model = nn.Linear(4, 4)
    worn.monitor.add_model(model)
    # Of the first step a device owes an answer for ever.
    worn.monitor.context.log.now.num_owed += 1
    train(model, 3)
    assert not worn.said(StepDone)
    worn.monitor.steps._hold("nonfinite")
    assert [0, 1, 2, 3] == [observation.step for observation in worn.said(StepDone)]
