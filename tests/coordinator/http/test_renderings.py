"""One rendering for all who ask, for longer the more it cost."""

from typing import Any

import aiohttp
import pytest

from holter import clock
from holter.coordinator.http.renderings import LONGEST_S, MAX_KEPT, RESTS, Renderings


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.made = 0
        monkeypatch.setattr(clock, "monotonic_s", lambda: self.now_s)

    def make(self, cost_s: float) -> int:
        self.now_s += cost_s
        self.made += 1
        return self.made


def test_a_rendering_is_given_out_for_as_long_as_it_cost_times_twenty(monkeypatch: pytest.MonkeyPatch) -> None:
    time, renderings = Clock(monkeypatch), Renderings()
    assert [1] * 30 == [renderings.get("/status", lambda: time.make(0.1)) for _ in range(30)]
    time.now_s += RESTS * 0.1 - 0.01
    assert 1 == renderings.get("/status", lambda: time.make(0.1))
    time.now_s += 0.02
    assert 2 == renderings.get("/status", lambda: time.make(0.1))


def test_what_costs_nothing_is_always_new_and_nothing_is_older_than_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time, renderings = Clock(monkeypatch), Renderings()
    assert [1, 2] == [renderings.get("/sd", lambda: time.make(0.0)) for _ in range(2)]
    renderings.get("/metrics", lambda: time.make(60.0))
    time.now_s += LONGEST_S
    assert 4 == renderings.get("/metrics", lambda: time.make(60.0))


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    time, renderings = Clock(monkeypatch), Renderings()
    for number in range(2 * MAX_KEPT):
        renderings.get(f"report {number}", lambda: time.make(0.01))
    assert MAX_KEPT == len(renderings._kept)


async def test_scrapers_that_ask_for_odd_forms_share_a_rendering(run_coordinator: Any) -> None:
    running = await run_coordinator()
    url = f"http://127.0.0.1:{running.port}/metrics"
    async with aiohttp.ClientSession() as session:
        for number in range(8):
            async with session.get(url, headers={"Accept": f"text/plain;q=0.{number}"}) as answer:
                assert 200 == answer.status
    assert 1 == len(running.coordinator._pages._renderings._kept)
