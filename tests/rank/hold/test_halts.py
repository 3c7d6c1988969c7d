"""Where the main thread stands, and what it says of the state it stands in."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from holter.errors import SaveError
from holter.frameworks.halts import RankSaver
from holter.frameworks.place import RankPlace
from holter.records import Order

HERE = RankPlace(rank=0, world_size=1, local_rank=0, is_one_host=True, address="")


class Agent:
    """Lets everybody go on, and remembers who stood: step, why, whether torn, and what a live save said."""

    def __init__(self, worn: Any) -> None:
        self.due: float = float("inf")
        self.asked: list[int] = []
        self.held: list[tuple[int, str, bool]] = []
        self.rounds: list[int] = []
        self.refusals: list[str] = []
        self._worn = worn

    def is_wanted(self) -> bool:
        return True

    def is_due(self, step: int) -> bool:
        self.asked.append(step)
        return step >= self.due

    def hold(self, step: int, why: str, num_skipped: int = 0) -> None:
        self.rounds.append(step + num_skipped)
        self.held.append((step, why, self._worn.monitor.is_torn()))
        if self.held[-1][2]:
            order = Order(halt=1, kind="commit", step=step, directory="/nowhere", savers=(0,))
            with pytest.raises(SaveError) as refused:
                RankSaver(self._worn.monitor, HERE).save(order, is_main_thread=True)
            self.refusals.append(str(refused.value))

    def linger(self, why: str) -> None:
        raise AssertionError(why)


@pytest.fixture
def agent(worn) -> Agent:
    worn.monitor.context.hold.agent = Agent(worn)
    return worn.monitor.context.hold.agent


@pytest.mark.parametrize("num_before", [0, 3])
def test_held_before_the_second_of_two_optimizers_the_state_is_torn_and_not_saved(worn, agent, num_before):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    worn.monitor.add_model(model)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model]
    for turn in range(num_before + 1):
        model(torch.randn(8, 4)).sum().backward()
        if turn == num_before:
            model[1].weight.grad[0, 0] = float("nan")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [("nonfinite", True)] == [held[1:] for held in agent.held]
    assert ["the rank is between two optimizers of one step: its weights are partly new"] == agent.refusals


def test_held_before_the_first_of_two_optimizers_nothing_is_torn(worn, agent):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    worn.monitor.add_model(model)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model]
    for turn in range(3):
        model(torch.randn(8, 4)).sum().backward()
        if turn == 2:
            model[0].weight.grad[0, 0] = float("nan")
        agent.held.clear()
        for optimizer in optimizers:
            optimizer.step()
    assert (2, "nonfinite", False) == agent.held[0]


def test_of_two_optimizers_one_whose_numbers_are_thrown_away_holds_nobody(worn, agent):
    critic, actor = nn.Linear(4, 1), nn.Linear(4, 4)
    worn.monitor.add_model(critic)
    worn.monitor.add_model(actor)
    of_critic, of_actor = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (critic, actor))
    for _ in range(3):
        (critic(actor(torch.randn(8, 4))).sum() + critic.weight.sum() * 0).backward()
        actor.weight.grad.fill_(float("nan"))
        of_critic.step()
        of_actor.zero_grad()
        critic(actor(torch.randn(8, 4))).sum().backward()
        of_actor.step()
        of_critic.zero_grad()
    assert [] == agent.held


@pytest.mark.parametrize("due", [5, 7])
def test_where_a_scaler_skips_every_step_an_agreed_halt_is_reached_all_the_same(worn, agent, due):
    model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=4.0)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for turn in range(10):
        scaler.scale(model(torch.ones(8, 4)).sum() * (1.0 if turn < 3 else torch.inf)).backward()
        if turn == 3:
            agent.due = due
        if agent.rounds:
            break
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert (3, "agreed", False) == agent.held[0]
    assert due == agent.rounds[0]
    assert due + 1 == turn, "once, before the round is skipped"


def test_a_scaler_that_skips_now_and_then_puts_nothing_off(worn, agent):
    model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=4.0)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    agent.due = 4
    for turn in range(6):
        scaler.scale(model(torch.ones(8, 4)).sum() * (torch.inf if turn == 1 else 1.0)).backward()
        if agent.rounds:
            break
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert ((4, "agreed", False), 4, 6) == (agent.held[0], agent.rounds[0], turn + 1)


def test_a_step_that_went_on_not_finite_is_known_from_then_on(worn, agent):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer, actions = torch.optim.SGD(model.parameters(), lr=0.01), RankSaver(worn.monitor, HERE)
    for turn in range(2):
        assert actions.position().poisoned_step is None
        (model(torch.ones(8, 4)).sum() * (torch.nan if turn else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [(1, "nonfinite", False)] == agent.held
    assert 1 == actions.position().poisoned_step


class Failing(RankSaver):
    """Its framework's writer fails, in words of its own."""

    def _save(self, order: Order, *, is_main_thread: bool) -> None:
        raise RuntimeError(f"unexpected pos 704 vs 598 at step {order.step}, {is_main_thread}")


@pytest.mark.parametrize("num_blocks", [3, 1 << 20], ids=["full", "room"])
def test_a_writer_that_failed_on_a_full_disk_is_said_to_have(worn, tmp_path, monkeypatch, num_blocks):
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=num_blocks, f_frsize=4096))
    order = Order(halt=1, kind="commit", step=3, directory=str(tmp_path), savers=(0,))
    with pytest.raises(SaveError if num_blocks == 3 else RuntimeError, match="unexpected pos 704") as failed:
        Failing(worn.monitor, HERE).save(order, is_main_thread=True)
    assert (num_blocks == 3) is str(failed.value).startswith("No space left on device: 12 KB are free (")
