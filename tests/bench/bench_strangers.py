"""How long judging waits while strangers hold connections and scrapers scrape.

    python tests/bench/bench_strangers.py [--ranks 1000] [--strangers 2000] [--scrapers 10] [--seconds 30]

The coordinator is the real process, the ranks are those of bench_scrape.py. Strangers open connections, show no token, send nothing or half a request, and open
another one when they are pushed out. Scrapers read /metrics and /api/v1/status as fast as they get answers, each with an Accept header of its own.
Judging delay: from the moment at which a report was received to the end of the judgement that looked at it, by the journal's own marks; with the
strangers, and as long without. Exits with 1 when its 99th percentile is above the limit, or a rank was kept out.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import aiohttp
from bench_scrape import get, reporting

from holter import clock
from holter.coordinator.recovery import journal
from holter.coordinator.recovery.journal import Entry
from holter.records import Judged, StepDone

LIMIT_S = 0.5


async def be_strangers(address: str, num: int, num_scrapers: int, seconds: float) -> dict[str, float]:
    """Hold connections and scrape for so long; how often they were pushed out and answered."""
    found = {"connections": 0, "scrapes": 0}
    host, port = address.removeprefix("http://").split(":")
    until_s = time.monotonic() + seconds

    async def hold(number: int) -> None:
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection(host, int(port))
                found["connections"] += 1
                writer.write(b"GET /api/v1/status HTTP/1.1\r\nHost: 127" if number % 2 else b"")
                async with asyncio.timeout(max(0.1, until_s - time.monotonic())):
                    await reader.read()
                writer.close()
            await asyncio.sleep(1.0)

    async def scrape(number: int) -> None:
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < until_s:
                path = "/metrics" if number % 2 else "/api/v1/status"
                accept = {"Accept": f"text/plain;q=0.{found['scrapes']}{number}"}
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{address}{path}", headers=accept) as answer:
                        await answer.read()
                        found["scrapes"] += 1
                await asyncio.sleep(0.05)

    await asyncio.gather(*(hold(one) for one in range(num)), *(scrape(one) for one in range(num_scrapers)))
    return found


def delays_s(entries: Iterable[Entry], since_ns: int) -> list[float]:
    """Of every step that was reported since, until the next judgement; ascending."""
    found: list[float] = []
    waiting: list[int] = []
    for entry in entries:
        if isinstance(entry.observation.body, Judged):
            found += [(entry.received_ns - heard_ns) / 1e9 for heard_ns in waiting]
            waiting = []
        elif isinstance(entry.observation.body, StepDone) and entry.received_ns >= since_ns:
            waiting.append(entry.received_ns)
    return sorted(found)


def percentile(values: list[float], share: float) -> float:
    """Of ascending values."""
    return values[min(len(values) - 1, int(len(values) * share))]


def main() -> int:
    """Print the figures; 1 when they are not what is promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--strangers", type=int, default=2000)
    parser.add_argument("--scrapers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, reporting(arguments.ranks, 1.0, Path(folder)) as address:
        began_ns = clock.wall_ns()
        time.sleep(arguments.seconds)
        strange_ns = clock.wall_ns()
        seen = asyncio.run(be_strangers(address, arguments.strangers, arguments.scrapers, arguments.seconds))
        time.sleep(2.0)
        lines = [
            line for line in get(f"{address}/metrics")[1].decode().splitlines() if line.startswith("holter_sidecar_up{")
        ]
        connected = sum(line.endswith(" 1.0") for line in lines)
        entries = list(journal.read(Path(folder) / "run" / "journal"))
    alone = delays_s((entry for entry in entries if entry.received_ns < strange_ns), began_ns)
    beside = delays_s(entries, strange_ns)
    print(
        f"judging delay of {arguments.ranks} ranks, {len(beside)} reports: median {percentile(beside, 0.5) * 1e3:.0f} ms, p99 {percentile(beside, 0.99) * 1e3:.0f} ms, "
        f"worst {beside[-1] * 1e3:.0f} ms beside {arguments.strangers} strangers ({seen['connections']:.0f} connections) and {arguments.scrapers} scrapers "
        f"({seen['scrapes']:.0f} answers); without them median {percentile(alone, 0.5) * 1e3:.0f} ms, p99 {percentile(alone, 0.99) * 1e3:.0f} ms; "
        f"{connected} of {len(lines)} sidecars are up"
    )
    return int(percentile(beside, 0.99) > LIMIT_S or connected != arguments.ranks)


if __name__ == "__main__":
    sys.exit(main())
