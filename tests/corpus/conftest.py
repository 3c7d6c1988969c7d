"""The corpus' jobs, a few at a time: a test waits for its own, the others run meanwhile."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import hangs
import pytest

import corpus

AT_ONCE = 3
"""Jobs of two ranks: two cores are then busy, and none waits for another's end."""
HANGING_AT_ONCE = 3
"""Most of these wait most of the time; but some keep a core busy for ever, and times are measured."""


@pytest.fixture(scope="session")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, nursery: Any
) -> Iterator[Callable[[corpus.Job], Any]]:
    """The job after its end; all that the session needs are started when the first is asked for."""
    wanted = [item.callspec.params["job"] for item in request.session.items if "job" in _params(item)]
    pool = ThreadPoolExecutor(AT_ONCE)
    futures: dict[str, Future[Any]] = {
        job.name: pool.submit(corpus.run, job, nursery, tmp_path_factory.mktemp(job.name)) for job in wanted
    }
    yield lambda job: futures[job.name].result()
    pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture(scope="session")
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, nursery: Any
) -> Iterator[Callable[[hangs.Watched], hangs.Told]]:
    """What was said of a job that may hang, live and after its end."""
    wanted = [item.callspec.params["watched"] for item in request.session.items if "watched" in _params(item)]
    pool = ThreadPoolExecutor(HANGING_AT_ONCE)
    futures: dict[str, Future[hangs.Told]] = {
        job.name: pool.submit(hangs.run, job, nursery, tmp_path_factory.mktemp(job.name), time.monotonic)
        for job in wanted
    }
    yield lambda job: futures[job.name].result()
    pool.shutdown(wait=False, cancel_futures=True)


def _params(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})
