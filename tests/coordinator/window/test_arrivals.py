"""Lags come out right, whatever the clocks and whoever tells first; memory is bounded; nobody is waited for without end."""

import random
from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holter.coordinator.window import arrivals
from holter.coordinator.window.arrivals import MAX_KEPT, MAX_LATEST, MAX_OPEN, ArrivalBook, Meeting, median_without
from holter.faults.window import StepArrivals
from holter.records import StepCalls, Traffic

BASE_NS = 1_700_000_000 * 10**9
Calls = list[tuple[str, int, int]]


def told(
    step: int, calls: Calls, *, data_s: float = 0.0, offset_ns: int = 0, error_ns: int = 0, base_ns: int = BASE_NS
) -> Traffic:
    return Traffic(
        base_ns=base_ns, steps=[StepCalls(step, data_s, calls)], clock_offset_ns=offset_ns, clock_error_ns=error_ns
    )


def book(records: Iterable[tuple[int, Traffic]]) -> ArrivalBook:
    made = ArrivalBook()
    for rank, traffic in records:
        made.add(rank, traffic, 5)
    return made


def one_step(*times_ms: float, step: int = 7) -> StepArrivals:
    """Ranks that entered one call at these times, and went on to the next step."""
    ranks = list(enumerate(times_ms))
    made = book((rank, told(step, [("0", 1, round(ms * 1000))])) for rank, ms in ranks)
    for rank, _ in ranks:
        made.add(rank, told(step + 1, []), 6)
    (found,) = made.arrivals()
    return found


def test_a_lag_is_measured_against_the_median_of_the_others() -> None:
    found = one_step(0.0, 50.0, 2.0, 4.0)
    assert (found.step, found.num_ranks, found.num_calls) == (7, 4, 1)
    assert [arrival.rank for arrival in found.latest] == [1, 3, 2, 0]
    assert [arrival.lag_s for arrival in found.latest] == pytest.approx([0.048, 0.002, -0.002, -0.004])
    assert (found.latest[0].group, found.latest[0].sequence) == ("0", 1)
    assert found.spread_s == pytest.approx(0.002)


def test_of_two_ranks_one_is_late_by_what_the_other_is_early() -> None:
    found = one_step(0.0, 50.0)
    assert [(arrival.rank, arrival.lag_s) for arrival in found.latest] == [(1, 0.05), (0, -0.05)]
    assert (found.spread_s, found.usual_s) == (0.0, 0.0)


def test_the_pressure_on_a_ranks_host_goes_with_it() -> None:
    made = book(
        (rank, msgspec.structs.replace(told(step, [("0", step, 50_000 * rank)]), pressure=rank / 2))
        for step in (7, 8)
        for rank in range(2)
    )
    assert [(arrival.rank, arrival.pressure) for arrival in made.arrivals()[0].latest] == [(1, 0.5), (0, 0.0)]


def test_the_worst_collective_of_a_step_counts() -> None:
    made = book((rank, told(3, [("0", 5, 0), ("0", 6, 9000 * rank), ("0", 7, 20_000 - rank)])) for rank in (0, 1))
    for rank in (0, 1):
        made.add(rank, told(4, []), 6)
    (found,) = made.arrivals()
    assert (found.latest[0].rank, found.latest[0].sequence, found.latest[0].lag_s) == (1, 6, 0.009)
    assert found.num_calls == 3


def test_a_step_is_shown_when_everyone_has_gone_on() -> None:
    made = book([(0, told(0, [("0", 0, 0)])), (1, told(0, [("0", 0, 10)])), (0, told(1, [("0", 1, 0)]))])
    assert made.arrivals() == ()
    made.add(1, told(1, [("0", 1, 10)]), 5)
    assert [found.step for found in made.arrivals()] == [0]
    assert made.arrivals() is made.arrivals()


def test_what_nobody_shares_is_left_out() -> None:
    made = book([(0, told(0, [("a", 0, 0)])), (1, told(0, [("b", 0, 9)])), (0, told(1, [])), (1, told(1, []))])
    assert made.arrivals() == ()


def test_a_call_belongs_to_the_step_that_most_ranks_say() -> None:
    made = book([(0, told(1, [("0", 9, 0)])), (1, told(1, [("0", 9, 1)])), (2, told(1, []))])
    made.add(2, told(2, [("0", 9, 30_000)]), 5)
    for rank in (0, 1):
        made.add(rank, told(2, []), 5)
    for rank in (0, 1, 2):
        made.add(rank, told(3, []), 5)
    (found,) = made.arrivals()
    assert (found.step, found.num_ranks, found.latest[0].rank) == (1, 3, 2)


def test_data_seconds_are_set_against_the_others() -> None:
    made = book((rank, told(0, [("0", 0, 50_000 * (rank == 1))], data_s=(0.01, 0.06, 0.02)[rank])) for rank in range(3))
    for rank in range(3):
        made.add(rank, told(1, []), 5)
    late = made.arrivals()[0].latest[0]
    assert (late.rank, late.data_s, late.others_data_s) == (1, 0.06, pytest.approx(0.015))


def test_clock_errors_of_the_latest_and_of_the_rest_add_up() -> None:
    errors = (1_000_000, 5_000_000, 1_000_000)
    made = book((rank, told(0, [("0", 0, 50_000 * (rank == 1))], error_ns=errors[rank])) for rank in range(3))
    for rank in range(3):
        made.add(rank, told(1, []), 5)
    assert made.arrivals()[0].error_s == pytest.approx(0.006)


def test_a_rank_whose_clock_nobody_knows_is_left_out_and_not_waited_for() -> None:
    made = book((rank, told(0, [("0", 0, rank)])) for rank in range(2))
    made.add(2, told(0, [("0", 0, 10**8)], error_ns=10**18), 5)
    for rank in range(3):
        made.add(rank, told(1, [], error_ns=10**18 if rank == 2 else 0), 5)
    (found,) = made.arrivals()
    assert (found.num_ranks, found.error_s) == (2, 0.0)


def test_what_a_rank_says_again_after_a_reconnect_counts_once() -> None:
    made = book((rank, told(step, [("0", step, 0)])) for step in (7, 8) for rank in (0, 1))
    for step in (7, 8):
        made.add(1, told(step, [("0", step, 900)]), 6)
    assert [4, 0] == [made._num_times, made.arrivals()[0].latest[0].lag_s]


def test_who_was_held_up_in_another_group_is_excused() -> None:
    """Rank 1 is late for its tensor-parallel peer 0; both then come late to their data-parallel peers 2 and 3."""
    tp0, tp1, dp_even, dp_odd = ("tp0", 0), ("tp1", 0), ("dp_even", 0), ("dp_odd", 0)
    times = {
        0: [(*tp0, 0), (*dp_even, 51_000)],
        1: [(*tp0, 50_000), (*dp_odd, 51_000)],
        2: [(*tp1, 0), (*dp_even, 1_000)],
        3: [(*tp1, 100), (*dp_odd, 1_000)],
    }
    made = book((rank, told(0, calls)) for rank, calls in times.items())
    for rank in times:
        made.add(rank, told(1, []), 5)
    latest = {arrival.rank: arrival.lag_s for arrival in made.arrivals()[0].latest}
    assert latest[1] == pytest.approx(0.05)
    assert max(lag for rank, lag in latest.items() if rank != 1) <= 0.001


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=12), st.data())
def test_the_median_without_one_is_the_median_of_the_others(values: list[int], data: st.DataObject) -> None:
    ordered = sorted(values)
    place = data.draw(st.integers(0, len(ordered) - 1))
    others = ordered[:place] + ordered[place + 1 :]
    half = len(others) // 2
    expected = others[half] if len(others) % 2 else (others[half - 1] + others[half]) / 2
    assert median_without(ordered, place) == expected


def test_the_latest_are_found_among_many_that_came_together() -> None:
    meeting = Meeting("0", 0, dict.fromkeys(range(100), 0) | {99: 5})
    assert meeting.latest()[0] == 99
    assert len(meeting.latest()) == MAX_LATEST


JOBS = st.integers(2, 5).flatmap(
    lambda ranks: st.tuples(
        st.just(ranks),
        st.lists(
            st.lists(st.lists(st.integers(0, 10**6), min_size=ranks, max_size=ranks), min_size=0, max_size=3),
            min_size=2,
            max_size=6,
        ),
        st.lists(st.integers(-(10**12), 10**12), min_size=ranks, max_size=ranks),
    )
)
Job = tuple[int, list[list[list[int]]], list[int]]


def streams(job: Job, *, is_shifted: bool) -> list[list[tuple[int, Traffic, int]]]:
    """What each rank tells, in its own order: one record a step, by its own clock."""
    ranks, steps, offsets_us = job
    found = []
    for rank in range(ranks):
        sequence, own = 0, []
        offset_us = offsets_us[rank] if is_shifted else 0
        for step, calls in enumerate([*steps, []]):
            entered: Calls = []
            for times in calls:
                entered.append(("0", sequence, times[rank]))
                sequence += 1
            # A rank that cuts the run into steps at another place than the others.
            said = step + (rank == ranks - 1 and ranks > 2 and step % 2 == 1 and step < len(steps) - 1)
            base_ns = BASE_NS - offset_us * 1000
            record = told(said, entered, data_s=rank / 10, offset_ns=offset_us * 1000, base_ns=base_ns)
            own.append((rank, record, 100 * step + rank))
        found.append(own)
    return found


def fed(records: Iterable[tuple[int, Traffic, int]], *, looks: bool = False) -> tuple[StepArrivals, ...]:
    made = ArrivalBook()
    for rank, traffic, at_ns in records:
        made.add(rank, traffic, at_ns)
        if looks:
            made.arrivals()
    return made.arrivals()


@given(JOBS, st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_the_order_in_which_ranks_tell_does_not_matter(job: Job, rng: random.Random) -> None:
    own = streams(job, is_shifted=True)
    in_turn = [record for round_ in zip(*own, strict=True) for record in round_]
    one_by_one = [record for stream in own for record in stream]
    assert fed(in_turn) == fed(one_by_one) == fed(_interleaved(own, rng), looks=True)


@given(JOBS)
@settings(max_examples=100, deadline=None)
def test_clock_offsets_are_removed(job: Job) -> None:
    shifted, true = (
        fed(record for stream in streams(job, is_shifted=shift) for record in stream) for shift in (True, False)
    )
    assert shifted == true


def _interleaved(own: Sequence[list[tuple[int, Traffic, int]]], rng: random.Random) -> list[tuple[int, Traffic, int]]:
    left = [list(stream) for stream in own]
    mixed = []
    while any(left):
        mixed.append(rng.choice([stream for stream in left if stream]).pop(0))
    return mixed


def run(made: ArrivalBook, ranks: Iterable[int], steps: Iterable[int], *, calls: int = 1) -> None:
    members = list(ranks)
    for step in steps:
        for rank in members:
            entered = [("0", step * calls + number, step * 1000 + rank) for number in range(calls)]
            made.add(rank, told(step, entered), step)


def test_a_rank_that_falls_silent_is_not_waited_for_without_end() -> None:
    made = ArrivalBook()
    run(made, range(3), range(10))
    run(made, range(2), range(10, 10 + MAX_OPEN // 2))
    assert made.arrivals()[-1].step == 8
    run(made, range(2), range(10 + MAX_OPEN // 2, 20 + 2 * MAX_OPEN))
    assert made.arrivals()[-1].step == 20 + 2 * MAX_OPEN - 2
    assert made.arrivals()[-1].num_ranks == 2


def test_steps_are_bounded() -> None:
    made = ArrivalBook()
    run(made, range(2), range(MAX_KEPT + 200))
    found = made.arrivals()
    assert len(found) == MAX_KEPT
    assert [one.step for one in found] == list(range(found[0].step, MAX_KEPT + 199))
    assert len(made._open) <= MAX_OPEN
    assert len(made._calls) <= MAX_OPEN


def test_the_more_ranks_the_fewer_steps_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_TIMES", 1000)
    made = ArrivalBook()
    run(made, range(50), range(30), calls=4)
    assert made._num_times == sum(opened.num_times() for opened in made._open.values()) <= 1000
    assert len(made._open) == 5
    assert [one.step for one in made.arrivals()] == list(range(29))
    assert {one.num_ranks for one in made.arrivals()} == {50}
    assert {one.num_calls for one in made.arrivals()} == {4}


def test_a_job_that_begins_again_counts_its_calls_anew() -> None:
    made = ArrivalBook()
    run(made, range(3), range(20))
    for rank in range(3):
        made.take_back(rank, 10)
        assert max(one.step for one in made.arrivals()) == 9
    for step in range(10, 15):
        for rank in range(3):
            late = 40_000 * (rank == 2)
            made.add(rank, told(step, [("0", step - 10, late)], base_ns=BASE_NS + 10**12), step)
    found = {one.step: one for one in made.arrivals()}
    assert sorted(found) == list(range(14))
    assert [found[step].latest[0].rank for step in range(10, 14)] == [2] * 4
    assert found[12].latest[0].lag_s == pytest.approx(0.04)


def test_ranks_that_begin_again_are_not_set_against_those_that_have_not_yet() -> None:
    made = ArrivalBook()
    run(made, range(3), range(20))
    for rank in range(2):
        made.take_back(rank, 0)
    made.add(2, told(20, [("0", 20, 0)]), 5)
    for step in range(3):
        for rank in range(2):
            made.add(rank, told(step, [("0", step, 0)], base_ns=BASE_NS + 10**12), step)
    for one in made.arrivals():
        assert one.num_ranks == 2
        assert one.latest[0].lag_s == 0.0
