"""Phases: told with the step, and visible in the heartbeat while they last. Passes over loaders, and what a step was fed."""

import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from holter.records import Feed, Phase, StepDone


def test_every_phase_is_told_and_shown_while_it_lasts(worn):
    shown: dict[str, Phase] = {}

    def look(name: str) -> None:
        shown[name] = worn.reader.heartbeat().phase

    class Data(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            look("data")
            return torch.ones(4) * index

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            look("forward" if self.training else "evaluation")
            return self.linear(values)

    class File(io.BytesIO):
        def write(self, content) -> int:
            look("checkpoint")
            return super().write(content)

    model = Model()
    worn.monitor.add_model(model)
    model.linear.weight.register_hook(lambda _: look("backward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: look("optimizer"))
    for _ in range(2):
        for batch in DataLoader(Data(), batch_size=2):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            look("other")
        torch.save(model.state_dict(), File())
        model.eval()
        model(torch.ones(1, 4))
        model.train()
    assert {name: Phase[name.upper()] for name in shown} == shown
    assert {"data", "forward", "backward", "optimizer", "evaluation", "checkpoint", "other"} == set(shown)
    told = set().union(*(o.body.phase_seconds for o in worn.said(StepDone)))
    assert {"data", "forward", "backward", "optimizer", "evaluation", "checkpoint", "other"} <= told


@pytest.mark.parametrize("is_persistent", [False, True])
def test_workers_start_in_the_data_phase(worn, is_persistent):
    """Each pass over a loader starts or resets its workers before the first `next`."""
    shown: list[Phase] = []

    class Sampler(torch.utils.data.Sampler):
        def __len__(self) -> int:
            return 2

        def __iter__(self):
            shown.append(worn.reader.heartbeat().phase)
            return iter([0, 1])

    data = TensorDataset(torch.ones(2, 4))
    loader = DataLoader(data, sampler=Sampler(), num_workers=1, persistent_workers=is_persistent)
    for _ in range(2):
        before = worn.reader.heartbeat()
        iterator = iter(loader)
        assert [Phase.DATA] == shown
        assert (before.phase if before else Phase.ATTACH) == worn.reader.heartbeat().phase
        shown.clear()
        assert 2 == len(list(iterator))
        shown.clear()


def test_the_phases_of_a_step_add_up_to_its_seconds(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    for observation in worn.said(StepDone)[1:]:
        # Clocks are read at slightly other moments: a hook's length, generously.
        assert abs(observation.body.seconds - sum(observation.body.phase_seconds.values())) < 0.05


def test_an_exception_in_forward_ends_the_phase(worn):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            raise LookupError(values.shape)

    model = Model()
    worn.monitor.add_model(model)
    with pytest.raises(LookupError):
        model(torch.ones(1, 4))
    assert Phase.OTHER is worn.reader.heartbeat().phase


def test_workers_of_a_loader_write_nothing(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader([torch.ones(4)] * 6, batch_size=2, num_workers=1, persistent_workers=True):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    assert [0, 1, 2] == [observation.step for observation in worn.said(StepDone)]
    assert 0 == worn.page.dropped


def pairs(size: int = 12) -> TensorDataset:
    return TensorDataset(torch.arange(size * 4.0).reshape(size, 4), torch.arange(size))


class Loop:
    """A script's own loop."""

    def __init__(self, worn) -> None:
        self.model = nn.Linear(4, 1)
        worn.monitor.add_model(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def step(self, *inputs: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        for x in inputs:
            self.model(x).sum().backward()
        self.optimizer.step()


def feeds(worn) -> list[Feed]:
    return [observation.body for observation in worn.said(Feed)]


def test_a_pass_is_told_twice_and_its_length_long_before_its_end(worn):
    loop = Loop(worn)
    for x, _ in DataLoader(pairs(), batch_size=5):
        loop.step(x)
    begin, end = worn.said(Feed)
    assert (0, 3) == (begin.step, end.step)
    assert (False, True) == (begin.body.is_end, end.body.is_end)
    assert begin.body.is_training
    assert (3, 1) == (begin.body.num_batches, begin.body.num_taken)
    assert (3, 12, 12) == (end.body.num_taken, end.body.num_samples, end.body.dataset_size)


def test_from_the_second_pass_on_the_beginning_is_told_at_once(worn):
    loop, loader = Loop(worn), DataLoader(pairs(), batch_size=6)
    for _ in range(2):
        for x, _ in loader:
            loop.step(x)
    told = [(f.epoch, f.is_end, f.num_taken, f.is_training) for f in feeds(worn)]
    assert [(0, False, 1, True), (0, True, 2, True), (1, False, 0, True), (1, True, 2, True)] == told


def test_the_order_of_a_pass_is_known_at_its_end(worn):
    loop = Loop(worn)
    fixed, shuffled = DataLoader(pairs(), batch_size=2), DataLoader(pairs(), batch_size=2, shuffle=True)
    for loader in (fixed, fixed, shuffled, shuffled):
        for x, _ in loader:
            loop.step(x)
    orders = [f.order for f in feeds(worn) if f.is_end]
    assert orders[0] == orders[1] != 0
    assert orders[2] != orders[3]
    assert {0} == {f.order for f in feeds(worn) if not f.is_end}


def test_a_loader_of_evaluation_is_never_one_of_training(worn):
    loop, train, valid = Loop(worn), DataLoader(pairs(), batch_size=4), DataLoader(pairs(8), batch_size=4)
    for _ in range(3):
        for number, (x, _) in enumerate(train):
            loop.step(x)
            if number == 1:
                loop.model.eval()
                for y, _ in valid:
                    loop.model(y)
                loop.model.train()
    assert {0: True, 1: False} == {f.loader: f.is_training for f in feeds(worn)}
    assert [0, 1, 2] == [f.epoch for f in feeds(worn) if f.loader == 1 and f.is_end]


def test_loaders_that_are_read_together_are_both_of_training(worn):
    loop = Loop(worn)
    for (x, _), (y, _) in zip(DataLoader(pairs(), batch_size=2), DataLoader(pairs(), batch_size=2), strict=True):
        loop.step(x + y)
    assert {0: True, 1: True} == {f.loader: f.is_training for f in feeds(worn)}


def test_a_pass_that_is_broken_off_has_no_end(worn):
    loop, loader = Loop(worn), DataLoader(pairs(), batch_size=2)
    for _ in range(2):
        loop.step(next(iter(loader))[0])
    assert [(0, False), (1, False)] == [(f.epoch, f.is_end) for f in feeds(worn)]


def test_a_script_that_begins_a_pass_for_every_batch_is_not_told_for_ever(worn):
    loop, loader = Loop(worn), DataLoader(pairs(), batch_size=2)
    for _ in range(100):
        loop.step(next(iter(loader))[0])
    assert len(feeds(worn)) < 40


def test_workers_that_persist_begin_a_new_pass_each_time(worn):
    loop = Loop(worn)
    loader = DataLoader(pairs(), batch_size=6, num_workers=1, persistent_workers=True)
    for _ in range(2):
        for x, _ in loader:
            loop.step(x)
    assert [(0, False), (0, True), (1, False), (1, True)] == [(f.epoch, f.is_end) for f in feeds(worn)]
    assert [2, 2] == [f.num_taken for f in feeds(worn) if f.is_end]


def test_accelerates_loader_is_one_pass_with_the_length_of_this_rank(worn):
    from accelerate.data_loader import prepare_data_loader  # noqa: PLC0415

    loop = Loop(worn)
    loader = prepare_data_loader(
        DataLoader(pairs(), batch_size=2), num_processes=2, process_index=1, put_on_device=False
    )
    for _ in range(2):
        for x, _ in loader:
            loop.step(x)
    told = feeds(worn)
    assert [(0, False), (0, True), (1, False), (1, True)] == [(f.epoch, f.is_end) for f in told]
    assert {(3, 2, 0)} == {(f.num_batches, f.num_shards, f.loader) for f in told}
    assert [3, 3] == [f.num_taken for f in told if f.is_end]
    assert all(f.is_training for f in told)


def test_every_step_says_what_it_was_fed(worn):
    loop = Loop(worn)
    for _ in range(2):
        for x, _ in DataLoader(pairs(), batch_size=4):
            loop.step(x)
    signatures = [observation.body.batch for observation in worn.said(StepDone)]
    assert signatures[:3] == signatures[3:]
    assert 3 == len(set(signatures) - {0})


def test_one_batch_at_most_is_held(worn):
    for _ in DataLoader(pairs(), batch_size=2):
        pass
    assert [0, 0, 0, 0, 0, 2] == [len(taken.leaves) for taken in worn.monitor._data._recent]


def test_without_a_loader_the_models_inputs_are_signed(worn):
    loop, one, two = Loop(worn), torch.rand(2, 4), torch.rand(2, 4)
    for inputs in ((one,), (two,), (one,), (one, two), (two, one)):
        loop.step(*inputs)
    signatures = [observation.body.batch for observation in worn.said(StepDone)]
    assert signatures[0] == signatures[2]
    assert 4 == len(set(signatures) - {0})


def test_statistics_are_of_the_loaders_batch_labels_included(worn):
    loop = Loop(worn)
    for x, _ in DataLoader(pairs(), batch_size=4):
        loop.step(x)
    numbers = worn.said(StepDone)[1].body.numbers
    assert (4.0, 7.0) == (numbers["batch.batch[1].min"], numbers["batch.batch[1].max"])
    assert (16.0, 31.0, 0.0) == tuple(numbers[f"batch.batch[0].{what}"] for what in ("min", "absmax", "is_constant"))
    assert 4.0 == numbers["batch.num_samples"]


def test_a_loader_that_is_a_batch_ahead_does_not_add_samples(worn):
    loop, ahead = Loop(worn), iter(DataLoader(pairs(), batch_size=4))
    x, _ = next(ahead)
    for following, _ in ahead:
        loop.step(x)
        x = following
    assert [4.0, 4.0] == [o.body.numbers["batch.num_samples"] for o in worn.said(StepDone)]


def test_samples_are_counted_over_the_micro_steps(worn):
    loop = Loop(worn)
    loop.step(torch.ones(2, 4), torch.ones(3, 4))
    (done,) = (observation.body for observation in worn.said(StepDone))
    assert 5.0 == done.numbers["batch.num_samples"]
    assert 1.0 == done.numbers["batch.input.is_constant"]


def test_inside_ddps_join_no_length_is_told(worn, monkeypatch):
    loop = Loop(worn)
    monkeypatch.setattr("holter.rank.hooks.data.DataProbe._is_joined", lambda _: True)
    for x, _ in DataLoader(pairs(), batch_size=6):
        loop.step(x)
    assert {feed.num_batches for feed in feeds(worn)} == {0}
