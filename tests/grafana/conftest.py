"""One Prometheus for all tests of dashboards: it has scraped two real jobs, of which one met a NaN and the other was halted at the end."""

import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_server import Prometheus
from standin_devices import devices

SCRIPT = Path(__file__).parent / "scripts" / "scraped.py"
HEALTHY, SPOILED = "healthy", "spoiled"
FAULT = ("--late", "60", "120", "--save-at", "130", "--nan-at", "220")
SCRAPED_S = 8.0
"""After everything was seen: long enough for rates, and for a module's numbers to be told again."""


@dataclass(frozen=True)
class Scraped:
    """What there is to ask."""

    prometheus: Prometheus
    start_s: float
    end_s: float
    """While both jobs still trained."""
    halted_s: float
    """When the halt of the healthy one had been scraped."""


@pytest.fixture(scope="session")
def scraped(tmp_path_factory: pytest.TempPathFactory, nursery: Any) -> Iterator[Scraped]:
    """Two jobs of two ranks, coordinators and sidecars scraped until the incident was; then the jobs are ended."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not on PATH")
    jobs = {}
    for name, arguments in ((HEALTHY, ()), (SPOILED, FAULT)):
        env = {"HOLTER_RUN_ID": name, "HOLTER_ACTION": "notify", "HOLTER_LINGER_S": "8"}
        jobs[name] = nursery.start(tmp_path_factory.mktemp(name), [str(SCRIPT), *arguments], env=env)
    try:
        addresses = {name: _addresses(job.coordinator()) for name, job in jobs.items()}
        with devices(SPOILED) as standin:
            targets = {
                "coordinators": [them[0] for them in addresses.values()],
                "sidecars": [address for them in addresses.values() for address in them[1:]],
                "devices": [standin.address],
            }
            with Prometheus(tmp_path_factory.mktemp("prometheus"), targets, standin.relabelling()) as prometheus:
                start_s = time.time()
                critical = f'holter_incident_open{{run_id="{SPOILED}", severity="critical"}}'
                _wait(lambda: prometheus.at(critical, time.time()), "an incident")
                time.sleep(SCRAPED_S)
                end_s = time.time() - 1
                jobs[SPOILED].end()
                _halt(jobs[HEALTHY])
                halted = f'holter_halts_total{{run_id="{HEALTHY}", outcome="completed"}} == 1'
                _wait(lambda: prometheus.at(halted, time.time()), "the halt")
                # A span is asked for second by second: the next one sees it.
                time.sleep(2)
                yield Scraped(prometheus, start_s, end_s, time.time())
    finally:
        for job in jobs.values():
            job.wait(lambda _: True)


def _addresses(coordinator: str) -> list[str]:
    """The coordinator's and its two sidecars'."""
    found: list[str] = []

    def ask() -> bool:
        with urllib.request.urlopen(f"http://{coordinator}/api/v1/status", timeout=5) as answer:
            found[:] = [rank["metrics_address"] for rank in json.load(answer)["ranks"]]
        return len(found) == 2 and all(found)

    _wait(ask, "two sidecars")
    return [coordinator, *found]


def _halt(job: Any) -> None:
    """As an operator does: with a checkpoint, and the coordinator stays for a while to tell of it."""
    access = json.loads((job.run_dir / "coordinator.json").read_text())
    request = urllib.request.Request(f"{access['address']}/api/v1/halt", b'{"reason": "seen enough"}')
    request.add_header("Authorization", f"Bearer {access['halt_token']}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert 202 == answer.status


def _wait(is_there: Callable[[], object], what: str, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.2)
