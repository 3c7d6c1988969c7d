"""Every optimizer step is counted once, alike on every rank, with what belongs to it."""

import gc
import itertools

import pytest
import torch
from torch import nn

from holter.records import Census, Phase, StepDone


def iterate(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def counted(worn) -> list[tuple[int, int]]:
    return [(observation.step, observation.body.micro_steps) for observation in worn.said(StepDone)]


def test_steps_of_one_optimizer_are_counted_from_zero(worn):
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        iterate(model, optimizer)
    assert [(0, 1), (1, 1), (2, 1)] == counted(worn)
    assert [0.5] * 3 == [observation.body.learning_rate for observation in worn.said(StepDone)]
    assert 3 == worn.reader.heartbeat().step


def test_two_optimizers_make_one_step_once_both_are_known(worn):
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    one, other = torch.optim.SGD([model.weight], lr=0.1), torch.optim.Adam([model.bias], lr=0.1)
    for _ in range(5):
        iterate(model, one, other)
    settled = counted(worn)[-4:]
    assert [1] * 4 == [micro_steps for _, micro_steps in settled]


def test_two_optimizers_make_one_step_from_the_first_round_on(worn):
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    one, other = torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)
    for _ in range(4):
        iterate(model, one, other)
    assert [(0, 1), (1, 1), (2, 1), (3, 1)] == counted(worn)


def test_an_optimizer_that_steps_twice_as_often_is_counted_the_same_each_round(worn):
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    often, seldom = torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)
    ends = []
    for _ in range(6):
        iterate(model, often)
        iterate(model, often)
        iterate(model, seldom)
        ends.append(len(counted(worn)))
    assert 1 == len({later - earlier for earlier, later in itertools.pairwise(ends[1:])})


def test_a_backward_pass_belongs_to_the_step_that_follows_it(worn):
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    often, seldom = torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)
    for _ in range(4):
        iterate(model, often)
        iterate(model, often)
        iterate(model, seldom)
    assert {1} == {micro_steps for _, micro_steps in counted(worn)}


def test_an_optimizer_that_replaces_another_is_counted_at_once(worn):
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    for _ in range(3):
        iterate(model, first)
    del first
    gc.collect()
    for _ in range(4):
        iterate(model, second)
    assert [1] * 7 == [micro_steps for _, micro_steps in counted(worn)]


def test_a_new_optimizer_for_every_step_leaves_nothing_behind(worn):
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    for _ in range(30):
        iterate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [1] * 30 == [micro_steps for _, micro_steps in counted(worn)]
    assert 2 > len(worn.monitor.steps._known)


def test_an_optimizer_that_calls_its_parents_step_makes_one_step(worn):
    class Verbose(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    plain, verbose = torch.optim.SGD(model.parameters(), lr=0.1), Verbose(model.parameters(), lr=0.1)
    for _ in range(3):
        iterate(model, verbose)
    del plain
    assert [(0, 1), (1, 1), (2, 1)] == counted(worn)


def test_accumulated_micro_steps_are_counted_and_their_loss_is_the_mean(worn):
    model = nn.Linear(4, 1, bias=False)
    worn.monitor.add_model(model)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        for factor in (1.0, 2.0, 3.0):
            model(torch.full((1, 4), factor)).sum().backward()
        optimizer.step()
    bodies = [observation.body for observation in worn.said(StepDone)]
    assert [3, 3] == [body.micro_steps for body in bodies]
    assert [8.0, 8.0] == [body.loss for body in bodies]
    # The gradient of the sum: 1 + 2 + 3 in each of four places.
    assert [12.0, 12.0] == [body.gradient_norm for body in bodies]


def test_the_micro_step_is_in_the_heartbeat(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    model(torch.ones(1, 4)).sum().backward()
    model(torch.ones(1, 4)).sum().backward()
    assert (0, 2) == (worn.reader.heartbeat().step, worn.reader.heartbeat().micro_step)


def test_a_closure_that_calls_backward_several_times_makes_one_step(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert 1 == len(counted(worn))
    assert 1 <= counted(worn)[0][1] <= 4


def test_the_census_is_not_told_at_every_step(worn):
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(40):
        iterate(model, optimizer)
    assert 1 == len(worn.said(Census))


class Failing(torch.optim.SGD):
    """Raises when it is told to."""

    is_out_of_memory = False

    def step(self, closure=None):
        if self.is_out_of_memory:
            raise MemoryError
        return super().step(closure)


def fail(worn, optimizer: Failing, closure=None) -> None:
    optimizer.is_out_of_memory = True
    with pytest.raises(MemoryError):
        optimizer.step(closure)
    optimizer.is_out_of_memory = False
    assert worn.monitor.is_torn()


def test_after_a_step_that_raised_and_was_given_up_the_next_is_seen(worn):
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    optimizer = Failing(model.parameters(), lr=0.1)
    iterate(model, optimizer)
    iterate(model)
    fail(worn, optimizer)
    iterate(model)
    assert not worn.monitor.is_torn()
    assert Phase.OPTIMIZER is not worn.reader.heartbeat().phase
    optimizer.step()
    iterate(model, optimizer)
    assert [(0, 1), (1, 2), (2, 1)] == counted(worn)


@pytest.mark.parametrize("has_closure", [False, True])
def test_a_step_that_raised_and_is_tried_again_is_one_step(worn, has_closure):
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    optimizer = Failing(model.parameters(), lr=0.1)
    # Both its own step and its parent's are hooked from now on.
    torch.optim.SGD(model.parameters())
    for _ in range(3):
        iterate(model)
        closure = (lambda: 0.0) if has_closure else None
        fail(worn, optimizer, closure)
        fail(worn, optimizer, closure)
        optimizer.step(closure)
        assert not worn.monitor.is_torn()
    assert [(0, 1), (1, 1), (2, 1)] == counted(worn)


def test_another_optimizer_may_follow_one_that_raised(worn):
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    failing, other = Failing(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters(), lr=0.1)
    iterate(model)
    fail(worn, failing)
    other.step()
    iterate(model, other)
    assert [(0, 1), (1, 1)] == counted(worn)
    assert not worn.monitor.is_torn()


def test_an_inner_step_that_raised_does_not_keep_a_frameworks_step_open(worn):
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    optimizer, steps = Failing(model.parameters(), lr=0.1), worn.monitor.steps
    for _ in range(2):
        iterate(model)
        steps.begin(optimizer)
        fail(worn, optimizer)
        steps.end(optimizer)
        assert not worn.monitor.is_torn()
    assert [(0, 1), (1, 1)] == counted(worn)
