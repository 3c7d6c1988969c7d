"""The corpus' jobs, two at a time: a test waits for its own, the others run meanwhile."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import corpus
import pytest

AT_ONCE = 3
"""Jobs of two ranks; starting one is mostly importing torch, which leaves cores idle now and then."""


@pytest.fixture(scope="session")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, launcher_type: Any
) -> Iterator[Callable[[corpus.Job], Any]]:
    """The job after its end; all that the session needs are started when the first is asked for."""
    launchers = []

    def run(job: corpus.Job) -> Any:
        launcher = launcher_type(tmp_path_factory.mktemp(job.name))
        launchers.append(launcher)
        return launcher.run(
            corpus.SCRIPTS / job.script, *job.arguments, by="scheduler", options=job.options, env=job.env
        )

    wanted = [item.callspec.params["job"] for item in request.session.items if "job" in _params(item)]
    pool = ThreadPoolExecutor(AT_ONCE)
    futures: dict[str, Future[Any]] = {job.name: pool.submit(run, job) for job in wanted}
    yield lambda job: futures[job.name].result()
    pool.shutdown(wait=False, cancel_futures=True)
    for launcher in launchers:
        launcher.stop()


def _params(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})
