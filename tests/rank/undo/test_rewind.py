"""A step that is not applied is undone: random states and buffers of its beginning come back, or it is said that nobody knows them."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from holter.errors import RewindError
from holter.rank.undo.rewind import Rewound, decode


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """What one test has compiled is none of another's."""
    yield
    torch._dynamo.reset()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


class Own(nn.Module):
    """A model with a class of its own: torch.compile calls its hooks outside of what it compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = net()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.parts(inputs)


def wrapped(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def inside(model: nn.Module) -> nn.Module:
    return nn.Sequential(torch.compile(model, backend="eager"))


def twice(model: nn.Module) -> nn.Module:
    return torch.compile(inside(model), backend="eager", fullgraph=True)


class Training:
    """A loop that may be stopped after any backward pass."""

    def __init__(self, worn, model: nn.Module, called: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        # A compiled model may have no truth value.
        self.model, self.called, self._worn = model, model if called is None else called, worn
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.loader = torch.utils.data.DataLoader(torch.randn(512, 4), batch_size=8)

    def compute(self, inputs: torch.Tensor) -> None:
        self.called(inputs).sum().backward()

    def steps(self, number: int) -> None:
        for _, inputs in zip(range(number), self.loader, strict=False):
            self.compute(inputs)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(buffer.clone() for buffer in self.model.buffers())]

    def restore(self) -> None:
        context = self._worn.monitor.context
        context.undo.rewind.restore(context.log.step)


def assert_undone(training: Training) -> None:
    before = training.state()
    training.compute(torch.ones(8, 4))
    assert not all(map(torch.equal, before, training.state()))
    training.restore()
    assert all(map(torch.equal, before, training.state()))


@pytest.mark.slow
@pytest.mark.parametrize("make", [net, Own])
@pytest.mark.parametrize("compiled", [nn.Sequential, wrapped, in_place, inside, twice])
def test_buffers_of_a_compiled_model_come_back(worn, make, compiled):
    model = make()
    training = Training(worn, model, compiled(model))
    training.steps(4)
    assert_undone(training)


def test_a_wrapper_from_before_we_came_is_found(wear):
    model = net()
    called = wrapped(model)
    training = Training(wear(), model, called)
    training.steps(2)
    # Only who sees the call itself knows that this belongs to the step before.
    model[1].running_mean.add_(1)
    assert_undone(training)


def test_a_model_that_is_never_called_as_a_whole_is_undone_all_the_same(worn):
    model = net()
    training = Training(worn, model, lambda inputs: model[3](model[2](model[1](model[0](inputs)))))
    training.steps(3)
    assert_undone(training)


def test_between_several_micro_batches_of_an_unseen_model_the_first_counts(worn):
    model = net()
    training = Training(worn, model, lambda inputs: model[3](model[1](model[0](inputs))))
    training.steps(3)
    batches = iter(training.loader)
    next(batches)
    before = training.state()[1:]
    for _ in range(2):
        training.compute(next(batches))
    training.restore()
    assert all(map(torch.equal, before, training.state()[1:]))


def test_in_the_first_step_it_is_not_known_what_an_unseen_model_held(worn):
    model = net()
    training = Training(worn, model, lambda inputs: model[3](model[1](model[0](inputs))))
    training.steps(0)
    training.compute(torch.ones(8, 4))
    with pytest.raises(RewindError, match=r"it is not known what the buffer 1\.running_mean was|nothing was seen"):
        training.restore()


def test_a_moment_at_which_nothing_can_be_copied_is_no_healthy_one(worn):
    training = Training(worn, net())
    worn.monitor.add_model(training.model)
    training.steps(2)
    with FlopCounterMode(display=False):
        training.compute(torch.ones(8, 4))
    with pytest.raises(RewindError, match=r"the buffer 1\.running_mean was when the step began, and it moves"):
        training.restore()


def test_where_nothing_was_copied_and_nothing_has_moved_nothing_is_missing(worn):
    training = Training(worn, nn.Linear(4, 1))
    training.model.register_buffer("mask", torch.ones(4))
    worn.monitor.add_model(training.model)
    training.steps(2)
    before = training.state()
    with FlopCounterMode(display=False):
        training.compute(torch.ones(8, 4))
    training.restore()
    assert all(map(torch.equal, before, training.state()))


@pytest.mark.parametrize("num_micro", [1, 2])
def test_after_a_step_that_a_scaler_skipped_what_follows_is_undone_and_no_more(worn, num_micro):
    training, scaler = Training(worn, net()), torch.amp.GradScaler("cpu", init_scale=4.0)
    worn.monitor.add_model(training.model)
    batches, log = iter(training.loader), worn.monitor.context.log
    for turn in range(6):
        before = training.state()
        for _ in range(num_micro):
            inputs = next(batches) + torch.rand(1)
            loss = training.called(inputs).sum() * (torch.inf if turn in (3, 4) else 1.0)
            scaler.scale(loss).backward()
        if turn == 5:
            break
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
    assert (3, num_micro, 2) == (log.step, log.num_backwards, log.now.passes.num_skipped_rounds)
    training.restore()
    assert all(map(torch.equal, before, training.state()))


def test_of_two_optimizers_a_scaler_may_skip_one(worn):
    training, scaler = Training(worn, net()), torch.amp.GradScaler("cpu", init_scale=4.0)
    worn.monitor.add_model(training.model)
    one, other = (torch.optim.SGD(training.model[at].parameters(), lr=0.01) for at in (0, 3))
    for turn in range(5):
        inputs = torch.randn(8, 4)
        before = training.state()
        scaler.scale(training.called(inputs).sum()).backward()
        if turn == 3:
            training.model[3].weight.grad.fill_(torch.inf)
        if turn == 4:
            break
        for optimizer in (one, other):
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    assert (4, 1) == (worn.monitor.context.log.step, worn.monitor.context.log.num_backwards)
    training.restore()
    assert all(map(torch.equal, before, training.state()))


def shown(worn) -> Rewound:
    """How the last step began, as the sidecar finds it on the page."""
    return decode(worn.reader.rewinds()[-1][1])


@pytest.mark.usefixtures("gloo")
def test_until_all_have_them_the_first_rank_shows_the_buffers_that_it_gives(wear):
    worn = wear(world_size=1)
    worn.monitor.context.undo.rewind._is_giving = True
    model = nn.parallel.DistributedDataParallel(net())
    training = Training(worn, model)
    training.steps(2)
    running_mean = model.module[1].running_mean
    (found,) = (value for name, value in shown(worn).given.items() if name.endswith("running_mean"))
    assert torch.equal(running_mean, torch.frombuffer(bytearray(found), dtype=torch.float32))
    training.compute(torch.randn(8, 4))
    assert {} == shown(worn).given


@pytest.mark.usefixtures("gloo")
def test_what_does_not_fit_the_page_leaves_the_random_states_there(wear):
    worn = wear(world_size=1)
    worn.monitor.context.undo.rewind._is_giving = True
    training = Training(
        worn, nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8000), nn.BatchNorm1d(8000)))
    )
    training.steps(2)
    assert ({}, 2) == (shown(worn).given, shown(worn).step)


def test_what_the_page_shows_is_true_whether_or_not_something_was_drawn(worn):
    training = Training(worn, nn.Linear(4, 1))
    for is_drawing in (False, True, False, True):
        training.steps(2)
        drawn_at = torch.get_rng_state()
        if is_drawing:
            torch.rand(3)
        at_forward = torch.get_rng_state()
        training.compute(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
        told = shown(worn)
        assert worn.monitor.context.log.step == told.step
        assert torch.equal(drawn_at, told.torch_state)
        assert torch.equal(at_forward, told.at_forward.torch_state)
        training.optimizer.step()
        training.optimizer.zero_grad()
        assert worn.monitor.context.log.step == shown(worn).step
        assert torch.equal(torch.get_rng_state(), shown(worn).torch_state)
