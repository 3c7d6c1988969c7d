"""All runs of a server in one place: the page, its JSON, its metrics, and `holter runs nats://…`."""

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from tests.coordinator.conftest import eventually
from tests.transport.nats.conftest import Place

from holter.coordinator.http.hub import in_order, page
from holter.records import Nonfinite
from nats_servers import Server

NAN = [Nonfinite(where="loss", name="loss", nans=1, infs=0, numel=1)]
EVIL = "<script>x</script>"


def one(run_id: str, state: str = "running", **about: Any) -> dict[str, Any]:
    return {"run_id": run_id, "state": state, "token": 1, "started_at": "2026-11-18T10:00:00Z"} | about


def test_what_is_wrong_comes_first_and_what_is_over_last():
    runs = [one("over", "ended", num_open=1, is_critical=True), one("fine"), one("bad", is_critical=True, num_open=1)]
    assert ["bad", "fine", "over"] == [found["run_id"] for found in in_order(runs)]


def test_what_runs_say_of_themselves_is_no_markup_and_only_web_addresses_are_links():
    incident = {"is_open": True, "severity": "critical", "title": EVIL, "ranks": EVIL, "step": 3}
    shown = page(
        [one(EVIL, page="javascript:alert(1)", run_dir=EVIL, host=EVIL, incidents=[incident], num_open=1)], EVIL, 1.0
    )
    assert "<script" not in shown
    assert "javascript:" not in shown
    assert "<script" not in page([one("r", state=EVIL)], "", 1.0)
    assert "2 known" in page([one("r"), one("broken", page="http://[::1")], "", 1.0), "one run hides no other"
    assert 'href="http://node-a:1"' in page([one("r", page="http://node-a:1")], "", 1.0)


def test_what_cannot_be_read_is_never_shown_as_health():
    assert "the runs cannot be read: no server" in page([one("r")], "no server", 20.0)
    assert "no open critical incident" not in page([one("r")], "", 60.0)
    assert "1 of 2 runs without a coordinator" in page([one("r"), one("gone", "silent")], "", 1.0)


def fetched(address: str) -> str:
    with urllib.request.urlopen(address, timeout=5) as found:
        return str(found.read().decode())


@pytest.mark.slow
async def test_two_runs_on_one_server_are_seen(server: Server, place_at: Callable[..., Place]) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HOLTER")}
    places = [place_at(server.address, run_id=name) for name in ("healthy", "sick.run")]
    processes = [place.coordinator() for place in places]
    for place in places:
        for rank in range(2):
            place.rank(rank).attach()
            place.ranks[rank].step(0)
    hub = subprocess.Popen(  # noqa: ASYNC220 - it starts at once
        [sys.executable, "-m", "holter.cli", "hub", server.address], stderr=subprocess.PIPE, text=True, env=environ
    )
    try:
        assert hub.stderr is not None
        said = await asyncio.to_thread(hub.stderr.readline)
        address = re.search(r"http://\S+", said)
        assert address is not None, said
        sick = places[1]
        await eventually(lambda: all(rank.uplink.is_connected for rank in [*sick.ranks, *places[0].ranks]), 60.0)
        sick.ranks[1].step(1, nonfinite=NAN)
        sick.ranks[0].step(1)
        await eventually(sick.incidents, 60.0)

        def runs() -> dict[str, Any]:
            return {found["run_id"]: found for found in json.loads(fetched(f"{address[0]}/api/v1/runs"))["runs"]}

        for _ in range(100):
            found = await asyncio.to_thread(runs)
            if len(found) == 2 and found["sick.run"].get("num_open") and found["healthy"].get("connected") == 2:
                break
            await asyncio.sleep(0.2)
        assert (True, "running", 2) == tuple(found["sick.run"][key] for key in ("is_critical", "state", "connected"))
        assert (False, "running", 0) == tuple(
            found["healthy"][key] for key in ("is_critical", "state", "num_incidents")
        )
        text = await asyncio.to_thread(fetched, address[0])
        assert "1 of 2 runs with an open critical incident" in text
        assert text.index("sick.run") < text.index("healthy")
        metrics = await asyncio.to_thread(fetched, f"{address[0]}/metrics")
        assert re.search(r'holter_incident_open\{[^}]*run_id="sick.run"[^}]*\} 1', metrics)
        assert 'holter_hub_run{run_id="healthy",state="running"} 1' in metrics
        assert 1 == metrics.count("# TYPE holter_job_sidecars ")
        listed = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "holter.cli", "runs", server.address, "--json"],
            capture_output=True,
            text=True,
            env=environ,
            timeout=60,
        )
        assert 1 == listed.returncode, listed.stderr
        assert {"sick.run": "running", "healthy": "running"} == {
            found["run_id"]: found["state"] for found in json.loads(listed.stdout)
        }
        for process in processes:
            process.end()
        for _ in range(150):
            found = await asyncio.to_thread(runs)
            if {one["state"] for one in found.values()} == {"silent"}:
                break
            await asyncio.sleep(0.2)
        assert {"silent"} == {one["state"] for one in found.values()}, "nobody renews their leases"
    finally:
        hub.terminate()
        hub.wait(timeout=20)
