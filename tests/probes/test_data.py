"""Phases: told with the step, and visible in the heartbeat while they last."""

import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from holter.records import Phase, StepDone


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
