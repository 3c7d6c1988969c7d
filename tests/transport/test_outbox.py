"""What waits to be said: bounded, in order, identity first and always."""

from hypothesis import given
from hypothesis import strategies as st

from holter.records import Attached, Census, Exam, Exited, Observation, Phase, SightLost
from holter.transport.limits import Backoff
from holter.transport.outbox import Outbox


def record(step: int) -> Observation:
    return Observation(rank=0, step=step, at_ns=0, body=SightLost(what="x", dropped=0))


ATTACHED = Observation(
    rank=0,
    step=0,
    at_ns=0,
    body=Attached(pid=1, host="h", world_size=1, local_rank=0, command=[], versions={}),
)
EXITED = Observation(
    rank=0,
    step=9,
    at_ns=0,
    body=Exited(
        pid=1, exit_code=0, signal=None, out_of_memory=False, last_step=9, last_phase=Phase.DATA, farewell=None
    ),
)


def exam(reason: str, asked_ns: int = 0) -> Observation:
    return Observation(rank=0, step=9, at_ns=0, body=Exam(reason=reason, asked_ns=asked_ns))


def census(part: int, parts: int, step: int = 0) -> Observation:
    body = Census(
        model=0,
        wrapper="",
        is_replicated=True,
        optimizers=[],
        backward_order=[],
        part=part,
        parts=parts,
        entries=[],
    )
    return Observation(rank=0, step=step, at_ns=0, body=body)


def test_the_oldest_is_dropped_and_counted_and_identity_is_not() -> None:
    outbox = Outbox(3)
    for observation in (ATTACHED, census(0, 1), EXITED, *map(record, range(5))):
        outbox.put(observation)
    assert (2, 6) == (outbox.dropped, len(outbox))
    assert [ATTACHED, census(0, 1), record(2), record(3), record(4), EXITED] == outbox.take(10)
    assert not outbox


def test_a_new_connection_hears_identity_again_and_the_stream_once() -> None:
    outbox = Outbox(10)
    for observation in (ATTACHED, census(0, 2), census(1, 2), record(0), EXITED):
        outbox.put(observation)
    outbox.take(10)
    outbox.begin()
    assert [ATTACHED, census(0, 2), census(1, 2), EXITED] == outbox.take(10)


def test_what_a_dying_rank_left_is_never_dropped_and_comes_before_its_end_at_every_connection() -> None:
    outbox = Outbox(3)
    for observation in (exam("last_breath"), EXITED, exam("death"), *map(record, range(5))):
        outbox.put(observation)
    last = [exam("last_breath"), exam("death"), EXITED]
    assert (2, 6) == (outbox.dropped, len(outbox))
    assert [record(2), record(3), record(4), *last] == outbox.take(10)
    outbox.begin()
    assert last == outbox.take(10)
    assert not outbox


def test_what_was_said_last_comes_again_in_order_where_it_could_not_be_said() -> None:
    outbox = Outbox(3)
    for observation in (exam("death"), EXITED):
        outbox.put(observation)
    outbox.put_back(outbox.take(1))
    assert [exam("death"), EXITED] == outbox.take(2)


def test_an_examination_that_was_asked_for_is_one_record_among_many() -> None:
    outbox = Outbox(2)
    for number in range(4):
        outbox.put(exam("asked", number))
    assert [exam("asked", 2), exam("asked", 3)] == outbox.take(10)
    outbox.begin()
    assert not outbox


def test_a_census_in_other_parts_takes_the_place_of_the_former() -> None:
    outbox = Outbox(10)
    for observation in (census(0, 2), census(1, 2), census(0, 1)):
        outbox.put(observation)
    outbox.begin()
    assert [census(0, 1)] == outbox.take(10)


def test_a_coordinator_that_is_reached_late_hears_the_first_census_and_the_last_ones() -> None:
    outbox = Outbox(10)
    for step in range(0, 96, 16):
        outbox.put(census(0, 2, step))
        outbox.put(census(1, 2, step))
    outbox.begin()
    assert [0, 48, 64, 80] == [said.step for said in outbox.take(10)][::2]


@given(st.lists(st.integers(1, 5), max_size=30), st.integers(0, 40))
def test_what_is_put_back_comes_first_again(takes: list[int], number: int) -> None:
    outbox = Outbox(100)
    for step in range(number):
        outbox.put(record(step))
    for limit in takes:
        outbox.put_back(outbox.take(limit))
    assert [record(step) for step in range(number)] == outbox.take(100)


def test_the_wait_doubles_up_to_its_cap_and_begins_again() -> None:
    backoff = Backoff(first_s=0.1, cap_s=5.0)
    waits = [backoff.next_s() for _ in range(200)]
    assert 0.05 <= waits[0] <= 0.1
    assert 0.1 <= waits[1] <= 0.2
    assert all(2.5 <= wait <= 5.0 for wait in waits[10:])
    backoff.attempts = 0
    assert backoff.next_s() <= 0.1
