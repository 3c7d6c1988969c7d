"""What a script gives its model, and from which file it came."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from holter.rank.hooks.loads import MAX_FILES
from holter.records import Loaded


def step(worn, model: nn.Module) -> list[Loaded]:
    worn.monitor.add_model(model)
    model(torch.randn(4, 8)).sum().backward()
    return [observation.body for observation in worn.said(Loaded)]


def made() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))


def test_a_state_that_a_model_is_given_is_told_with_its_file(worn, tmp_path):
    path = tmp_path / "stage_1.pt"
    torch.save({"model": made().state_dict(), "step": 7}, path)
    model = made()
    model.load_state_dict(torch.load(path)["model"])
    (told,) = step(worn, model)
    assert ([str(path)], 8 * 8 + 8 + 8 * 2 + 2) == (told.files, told.num_elements)


def test_weights_that_are_copied_by_name_are_told_too(worn, tmp_path):
    path = tmp_path / "shard0.pt"
    torch.save(made().state_dict(), path)
    model, state = made(), torch.load(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
    assert [[str(path)]] == [told.files for told in step(worn, model)]


def test_a_file_of_something_else_is_not_told(worn, tmp_path):
    torch.save({"images": torch.zeros(10, 8)}, tmp_path / "data.pt")
    torch.load(tmp_path / "data.pt")
    assert [] == step(worn, made())


def test_a_state_without_a_file_is_told_as_that(worn):
    model = made()
    model.load_state_dict(made().state_dict())
    assert [[]] == [told.files for told in step(worn, model)]


class Lazy(Mapping):
    """Reads a file for each value that it is asked for, as some libraries' do."""

    def __init__(self, state) -> None:
        self.state, self.read = state, []

    def __getitem__(self, name):
        self.read.append(name)
        return self.state[name]

    def __iter__(self):
        return iter(self.state)

    def __len__(self):
        return len(self.state)


@pytest.mark.usefixtures("worn")
def test_a_state_that_is_read_when_it_is_asked_for_is_not_read_twice():
    model, state = made(), Lazy(made().state_dict())
    model.load_state_dict(state)
    assert sorted(state.state) == sorted(state.read)


class Opened(dict):
    """Counts how many of them are gone through."""

    num = 0

    def items(self):
        Opened.num += 1
        return super().items()

    def values(self):
        Opened.num += 1
        return super().values()


def test_data_of_many_parts_is_not_gone_through_whole(worn, monkeypatch):
    monkeypatch.setattr("holter.rank.hooks.loads.MAX_ENTRIES", 100)
    monkeypatch.setattr(Opened, "num", 0)
    words = {number: Opened.fromkeys(range(10), 1) for number in range(200)}
    worn.monitor._loads._note_read("words.pt", words)
    assert 0 < Opened.num <= 2 * 10


def test_of_many_files_the_last_are_kept(worn, tmp_path):
    model, loads = made(), worn.monitor._loads
    for number in range(MAX_FILES + 2):
        torch.save(made().state_dict(), tmp_path / f"{number}.pt")
        model.load_state_dict(torch.load(tmp_path / f"{number}.pt"))
    assert MAX_FILES == len(loads._files)
    assert str(tmp_path / f"{MAX_FILES + 1}.pt") == step(worn, model)[0].files[-1]


def test_memory_that_is_used_again_is_not_the_files_any_more(worn):
    memory, model = bytearray(4 * 8 * 8), made()
    data = torch.frombuffer(memory, dtype=torch.float32)
    worn.monitor._loads._note_read("data.pt", data)
    del data
    model.load_state_dict(made().state_dict() | {"0.weight": torch.frombuffer(memory, dtype=torch.float32).view(8, 8)})
    assert [[]] == [told.files for told in step(worn, model)]
