"""The two tables of a halt, in every interleaving of small worlds."""

from dataclasses import replace
from typing import Any

import pytest
from tests.halting.exploration import STEP, Explorer, Place, Scene, World

from holter.halting import protocol, rank_protocol
from holter.halting.protocol import Course
from holter.halting.rank_protocol import (
    ENDS,
    Answered,
    Ask,
    Event,
    Rank,
    RankAct,
    RankCue,
    RankEvent,
    Stand,
    advance,
    patience_s,
)
from holter.records import Order, OrderKind


def order(
    kind: OrderKind, halt: int = 1, *, savers: tuple[int, ...] = (), lost: tuple[int, ...] = (), step: int = STEP
) -> Order:
    directory = f"/run/checkpoints/.{step}.partial"
    return Order(halt=halt, kind=kind, step=step, directory=directory, savers=savers, lost=lost, deadline_s=9.0)


def places(num_ranks: int, blocked: tuple[int, ...] = ()) -> tuple[Place, ...]:
    return tuple(Place(Rank(number), is_blocked=number in blocked) for number in range(num_ranks))


def agreed(num_ranks: int) -> Scene:
    """An operator asks: prepare, then commit."""
    return Scene(places(num_ranks), order("prepare", savers=tuple(range(num_ranks))))


def nonfinite(num_ranks: int) -> Scene:
    """Every rank stands before the step by itself; the coordinator commits when it has heard so of all."""
    everyone = tuple(range(num_ranks))
    return Scene(places(num_ranks), order("commit", savers=everyone), frozenset(everyone), is_nonfinite=True)


def hung(num_ranks: int, savers: tuple[int, ...]) -> Scene:
    """All main threads are blocked; some ranks save."""
    everyone = tuple(range(num_ranks))
    lost = tuple(rank for rank in everyone if rank not in savers)
    return Scene(places(num_ranks, everyone), order("rescue", savers=savers, lost=lost))


def mixed(num_ranks: int) -> Scene:
    """Rank 0 stands before the step, the others are blocked elsewhere and save with it."""
    everyone = tuple(range(num_ranks))
    rescue = order("rescue", savers=everyone)
    return Scene(places(num_ranks, everyone[1:]), rescue, frozenset({0}), is_nonfinite=True)


def aside(num_ranks: int) -> Scene:
    """Rank 0 stands before the step; the others, blocked elsewhere, are a step further, and save without it."""
    everyone = tuple(range(num_ranks))
    rescue = order("rescue", savers=everyone[1:])
    return Scene(places(num_ranks, everyone[1:]), rescue, frozenset({0}), is_nonfinite=True)


def check(explorer: Explorer, world: World) -> None:
    """What must hold in every world."""
    now = [explorer.place(world, number) for number in range(len(world.places))]
    kinds = {told.kind for told in explorer.journals.items[world.journal]}
    assert not {"leave", "abort"} <= kinds, "both leave and abort were ordered"
    assert "leave" not in kinds or world.sealed is not None, "ordered to leave before anything was sealed"
    for place in now:
        assert _comes_to_an_end(place, explorer, world.register), f"waits for ever: {place.rank}"


def check_together(explorer: Explorer, world: World) -> None:
    """And where all stand before one step, or are to, none leaves while another goes on."""
    check(explorer, world)
    now = [explorer.place(world, number) for number in range(len(world.places))]
    leaves = any(place.rank.stand is Stand.LEAVING or place.rank.is_bound for place in now)
    goes_on = any(place.is_past and place.rank.stand is not Stand.DEAD for place in now)
    assert not (leaves and goes_on), "one rank leaves and another goes on"


def _comes_to_an_end(place: Place, explorer: Explorer, register: int) -> bool:
    """With nobody to talk to, time alone brings the rank to an end, or back to its own doing."""
    rank, offer = place.rank, place.offer
    word = explorer.orders.items[register] if register >= 0 else None
    for _ in range(12):
        if rank.stand in ENDS or (rank.stand is Stand.TRAINING and not rank.is_standing):
            return True
        if offer is None and patience_s(rank) is None:
            return False
        word = word or offer
        event: Event = Answered(word) if offer is not None and word is not None else RankEvent.PATIENCE_OVER
        rank, actions = advance(rank, event, explorer.scene.rank_table)
        offer = next((action.order for action in actions if isinstance(action, Ask)), None)
    return False


TOGETHER = {
    "agreed": agreed(2),
    "agreed, a message lost": replace(agreed(2), losses=1, repeats=0),
    "agreed, a death": replace(agreed(2), deaths=1, repeats=0),
    "nonfinite": nonfinite(2),
    "nonfinite, a message lost": replace(nonfinite(2), losses=1, repeats=0),
    "nonfinite, a death": replace(nonfinite(2), deaths=1, repeats=0),
}
APART = {
    "hung": hung(2, (0,)),
    "hung, both save": replace(hung(2, (0, 1)), repeats=0),
    "hung, a message lost and a death": replace(hung(2, (0,)), losses=1, deaths=1, repeats=0),
    "mixed": replace(mixed(2), repeats=0),
    "mixed, a message lost and a death": replace(mixed(2), losses=1, deaths=1, repeats=0),
    "aside": aside(2),
    "aside, a message lost and a death": replace(aside(2), losses=1, deaths=1, repeats=0),
}


def but_one_for_a_release(scenes: dict[str, Scene], kept: str) -> list[Any]:
    """All scenes; `make test` explores one of them."""
    marks = {name: () if name == kept else pytest.mark.release for name in scenes}
    return [pytest.param(scene, id=name, marks=marks[name]) for name, scene in scenes.items()]


@pytest.mark.slow
@pytest.mark.parametrize("scene", but_one_for_a_release(TOGETHER, "nonfinite"))
def test_ranks_that_stand_together_never_part(scene: Scene) -> None:
    assert Explorer(scene).explore(check_together) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("scene", but_one_for_a_release(APART, "mixed"))
def test_a_rescue_is_never_ordered_both_ways_and_always_ends(scene: Scene) -> None:
    assert Explorer(scene).explore(check) > 100


class _LeaveSeenError(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("scene", [agreed(2), nonfinite(2), hung(2, (0,)), mixed(2), aside(2)])
def test_a_halt_can_be_completed(scene: Scene) -> None:
    def watch(explorer: Explorer, world: World) -> None:
        ends = {explorer.place(world, number).rank.stand for number in range(len(world.places))}
        if ends == {Stand.LEAVING} and world.sealed:
            raise _LeaveSeenError

    with pytest.raises(_LeaveSeenError):
        Explorer(scene).explore(watch)


def without(table: dict[Any, Any], *keys: Any) -> dict[Any, Any]:
    return {key: row for key, row in table.items() if key not in keys}


def test_a_table_with_a_hole_is_found_out() -> None:
    """Ranks that obey a commit without asking the register part as soon as one patience ends before the order comes."""
    at_once = {
        **rank_protocol.TABLE,
        (Stand.HELD, RankCue.OVER): (Stand.TRAINING, (RankAct.SAY_RELEASED,)),
    }
    with pytest.raises(AssertionError, match="one rank leaves and another goes on"):
        Explorer(replace(nonfinite(2), rank_table=at_once)).explore(check_together)


def test_a_table_in_which_a_rank_waits_for_ever_is_found_out() -> None:
    deaf = without(rank_protocol.TABLE, (Stand.SAVED, RankCue.BOUND_OVER))
    with pytest.raises(AssertionError, match="waits for ever"):
        Explorer(replace(nonfinite(2), rank_table=deaf)).explore(check_together)


def test_a_coordinator_that_leaves_before_it_sealed_is_found_out() -> None:
    hasty = {
        **protocol.TABLE,
        (Course.COMMITTED, protocol.Cue.SETTLED): (Course.DONE, (protocol.Act.LEAVE,)),
    }
    with pytest.raises(AssertionError, match="before anything was sealed"):
        Explorer(replace(nonfinite(2), table=hasty)).explore(check_together)
