"""How long a scrape of a coordinator takes while many ranks report to it.

    python tests/bench/bench_scrape.py [--ranks 1000] [--scrapes 30] [--step-s 1.0] [--json]

The coordinator is the real process with its real detectors. The ranks are simulated by one other process, over real WebSockets: each
completes a step a second, with roots, loss and norm, and a few tell vitals of 200 modules. A scrape is one GET of /metrics, from connecting
to the last byte, in both formats in turn. A peer in the same run: as many series rendered by prometheus_client from a registry of gauges.
Exits with 1 when the median is above the limit, or when what was scraped is not what the ranks said.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from holter import clock
from holter.records import Attached, Body, Census, ModuleVitals, Observation, Phase, StepDone, TensorEntry, Vitals
from holter.transport import wire
from holter.transport.limits import settings_for
from holter.transport.uplink import RankUplink

LIMIT_S = 0.2
FORMATS = ("text/plain", "application/openmetrics-text; version=1.0.0")
NUM_MODULES = 200
NUM_SPEAKERS = 8
SETTLING_STEPS = 3
DEADLINE_S = 120.0


async def be_the_ranks(address: str, token: str, number: int, step_s: float) -> None:
    """Until killed: all ranks of a job, a step each every `step_s` seconds."""
    uplinks = [_uplink(address, token, rank, number) for rank in range(number)]
    for rank, uplink in enumerate(uplinks):
        uplink.start()
        for body in (_attached(rank, number), _census()):
            uplink.send(_seen(rank, 0, body))
    step = 0
    while True:
        began = time.perf_counter()
        for rank, uplink in enumerate(uplinks):
            uplink.beat(wire.Heartbeat(step + 1, Phase.DATA, 0, clock.wall_ns()))
            uplink.send(_seen(rank, step, _done(rank, step)))
            if rank < NUM_SPEAKERS and step % 4 == 0:
                uplink.send(_seen(rank, step, _vitals(step)))
            if rank % 50 == 0:
                await asyncio.sleep(0)
        step += 1
        await asyncio.sleep(max(0.0, step_s - (time.perf_counter() - began)))


def _uplink(address: str, token: str, rank: int, number: int) -> RankUplink:
    hello = wire.Hello(
        run_id="bench",
        rank=rank,
        world_size=number,
        host=f"node-{rank // 8}",
        rank_pid=1000 + rank,
        sidecar_pid=1,
        metrics_address=f"node-{rank // 8}:{9400 + rank % 8}",
    )
    return RankUplink(address.removeprefix("http://"), token, hello, lambda _: None, settings_for(number))


def _seen(rank: int, step: int, body: Body) -> Observation:
    return Observation(rank=rank, step=step, at_ns=clock.wall_ns(), body=body)


def _attached(rank: int, number: int) -> Attached:
    return Attached(
        pid=1000 + rank,
        host=f"node-{rank // 8}",
        world_size=number,
        local_rank=rank % 8,
        command=["train.py"],
        versions={},
    )


def _census() -> Census:
    entries = [TensorEntry(f"layer.{n}.weight", (4, 4), "float32", True, False, 0) for n in range(NUM_MODULES)]
    return Census(
        model=0,
        wrapper="DistributedDataParallel",
        is_replicated=True,
        optimizers=["AdamW"],
        backward_order=list(reversed(range(NUM_MODULES))),
        part=0,
        parts=1,
        entries=entries,
    )


def _done(rank: int, step: int) -> StepDone:
    return StepDone(
        seconds=0.9,
        phase_seconds={},
        micro_steps=1,
        loss=2.0 + 1.0 / (step + 1),
        gradient_norm=0.7,
        learning_rate=1e-3,
        batch=step * 100_003 + rank,
        roots={"parameters_before": 5000 + step, "gradients": 9000 + step, "parameters_after": 5001 + step},
        nonfinite=[],
        overhead_ratio=0.004,
        check_interval=1,
    )


def _vitals(step: int) -> Vitals:
    exponents = [0] * 12 + [100] * 8 + [0] * 12
    modules = [
        ModuleVitals(
            f"layer.{n}", "float32", 16, 2.0, 0.1 + n / 1000 + 0.1 / (step + 1), 0, 0, 0.2, 1e-3, 1, 1e-3, exponents
        )
        for n in range(NUM_MODULES)
    ]
    return Vitals(view="replicated", modules=modules, num_trainable=NUM_MODULES)


def get(url: str, accept: str = "") -> tuple[float, bytes]:
    """Seconds, and what came."""
    request = urllib.request.Request(url, headers={"Accept": accept})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=30) as answer:
        body = answer.read()
    return time.perf_counter() - began, body


@contextlib.contextmanager
def reporting(num_ranks: int, step_s: float, folder: Path) -> Iterator[str]:
    """Both processes, from when every rank reports; the coordinator's address."""
    command = [sys.executable, "-m", "holter.cli", "coordinator", "--run-dir", str(folder / "run"), "--run-id", "bench"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HOLTER")}
    coordinator = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
    ranks: subprocess.Popen[bytes] | None = None
    try:
        access = folder / "run" / "coordinator.json"
        _until(access.exists, "the coordinator")
        known = json.loads(access.read_text())
        address = known["address"]
        words = ["--be", address, "--ranks", str(num_ranks), "--step-s", str(step_s)]
        ranks = subprocess.Popen([sys.executable, __file__, *words], stdin=subprocess.PIPE)
        assert ranks.stdin is not None
        ranks.stdin.write(known["token"].encode() + b"\n")
        ranks.stdin.close()
        _until(lambda: _num_at(address, SETTLING_STEPS) == num_ranks, f"{num_ranks} ranks")
        yield address
    finally:
        for process in (ranks, coordinator):
            if process is not None:
                process.kill()
                process.wait()


def measured(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Scrape while every rank reports, and check what was scraped."""
    with reporting(arguments.ranks, arguments.step_s, folder) as address:
        return _scraped(address, arguments.scrapes) | {"ranks": arguments.ranks}


def _scraped(address: str, scrapes: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {accept: [] for accept in FORMATS}
    body = b""
    for number in range(scrapes):
        for accept in FORMATS:
            seconds, answer = get(f"{address}/metrics", accept)
            times[accept].append(seconds)
            body = answer if accept == FORMATS[0] else body
        time.sleep(0.1 + 0.07 * (number % 3))
    families = {family.name: family.samples for family in text_string_to_metric_families(body.decode())}
    num_series = sum(len(samples) for samples in families.values())
    every = sorted(times[FORMATS[0]] + times[FORMATS[1]])
    return {
        "series": num_series,
        "bytes": len(body),
        "text_ms": statistics.median(times[FORMATS[0]]) * 1e3,
        "openmetrics_ms": statistics.median(times[FORMATS[1]]) * 1e3,
        "worst_ms": every[-1] * 1e3,
        "peer_ms": _peer(num_series) * 1e3,
        "sidecars_up": sum(sample.value for sample in families["holter_sidecar_up"]),
        "modules": len(families["holter_module_gradient_norm"]),
        "incidents": len(families.get("holter_incident_open", [])),
    }


def _peer(num_series: int) -> float:
    """The least that a Python exporter of as many series takes, without a network."""
    registry = CollectorRegistry()
    gauge = Gauge("peer", "One.", ["run_id", "rank"], registry=registry)
    for rank in range(num_series):
        gauge.labels("bench", str(rank)).set(rank)
    times = []
    for _ in range(9):
        began = time.perf_counter()
        generate_latest(registry)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _num_at(address: str, step: int) -> int:
    try:
        status = json.loads(get(f"{address}/api/v1/status")[1])
    except OSError:
        return 0
    return sum((rank["step"] or 0) >= step for rank in status["ranks"])


def _until(is_there: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_there():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {DEADLINE_S:.0f} s for {what}")
        time.sleep(0.2)


def main() -> int:
    """Print the figures; 1 when they are not what is promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--scrapes", type=int, default=30)
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--be", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be:
        asyncio.run(be_the_ranks(arguments.be, sys.stdin.readline().strip(), arguments.ranks, arguments.step_s))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = measured(arguments, Path(folder))
    is_right = (arguments.ranks, 20, 0) == (found["sidecars_up"], found["modules"], found["incidents"])
    is_quick = max(found["text_ms"], found["openmetrics_ms"]) < LIMIT_S * 1e3
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print(
            f"scrape of {found['ranks']} reporting ranks, {found['series']} series, {found['bytes'] / 1024:.0f} KiB: "
            f"median {found['text_ms']:.0f} ms as text, {found['openmetrics_ms']:.0f} ms as OpenMetrics, worst "
            f"{found['worst_ms']:.0f} ms; prometheus_client alone renders as many gauges in {found['peer_ms']:.0f} ms"
        )
        if not is_right:
            print(
                f"WRONG: {found['sidecars_up']:.0f} sidecars, {found['modules']} modules, {found['incidents']} incidents"
            )
        if not is_quick:
            print(f"TOO SLOW: the limit is {LIMIT_S * 1e3:.0f} ms")
    return int(not (is_right and is_quick))


if __name__ == "__main__":
    sys.exit(main())
