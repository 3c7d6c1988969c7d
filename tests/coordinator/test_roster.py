"""Who is there, who is gone, and when nobody is left to wait for."""

import pytest
from tests.coordinator.conftest import done, exited, seen

from holter import clock
from holter.coordinator.roster import Roster, digest_of
from holter.coordinator.service import Limits, end_reason
from holter.faults.window import Arrival, StepArrivals
from holter.records import OnDevice, Phase, SightLost, StepCalls, Traffic
from holter.transport.wire import Heartbeat, Hello

LIMITS = Limits(first_s=100, idle_s=30, stragglers_s=5, settle_s=1)


def hello(rank: int, pid: int = 10, world_size: int = 2, key: str = "") -> Hello:
    return Hello(
        run_id="r", rank=rank, world_size=world_size, host="a", rank_pid=pid, sidecar_pid=1, metrics_address="", key=key
    )


def both() -> tuple[Roster, list[int]]:
    roster = Roster()
    return roster, [roster.connect(hello(rank)) for rank in range(2)]


def test_a_connection_that_breaks_is_a_lost_sidecar_until_it_comes_back() -> None:
    roster, lines = both()
    roster.disconnect(1, lines[1])
    assert ("gone", 1, 1) == (roster.members[1].state, roster.sidecars_lost, roster.num_connected)
    assert ["rank 1 on a: its sidecar is gone"] == roster.blind()
    member = roster.members[1]
    roster.connect(hello(1))
    assert member is roster.members[1], "the same rank, with what was known of it"
    assert [] == roster.blind()


def test_nobody_speaks_for_a_rank_whose_sidecar_is_on_the_line() -> None:
    roster = Roster()
    line = roster.connect(hello(1, key="its own"))
    impostors = [hello(1), hello(1, key="another"), hello(1, pid=11, key="another")]
    assert {"another process speaks for rank 1, and is on the line"} == {roster.refusal(one) for one in impostors}
    assert roster.refusal(hello(1, key="its own")) is None, "its line broke and it has not been noticed yet"
    assert roster.refusal(hello(0, key="another")) is None
    roster.disconnect(1, line)
    assert roster.refusal(hello(1, pid=11, key="another")) is None, "the job was started again"


def test_goodbye_is_no_loss() -> None:
    roster, lines = both()
    roster.goodbye(0)
    roster.disconnect(0, lines[0])
    assert ("ended", 0) == (roster.members[0].state, roster.sidecars_lost)


def test_an_older_connection_that_ends_says_nothing() -> None:
    roster, lines = both()
    roster.connect(hello(0))
    roster.disconnect(0, lines[0])
    assert ("connected", 0) == (roster.members[0].state, roster.sidecars_lost)


def test_a_second_process_under_the_same_rank_is_counted_and_begins_anew() -> None:
    roster, _ = both()
    roster.observe(done(0, 41), 1)
    roster.connect(hello(0, pid=11))
    assert (1, None) == (roster.duplicates, roster.members[0].progress.step)


def test_progress_is_a_change_of_place_by_the_coordinators_clock() -> None:
    roster, _ = both()
    roster.beat(0, Heartbeat(3, Phase.FORWARD, 0, 999), 10)
    roster.beat(0, Heartbeat(3, Phase.FORWARD, 0, 1999), 20)
    assert 10 == roster.members[0].progress.moved_ns
    roster.beat(0, Heartbeat(3, Phase.BACKWARD, 0, 2999), 30)
    assert (30, 3, Phase.BACKWARD) == (
        roster.members[0].progress.moved_ns,
        roster.members[0].progress.step,
        roster.members[0].progress.phase,
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
    roster.connect(hello(0))
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


S = 10**9


def fallen(roster: Roster, *seconds: float) -> dict[float, list[int]]:
    """Looks at these moments; who fell silent when."""
    return {second: found for second in seconds if (found := roster.look(int(second * S)))}


def ever(found: dict[float, list[int]]) -> list[int]:
    return [rank for ranks in found.values() for rank in ranks]


def quarters(first_s: float, last_s: float) -> list[float]:
    return [first_s + number / 4 for number in range(int((last_s - first_s) * 4) + 1)]


def test_who_says_nothing_for_five_seconds_is_silent_until_it_speaks() -> None:
    roster, _ = both()
    found = {}
    for second in quarters(0, 8):
        roster.hear(0)
        found |= fallen(roster, second)
    assert [[1]] == list(found.values())
    assert 5 < next(iter(found)) <= 7
    assert ("connected", "silent") == (roster.members[0].state, roster.members[1].state)
    assert [True, False] == [rank.is_sidecar_up for rank in roster.snapshots()]
    roster.hear(1)
    assert ("connected", []) == (roster.members[1].state, roster.blind())


def test_a_coordinator_that_was_not_scheduled_declares_nobody_silent() -> None:
    roster, _ = both()
    fallen(roster, *quarters(0, 3))
    assert {} == fallen(roster, 60.0, 60.25, 60.5), "a minute in which nobody listened"
    for rank in range(2):
        roster.hear(rank)
    assert {} == fallen(roster, *quarters(60.75, 64))


def test_a_clock_that_is_set_makes_nobody_silent() -> None:
    roster, _ = both()
    assert {} == fallen(roster, 0.0, 1.0, 90_000.0, 90_001.0, 5.0, 6.0)


def test_a_slow_coordinator_is_not_blind() -> None:
    roster, _ = both()
    assert [0, 1] == ever(fallen(roster, *range(0, 40, 3)))


def test_a_line_that_was_closed_or_said_goodbye_does_not_fall_silent() -> None:
    roster, lines = both()
    roster.disconnect(0, lines[0])
    roster.goodbye(1)
    assert {} == fallen(roster, *quarters(0, 20))
    assert ("gone", "closed", "ended") == (roster.members[0].state, roster.members[0].link, roster.members[1].state)


def test_a_line_that_was_given_up_falls_silent_if_nobody_comes_back() -> None:
    roster, lines = both()
    roster.disconnect(1, lines[1], is_closed=False)
    assert ("gone", "connected") == (roster.members[1].state, roster.members[1].link)
    roster.hear(0)
    assert 1 in ever(fallen(roster, *quarters(0, 8)))
    roster.connect(hello(1))
    assert "connected" == roster.members[1].state


def test_a_rank_that_does_not_come_is_missed_after_a_while() -> None:
    roster = Roster()
    fallen(roster, *range(200))
    for rank in (0, 1, 2):
        roster.connect(hello(rank, world_size=4))
    heard(roster, range(200, 319), 0, 1, 2)
    assert ([], [0, 1, 2]) == (roster.blind(), [rank.rank for rank in roster.snapshots()]), "hosts differ"
    heard(roster, range(319, 323), 0, 1, 2)
    assert ["rank 3 has not come: no sidecar was ever heard"] == roster.blind()
    assert [True, True, True, False] == [rank.is_sidecar_up for rank in roster.snapshots()]
    roster.connect(hello(3, world_size=4))
    assert ([], True) == (roster.blind(), all(rank.is_sidecar_up for rank in roster.snapshots()))


def test_of_a_run_that_has_ended_nobody_is_missed() -> None:
    roster = Roster()
    roster.connect(hello(0, world_size=10))
    heard(roster, range(150), 0)
    assert ["9 ranks (1, 2, 3, ...) have not come: no sidecar was ever heard"] == roster.blind()
    roster.goodbye(0)
    assert ([], []) == (roster.blind(), roster.snapshots())


def heard(roster: Roster, seconds: range, *ranks: int) -> None:
    for second in seconds:
        for rank in ranks:
            roster.hear(rank)
        roster.look(second * S)


def test_a_look_at_sixteen_thousand_ranks_passes_over_them_once_a_second() -> None:
    roster = Roster()
    for rank in range(16_000):
        roster.connect(hello(rank, world_size=16_000))
    began_s = clock.monotonic_s()
    found = fallen(roster, *[number / 100 for number in range(1200)])
    assert 16_000 == len(ever(found))
    assert clock.monotonic_s() - began_s < 5.0, "twelve passes, not twelve hundred"


def test_lag_is_0_for_who_took_part_and_was_not_among_the_latest() -> None:
    roster = Roster()
    for rank in range(3):
        roster.connect(hello(rank, world_size=3))
    assert {None} == {snapshot.lag_s for snapshot in roster.snapshots()}
    for rank in (0, 1):
        roster.observe(seen(rank, 0, Traffic(base_ns=0, steps=[StepCalls(0, 0.0, [("0", 0, 0)])])), 1)
    late = Arrival(1, 0.05, "0", 0, 0.0, 0.0)
    early = Arrival(0, -0.05, "0", 0, 0.0, 0.0)
    roster.compare([StepArrivals(0, 1, 2, 1, (late, early), 0.0, 0.0)])
    assert [0.0, 0.05, None] == [snapshot.lag_s for snapshot in roster.snapshots()]
    roster.compare([])
    assert [0.0, 0.0, None] == [snapshot.lag_s for snapshot in roster.snapshots()]


def test_the_device_that_a_rank_said_is_shown() -> None:
    roster = Roster()
    roster.connect(hello(0, world_size=1))
    roster.observe(seen(0, 0, OnDevice(uuid="GPU-1")), 1)
    assert "GPU-1" == roster.snapshots()[0].gpu_uuid


def test_a_coordinator_that_is_started_again_keeps_places_for_a_while() -> None:
    roster = Roster(2)
    roster.keep_places({0: digest_of("true")})
    assert "is kept for the sidecar" in str(roster.refusal(hello(0, key="false")))
    assert roster.refusal(hello(1, key="other")) is None
    assert roster.refusal(hello(0, key="true")) is None
    assert not roster.is_new_key(hello(0, key="true")), "it is written down already"
    for second in range(17):
        roster.look(second * 10**9)
    assert roster.refusal(hello(0, key="false")) is None, "it has not come back"


def test_a_rank_that_says_too_much_is_not_taken_in_and_that_is_said() -> None:
    roster = Roster(2)
    taken = sum(roster.allowance.take(1, 2**20, 0) for _ in range(500))
    assert 128 == taken
    assert roster.allowance.take(0, 2**20, 0), "another rank has its own"
    assert ["rank 1 says more than is taken in: 372 messages were not"] == roster.blind()
    assert roster.allowance.take(1, 2**20, 4 * 10**9), "in four seconds it has room for another megabyte"
    assert not roster.allowance.take(1, 2**20, 4 * 10**9)


def test_a_coordinator_that_is_being_filled_takes_in_small_things_only() -> None:
    allowance = Roster(2).allowance
    allowance.look(5 * 2**30, 2)
    assert (True, False) == (allowance.take(0, 1000, 0), allowance.take(0, 2**17, 0))
    allowance.look(5 * 2**30, 16_000)
    assert allowance.take(0, 2**17, 0), "a large job needs more"
