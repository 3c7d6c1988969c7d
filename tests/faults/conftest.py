"""The corpus' jobs, a few at a time: a test waits for its own, the others run meanwhile."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import corpus
import pytest

AT_ONCE = 3
"""Jobs of two ranks; now and then they wait for each other and leave a core idle."""


@pytest.fixture(scope="session")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, nursery_type: Any
) -> Iterator[Callable[[corpus.Job], Any]]:
    """The job after its end; all that the session needs are started when the first is asked for."""
    wanted = [item.callspec.params["job"] for item in request.session.items if "job" in _params(item)]
    with nursery_type() as nursery:
        pool = ThreadPoolExecutor(AT_ONCE)
        futures: dict[str, Future[Any]] = {
            job.name: pool.submit(corpus.run, job, nursery, tmp_path_factory.mktemp(job.name)) for job in wanted
        }
        yield lambda job: futures[job.name].result()
        pool.shutdown(wait=False, cancel_futures=True)


def _params(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})
