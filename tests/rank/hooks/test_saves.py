"""Saves and evaluations, by whatever library, are seen as such from outside."""

import copy
import sys
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict_saver

from holter.frameworks.all import ALL
from holter.records import Phase, SaveFinished


class Spy:
    """Whether each beat said that this phase runs."""

    def __init__(self, worn) -> None:
        self.seen: list[Phase] = []
        page = worn.monitor.context.writer.page
        beat = page.beat

        def heard(step: int, phase: Phase, micro_step: int, now_ns: int) -> None:
            self.seen.append(phase)
            beat(step, phase, micro_step, now_ns)

        page.beat = heard


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@pytest.fixture
def model(worn) -> nn.Module:
    made = nn.Linear(4, 1)
    worn.monitor.add_model(made)
    train(made)
    return made


def test_torch_save_is_a_checkpoint(worn, model, tmp_path):
    spy = Spy(worn)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert [Phase.CHECKPOINT, Phase.OTHER] == spy.seen


@pytest.mark.usefixtures("gloo")
def test_a_distributed_checkpoint_is_one_from_beginning_to_end(worn, model, tmp_path):
    by_name = state_dict_saver.__dict__["save"].__wrapped__
    spy = Spy(worn)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "one")
    assert (Phase.CHECKPOINT, Phase.OTHER) == (spy.seen[0], spy.seen[-1])
    assert {Phase.CHECKPOINT} == set(spy.seen[:-1])
    assert (tmp_path / "one" / ".metadata").exists()
    # One who had the function before we came.
    spy.seen.clear()
    by_name(model.state_dict(), checkpoint_id=tmp_path / "two")
    assert Phase.CHECKPOINT in spy.seen
    assert Phase.OTHER == spy.seen[-1]


@pytest.fixture
def library() -> Iterator[ModuleType]:
    """What a script may import after the monitor was put on."""
    made = ModuleType("accelerate.accelerator")

    class Accelerator:
        def save_state(self, where: str, *, fail: bool = False) -> str:
            if fail:
                raise OSError("disk full")
            return where

    made.Accelerator = Accelerator
    with mock.patch.dict(sys.modules):
        sys.modules.pop("accelerate.accelerator", None)
        yield made


def test_a_library_that_is_imported_later_is_followed_from_the_next_backward_on(wear, library):
    worn = wear()
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    train(model)
    original = library.Accelerator.save_state
    sys.modules["accelerate.accelerator"] = library
    train(model)
    spy = Spy(worn)
    assert "here" == library.Accelerator().save_state("here")
    assert [Phase.CHECKPOINT, Phase.OTHER] == spy.seen
    with pytest.raises(OSError, match="disk full"):
        library.Accelerator().save_state("here", fail=True)
    assert [Phase.CHECKPOINT, Phase.OTHER] * 2 == spy.seen
    worn.monitor.context.patches.restore()
    assert library.Accelerator.save_state is original
    assert not worn.monitor.context.guard.failures


@pytest.mark.slow
def test_the_functions_that_we_follow_are_there(worn, model):
    import accelerate.accelerator  # noqa: F401, PLC0415
    import safetensors.torch  # noqa: F401, PLC0415
    import transformers.modeling_utils  # noqa: PLC0415
    import transformers.trainer  # noqa: F401, PLC0415

    train(model)
    left = {function.module.partition(".")[0] for function in worn.monitor._saves._awaited._waiting}
    assert not left & {"torch", "accelerate", "safetensors", "transformers"}


@pytest.mark.slow
def test_a_state_saved_by_accelerate_is_a_checkpoint_all_along(worn, tmp_path):
    from accelerate import Accelerator  # noqa: PLC0415
    from accelerate.state import AcceleratorState, PartialState  # noqa: PLC0415

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    worn.monitor.add_model(model)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    spy = Spy(worn)
    accelerator.save_state(str(tmp_path / "state"))
    assert {Phase.CHECKPOINT} == set(spy.seen[:-1])
    assert Phase.CHECKPOINT != spy.seen[-1]
    assert list((tmp_path / "state").glob("*.safetensors"))
    assert [(1, str(tmp_path / "state"), "accelerate")] == kept(worn)
    AcceleratorState._reset_state()
    PartialState._reset_state()


def test_a_finished_checkpoint_is_told_with_its_place_and_the_steps_in_it(worn, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(model)
    torch.save({"model": model.state_dict(), "epoch": 1}, "latest.pt")
    with (tmp_path / "open.pt").open("wb") as file:
        torch.save(model, file)
    assert [(2, str(tmp_path / "latest.pt"), "torch"), (2, str(tmp_path / "open.pt"), "torch")] == kept(worn)


def test_what_is_no_checkpoint_is_not_told(worn, model, tmp_path):
    torch.save({"losses": torch.ones(1), "random": torch.get_rng_state()}, tmp_path / "small.pt")
    torch.save(torch.ones(3, dtype=torch.int64), tmp_path / "numbers.pt")
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.save(model.state_dict(), tmp_path / "nowhere" / "model.pt")
    worn.monitor.context.guard.is_on = False
    torch.save(model.state_dict(), tmp_path / "unheard.pt")
    assert [] == kept(worn)


@pytest.mark.usefixtures("gloo")
def test_of_saves_within_saves_the_outermost_is_told(worn, model, tmp_path):
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "one")
    state_dict_saver.__dict__["save"].__wrapped__(model.state_dict(), checkpoint_id=tmp_path / "two")
    assert [(1, str(tmp_path / "one"), "dcp"), (1, str(tmp_path / "two"), "dcp")] == kept(worn)


def kept(worn) -> list[tuple[int, str, str]]:
    return [(each.step, each.body.path, each.body.framework) for each in worn.said(SaveFinished)]


def test_a_function_that_is_followed_is_still_what_it_was(worn):  # noqa: ARG001
    assert "save" == dcp.save.__name__
    assert dcp.save is state_dict_saver.save
    assert copy.copy(dcp.save) is dcp.save


def test_every_function_that_saves_is_named_once():
    places = [(each.module, each.owner, each.name) for framework in ALL for each in framework.saves]
    assert len(places) == len(set(places))
