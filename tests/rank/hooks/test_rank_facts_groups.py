"""Members of new groups are said once, by the three lowest of them; nothing of groups that everyone belongs to."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from holter.rank.hooks.rank_facts import MAX_MEMBERS
from holter.records import Group, Groups


@pytest.fixture
def of_sixteen(request: pytest.FixtureRequest) -> Iterator[None]:
    """One of sixteen ranks, alone; the first if the test does not say which."""
    dist.init_process_group("fake", rank=getattr(request, "param", 0), world_size=16, store=FakeStore())
    yield
    dist.destroy_process_group()


def told(worn) -> list[Group]:
    return [group for observation in worn.said(Groups) for group in observation.body.groups]


def train() -> None:
    torch.nn.Linear(4, 1)(torch.ones(2, 4)).sum().backward()


@pytest.mark.usefixtures("of_sixteen")
def test_a_group_is_said_when_it_is_made_and_never_again(worn):
    pair = dist.new_group([5, 0], group_desc="pair")
    assert [Group(pair.group_name, "pair", (0, 5))] == told(worn)
    train()
    train()
    trio = dist.new_group([0, 1, 2])
    assert [pair.group_name, trio.group_name] == [group.name for group in told(worn)]


@pytest.mark.usefixtures("of_sixteen")
def test_groups_of_others_and_of_everyone_are_not_said(worn):
    dist.new_group([3, 4])
    dist.new_group()
    train()
    assert [] == told(worn)


@pytest.mark.parametrize("of_sixteen", [7], indirect=True)
@pytest.mark.usefixtures("of_sixteen")
def test_the_three_lowest_tell(worn):
    dist.new_group([1, 2, 3, 7])
    third = dist.new_group([1, 2, 7, 9])
    train()
    assert [third.group_name] == [group.name for group in told(worn)]


@pytest.mark.usefixtures("of_sixteen")
def test_a_group_that_was_made_in_another_way_is_said_at_the_next_backward_pass(worn):
    pair = dist.new_group([0, 1])
    worn.forget()
    world = dist.distributed_c10d._world
    world.pg_names[pair] = "split"
    world.group_count += 1
    train()
    assert ["split"] == [group.name for group in told(worn)]


def test_without_a_process_group_there_is_nothing_to_say(worn):
    train()
    assert [] == told(worn)


@pytest.mark.usefixtures("of_sixteen")
def test_records_stay_small(worn, monkeypatch):
    monkeypatch.setattr("holter.rank.hooks.rank_facts.MAX_MEMBERS", 5)
    monkeypatch.setattr(worn.monitor.context.guard, "is_on", False)
    for members in ([0, 1, 2], [0, 3], [0, 4], [0, 1, 2, 3, 4, 5]):
        dist.new_group(members)
    monkeypatch.setattr(worn.monitor.context.guard, "is_on", True)
    train()
    said = [[group.ranks for group in observation.body.groups] for observation in worn.said(Groups)]
    assert [[(0, 1, 2), (0, 3)], [(0, 4)]] == said
    assert MAX_MEMBERS == 4096


@pytest.mark.usefixtures("of_sixteen")
def test_the_script_gets_its_group_whatever_we_fail_at(wear, monkeypatch):
    worn = wear()
    monkeypatch.setattr(dist.distributed_c10d._World, "group_count", property(lambda _: 1 / 0, lambda *_: None))
    assert dist.new_group([0, 1], use_local_synchronization=True).size() == 2
    assert worn.monitor.context.guard.failures
