"""Each value of the gradients is read once a step, and all who ask are given the same answer."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holter.rank.models import gradients_of, has_none
from holter.rank.readings.gradient_answers import GradientAnswers, GradientMark, are_plain
from holter.records import PackedTable, StepDone, Vitals
from holter_kernels.seen import is_sound


class Holding:
    """A halt agent that wants NaN to be held, and says when it was asked to."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def is_wanted(self) -> bool:
        return True

    def is_due(self, _round: int) -> bool:
        return False

    def hold(self, step: int, _why: str, *, num_skipped: int) -> None:
        assert num_skipped == 0
        self.held.append(step)


def counting(worn) -> Counter[str]:
    """What is read from now on that is as large as all gradients together."""
    readings, seen = worn.monitor.context.readings, Counter()
    original = readings.read

    def read(name, tensors, then, **settings):
        seen[name.rstrip("0123456789")] += 1
        return original(name, tensors, then, **settings)

    readings.read = read
    return seen


def train(model: nn.Module, optimizer: torch.optim.Optimizer, between=lambda: None) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    between()
    optimizer.step()


def of_gradients(seen: Counter[str]) -> dict[str, int]:
    names = ("gradient", "gradients", "gradients_reduced", "applied", "reduced_gradient")
    return {name: seen[name] for name in names if seen[name]}


def test_a_rank_that_is_alone_reads_its_gradients_once(wear):
    worn = wear()
    worn.monitor.context.hold.agent = Holding()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = counting(worn)
    for _ in range(4):
        train(model, optimizer)
    assert {"gradient": 4} == of_gradients(seen)
    assert 4 == len(worn.said(StepDone))


@pytest.mark.usefixtures("gloo")
def test_replicas_read_their_own_the_reduced_and_the_applied_gradients_once_each(wear):
    worn = wear(world_size=2)
    worn.monitor.context.hold.agent = Holding()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    seen = counting(worn)
    for _ in range(4):
        train(model, optimizer)
    assert {"gradient": 4, "gradients_reduced": 4, "applied": 4} == of_gradients(seen)
    classes = Counter(o.body.tensor_class for o in worn.said(PackedTable))
    assert 5 == classes["gradients"] == classes["gradients_reduced"] == classes["parameters_after"]
    assert worn.said(Vitals)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.grad.mul_(torch.nan),
        lambda p: setattr(p, "grad", p.grad * torch.nan),
        lambda p: p.grad.view(-1)[:1].fill_(torch.inf),
        lambda p: torch._foreach_mul_([p.grad], torch.nan),
    ],
)
def test_a_gradient_that_was_written_to_since_is_read_again(wear, change):
    worn = wear()
    agent = worn.monitor.context.hold.agent = Holding()
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    train(model, optimizer, lambda: torch.no_grad()(change)(model.weight))
    assert [1] == agent.held


@pytest.mark.usefixtures("gloo")
def test_what_a_collective_wrote_is_read_again(wear):
    worn = wear()
    context = worn.monitor.context
    gradient, tables = torch.ones(4), []
    answers = GradientAnswers()
    answers.read(context, "applied", [gradient], tables.append)
    answers.read(context, "applied", [gradient], tables.append)
    assert tables[0] is tables[1]
    dist.all_reduce(gradient)
    answers.read(context, "applied", [gradient], tables.append)
    assert tables[2] is not tables[0]


def test_a_part_of_what_was_read_is_answered_in_the_order_of_those_who_ask(wear):
    context, answers = wear().monitor.context, GradientAnswers()
    first, second, third = (torch.full((n,), float(n)) for n in (1, 2, 3))
    tables = []
    answers.read(context, "all", [first, second, third], tables.append)
    answers.read(context, "some", [third, first], tables.append)
    assert [3.0 * 3, 1.0] == tables[1].sum.tolist()
    assert [3, 1] == tables[1].numel.tolist()


def test_an_answer_that_a_device_owes_is_shared_and_the_step_waits_for_it_once_for_each(wear):
    worn = wear()
    worn.answer_late()
    context, answers, tables = worn.monitor.context, GradientAnswers(), []
    step, gradient = context.log.now, torch.ones(4)
    for _ in range(3):
        answers.read(context, "applied", [gradient], tables.append, step=step)
    assert (3, []) == (step.num_owed, tables)
    for _ in range(8):
        context.readings.poll()
    assert (0, 3) == (step.num_owed, len(tables))


def test_a_reading_without_a_histogram_does_not_answer_for_one_with_it(wear):
    context, answers, tables = wear().monitor.context, GradientAnswers(), []
    gradient = torch.ones(4)
    answers.read(context, "applied", [gradient], tables.append)
    answers.read(context, "vitals", [gradient], tables.append, histogram="sampled")
    answers.read(context, "applied", [gradient], tables.append)
    assert tables[1].histogram is not None
    assert tables[1] is tables[2]


def test_parts_of_dtensors_are_not_told_apart_by_their_versions():
    class Wrapped(torch.Tensor):
        pass

    assert GradientMark.of([torch.ones(2).as_subclass(Wrapped)]) is None


def parameters() -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(2, 3) * k) for k in range(3)]
    for each in made:
        each.grad = each.detach() + 1
    return made


@pytest.mark.skipif(not is_sound(), reason="without native code each tensor is asked in Python")
def test_no_object_is_made_for_a_gradient_that_nobody_looks_at():
    seen = gradients_of(parameters())
    assert are_plain(seen)
    assert not has_none(seen)
    assert GradientMark.of(seen) == GradientMark.of(seen)
    assert seen._tensors is None


def test_what_was_seen_and_what_was_asked_in_python_are_one_mark():
    owners = parameters()
    assert GradientMark.of([each.grad for each in owners]) == GradientMark.of(gradients_of(owners))


def test_an_optimizer_in_another_order_gets_each_parameters_row(worn):
    owners, answers, given = parameters(), GradientAnswers(), []
    for turn in range(3):
        owners[turn].grad.mul_(2)
        answers.clear()
        answers.read(worn.monitor.context, "all", gradients_of(owners), lambda _: None)
        answers.read(worn.monitor.context, "some", gradients_of([owners[2], owners[0]]), given.append)
        assert [float(each.grad.sum()) for each in (owners[2], owners[0])] == given[-1].sum.tolist()
        owners.reverse()
