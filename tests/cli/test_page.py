"""A run that is over, served again from what it left."""

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.coordinator.conftest import RUN_ID, attached, census, done, exited, run_coordinator
from tests.coordinator.recovery.test_replay import NAN, record

from holter.cli import main
from holter.halting import halt_record
from holter.halting.halt_record import HaltRecord

__all__ = ["run_coordinator"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps of two ranks; rank 1 ends badly after a NaN."""
    run_dir = tmp_path_factory.mktemp("past") / "run"
    rounds = [[attached(rank) for rank in range(2)], [census(rank) for rank in range(2)]]
    rounds += [[done(rank, step) for rank in range(2)] for step in range(19)]
    rounds += [[done(0, 19), done(1, 19, nonfinite=[NAN])], [exited(0, 20), exited(1, 20, number=9)]]
    record(run_dir, rounds)
    halt = HaltRecord(
        cause="nonfinite_gradient", ranks=[1], step=19, checkpoint=None, verdict="unknown", at="", why="kept"
    )
    halt_record.write(run_dir, halt)
    return run_dir


def contents(run_dir: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(run_dir.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def served(recorded: Path) -> Iterator[str]:
    before = contents(recorded)
    command = [sys.executable, "-m", "holter.cli", "page", str(recorded), "--beside", str(recorded)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(f"the page of {RUN_ID}: http://127.0.0.1:")
    yield line.split(": ")[1].split("/   ")[0]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (0, "") == (process.returncode, errors)
    assert before == contents(recorded), "a record is looked at, not written to"


def get(address: str, path: str) -> Any:
    with urllib.request.urlopen(f"{address}{path}", timeout=10) as answer:
        return json.load(answer) if answer.headers.get_content_type() == "application/json" else answer.read().decode()


def snapshot(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}/api/v1/events", timeout=10) as answer:
        for raw in answer:
            if raw.startswith(b"data: "):
                return json.loads(raw.removeprefix(b"data: "))
    raise AssertionError("nothing was told")


def test_the_page_of_the_past_has_everything_that_was_known(served: str) -> None:
    told = snapshot(served)
    about = told["about"]
    assert (False, RUN_ID, 20, 2) == (about["is_live"], about["run_id"], about["step"], about["world_size"])
    assert about["ended_at"] is not None
    assert ("done", 19, "kept") == tuple(about["halt"][name] for name in ("course", "step", "reason"))
    assert list(range(20)) == [row[0] for row in told["series"]["loss"]]
    # 2: ended as it should, 3: died.
    assert [2, 3] == told["columns"]["state"]
    assert {"critical"} <= {one["severity"] for one in told["incidents"]}
    kinds = [one["kind"] for one in told["timeline"]]
    assert {"finding", "incident"} <= set(kinds)
    assert [] == about["warnings"]


def test_another_runs_numbers_lie_beside_its_own(served: str) -> None:
    told = snapshot(served)
    assert RUN_ID == told["other"]["name"]
    assert told["series"]["loss"]
    assert told["series"] == told["other"]["series"]


def test_its_incidents_can_be_read_in_full_and_nothing_can_be_asked(served: str, recorded: Path) -> None:
    (first, *_) = snapshot(served)["incidents"]
    assert "What to do" in get(served, f"/api/v1/incidents/{first['id']}/report")
    assert first["id"] == get(served, f"/api/v1/incidents/{first['id']}")["id"]
    assert 20 == get(served, "/api/v1/status")["ranks"][0]["step"]
    token = json.dumps({"reason": "x"}).encode()
    request = urllib.request.Request(f"{served}/api/v1/halt", token, {"Authorization": "Bearer "})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=10)
    assert recorded.is_dir()


async def test_a_run_that_lives_has_a_page_of_its_own(
    run_coordinator: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    running = await run_coordinator()
    await asyncio.to_thread(_wait_for, tmp_path / "run.json")
    assert 0 == await asyncio.to_thread(main, ["page", str(tmp_path)])
    assert f"run {RUN_ID} lives; its page is http://127.0.0.1:{running.port}/\n" == capsys.readouterr().out


def _wait_for(path: Path) -> None:
    until = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["page", "nowhere"], "holter: nowhere is neither a run directory nor an address such as host:port; "),
        (["page", "127.0.0.1:1"], "holter: no coordinator answers at 127.0.0.1:1; "),
    ],
)
def test_wrong_use_is_a_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(arguments)
    assert capsys.readouterr().err.startswith(sentence)


def test_a_port_that_is_taken_is_a_sentence(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["page", str(recorded), "--port", "99999"])
    assert capsys.readouterr().err.startswith("holter: argument --port: '99999' is no port between 0 and 65535; ")
