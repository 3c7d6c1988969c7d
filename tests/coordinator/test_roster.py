"""Who is there, who is gone, and when nobody is left to wait for."""

import pytest
from tests.coordinator.conftest import done, exited, seen

from holter.coordinator.lifetime import Limits, end_reason
from holter.coordinator.roster import Roster
from holter.records import Phase, SightLost
from holter.transport.wire import Heartbeat, Hello

LIMITS = Limits(first_s=100, idle_s=30, stragglers_s=5, settle_s=1)


def hello(rank: int, pid: int = 10, world_size: int = 2) -> Hello:
    return Hello(
        run_id="r", rank=rank, world_size=world_size, host="a", rank_pid=pid, sidecar_pid=1, metrics_address=""
    )


def both() -> tuple[Roster, list[int]]:
    roster = Roster()
    return roster, [roster.connect(hello(rank), 0) for rank in range(2)]


def test_a_connection_that_breaks_is_a_lost_sidecar_until_it_comes_back() -> None:
    roster, lines = both()
    roster.disconnect(1, lines[1])
    assert ("gone", 1, 1) == (roster.members[1].state, roster.sidecars_lost, roster.num_connected)
    assert ["rank 1 on a: its sidecar is gone"] == roster.blind()
    member = roster.members[1]
    roster.connect(hello(1), 1)
    assert member is roster.members[1], "the same rank, with what was known of it"
    assert [] == roster.blind()


def test_goodbye_is_no_loss() -> None:
    roster, lines = both()
    roster.goodbye(0)
    roster.disconnect(0, lines[0])
    assert ("ended", 0) == (roster.members[0].state, roster.sidecars_lost)


def test_an_older_connection_that_ends_says_nothing() -> None:
    roster, lines = both()
    roster.connect(hello(0), 1)
    roster.disconnect(0, lines[0])
    assert ("connected", 0) == (roster.members[0].state, roster.sidecars_lost)


def test_a_second_process_under_the_same_rank_is_counted_and_begins_anew() -> None:
    roster, _ = both()
    roster.observe(done(0, 41), 1)
    roster.connect(hello(0, pid=11), 2)
    assert (1, None) == (roster.duplicates, roster.members[0].step)


def test_progress_is_a_change_of_place_by_the_coordinators_clock() -> None:
    roster, _ = both()
    roster.beat(0, Heartbeat(3, Phase.FORWARD, 0, 999), 10)
    roster.beat(0, Heartbeat(3, Phase.FORWARD, 0, 1999), 20)
    assert 10 == roster.members[0].last_progress_ns
    roster.beat(0, Heartbeat(3, Phase.BACKWARD, 0, 2999), 30)
    assert (30, 3, Phase.BACKWARD) == (
        roster.members[0].last_progress_ns,
        roster.members[0].step,
        roster.members[0].phase,
    )


def test_a_blind_rank_is_named() -> None:
    roster, _ = both()
    roster.observe(seen(1, 0, SightLost(what="the ring is full", dropped=7)), 0)
    assert ["rank 1: the ring is full (7 lost)"] == roster.blind()


def test_an_ended_rank_has_no_series() -> None:
    roster, _ = both()
    roster.goodbye(0)
    assert [1] == [rank.rank for rank in roster.snapshots()]


@pytest.mark.parametrize(
    ("rank", "world_size", "reason"),
    [
        (0, 2, None),
        (2, 2, "rank 2 is outside 0..1"),
        (-1, 2, "rank -1 is outside 0..1"),
        (0, 4, "world size is 2 here, 4 there"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(rank: int, world_size: int, reason: str | None) -> None:
    assert reason == Roster(world_size=2).refusal(hello(rank, world_size=world_size))


def test_it_waits_for_the_first_sidecar_and_then_for_lost_ones() -> None:
    roster = Roster()
    assert end_reason(roster, 99, LIMITS) is None
    assert "no sidecar connected within 100 s" == end_reason(roster, 100, LIMITS)
    roster, lines = both()
    assert end_reason(roster, 1e9, LIMITS) is None, "somebody is connected"
    for rank in range(2):
        roster.disconnect(rank, lines[rank])
    assert end_reason(roster, 29, LIMITS) is None
    assert "no sidecar was connected for 30 s" == end_reason(roster, 30, LIMITS)


def test_it_ends_at_once_after_the_last_goodbye_and_settles_after_a_death() -> None:
    roster, _ = both()
    roster.observe(exited(0, 5), 0)
    roster.goodbye(0)
    assert end_reason(roster, 0, LIMITS) is None
    roster.goodbye(1)
    assert "every rank has ended" == end_reason(roster, 0, LIMITS)
    roster.observe(exited(1, 5, number=9), 0)
    assert end_reason(roster, 0.9, LIMITS) is None
    assert "every rank has ended" == end_reason(roster, 1, LIMITS)


def test_ranks_that_never_came_are_waited_for_a_little() -> None:
    roster = Roster()
    roster.connect(hello(0), 0)
    roster.goodbye(0)
    assert end_reason(roster, 4, LIMITS) is None
    assert "every rank that came has ended" == end_reason(roster, 5, LIMITS)


def test_a_limit_that_makes_no_sense_is_named() -> None:
    with pytest.raises(ValueError, match="idle_s must not be negative, got -1"):
        Limits(idle_s=-1)


def test_a_rank_whose_sidecar_was_lost_is_not_waited_for_when_its_peers_have_ended() -> None:
    roster, lines = both()
    roster.disconnect(1, lines[1])
    assert end_reason(roster, 1e9, LIMITS) is None, "rank 0 is still watched"
    roster.goodbye(0)
    roster.disconnect(0, lines[0])
    assert end_reason(roster, 4, LIMITS) is None
    assert "every rank that was still watched has ended" == end_reason(roster, 5, LIMITS)
