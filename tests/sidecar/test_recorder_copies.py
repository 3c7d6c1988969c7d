"""Copies now and then: how often, and what a failure does."""

import asyncio

import pytest

from holter.records import Flight
from holter.sidecar.recorder import Copies, RecorderError, interval_s, rest_s


class Scripted:
    """A recorder whose answers are given: a flight, or a sentence of failure."""

    def __init__(self, *answers: Flight | str, cost_s: float = 0.001, takes_s: float = 0.0) -> None:
        self.answers = list(answers)
        self.cost_s = cost_s
        self.takes_s = takes_s
        self.num_asked = 0

    async def flight(self, _deadline_s: float = 3.0) -> Flight:
        self.num_asked += 1
        await asyncio.sleep(self.takes_s)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, str):
            raise RecorderError(answer)
        return answer


def flight(taken_ns: int) -> Flight:
    return Flight(groups=[], calls=[], taken_ns=taken_ns)


@pytest.mark.parametrize(
    ("cost_s", "num_calls", "num_failures", "expected"),
    [
        (0.0, 0, 0, 0.5),
        (0.001, 10, 0, 0.5),
        (0.01, 2000, 0, 4.0),
        (0.064, 2000, 0, 16.0),
        (5.0, 2000, 0, 16.0),
        (5.0, 50, 0, 1.0),  # somebody else's time
        (0.001, 10, 1, 1.0),
        (0.001, 10, 4, 8.0),
        (0.001, 10, 5000, 16.0),
    ],
)
def test_the_interval_follows_the_cost(cost_s, num_calls, num_failures, expected):
    assert interval_s(cost_s, num_calls, num_failures) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("common_s", "every_s", "expected"),
    [
        (100.0, 4.0, 4.0),
        (101.0, 4.0, 3.0),
        (102.99, 4.0, 1.01),
        (103.1, 4.0, 4.9),
        (100.3, 0.5, 0.2),
        (96.0, 16.0, 16.0),
    ],
)
def test_a_copy_is_made_when_the_common_clock_shows_a_multiple_of_the_interval(common_s, every_s, expected):
    assert rest_s(int(common_s * 1e9), every_s) == pytest.approx(expected)


def copied(begun_s: float, cost_s: float, *, rate: float, until_s: float = 600.0, ring: int = 2000) -> set[int]:
    """Blocks of 64 calls that a sidecar has seen whole, in a job of so many calls a second."""
    told: set[int] = set()
    now_s = begun_s
    while now_s < until_s:
        last = int(rate * now_s)
        first = max(0, last - ring)
        told |= {block for block in range(first // 64, last // 64) if block * 64 >= first}
        now_s += cost_s
        now_s += rest_s(int(now_s * 1e9), interval_s(cost_s, min(last, ring)))
    return told


@pytest.mark.parametrize("rate", [100.0, 200.0, 400.0, 800.0])
@pytest.mark.parametrize(("begun_s", "cost_s"), [(0.7, 0.064), (6.0, 0.064), (0.6, 0.05), (3.1, 0.02)])
def test_ranks_copy_the_same_calls_of_a_busy_job_whenever_they_began_and_whatever_it_costs_them(rate, begun_s, cost_s):
    one, other = copied(0.5, 0.064, rate=rate), copied(begun_s, cost_s, rate=rate)
    assert len(one & other) >= 0.95 * min(len(one), len(other))
    share = len(one & other) / (rate * 600 / 64)
    assert share >= 0.9 * min(1.0, 2000 / (16 * rate))


async def test_the_last_copy_survives_a_failure_and_the_failure_is_said():
    told = []
    copies = Copies(Scripted(flight(1), "it is stopped", flight(3)), told.append)
    await copies.now()
    await copies.now()
    assert (flight(1), "it is stopped", 1) == (copies.last, copies.error, copies.num_failures)
    await copies.now()
    assert (flight(3), "", 0) == (copies.last, copies.error, copies.num_failures)
    assert [flight(1), flight(3)] == told


async def test_those_who_ask_together_share_a_copy():
    recorder = Scripted(flight(1), takes_s=0.1)
    copies = Copies(recorder, lambda _: None)
    await asyncio.gather(*(copies.now() for _ in range(10)))
    assert 1 == recorder.num_asked
    assert flight(1) == copies.last


async def test_a_copy_that_was_begun_before_one_asked_is_not_enough():
    recorder = Scripted(flight(1), flight(2), takes_s=0.1)
    copies = Copies(recorder, lambda _: None)
    earlier = asyncio.create_task(copies.now())
    await asyncio.sleep(0.05)
    await asyncio.gather(*(copies.now() for _ in range(10)))
    assert earlier.done()
    assert 2 == recorder.num_asked
    assert flight(2) == copies.last


async def test_one_who_gives_up_waiting_does_not_take_the_copy_from_the_others():
    copies = Copies(Scripted(flight(1), takes_s=0.2), lambda _: None)
    impatient = asyncio.create_task(copies.now())
    patient = asyncio.create_task(copies.now())
    await asyncio.sleep(0.05)
    impatient.cancel()
    await patient
    assert flight(1) == copies.last


async def test_it_goes_on_when_the_listener_fails():
    def fails(_: Flight) -> None:
        raise KeyError("a bug of ours")

    copies = Copies(Scripted(flight(1)), fails)
    running = asyncio.create_task(copies.run())
    await asyncio.sleep(0.1)
    assert not running.done()
    assert "KeyError" in copies.error
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await copies.close()
