"""The coordinator as its own process, and the commands that read it: what a shell sees."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.coordinator.conftest import RUN_ID, TOKEN, SimulatedRank, bound, eventually

from holter import clock
from holter.cli import main
from holter.coordinator.recovery import journal
from holter.records import Nonfinite
from holter.transport.limits import UplinkSettings

HOLTER = (sys.executable, "-m", "holter.cli")
NAN = [Nonfinite(where="loss", name="loss", nans=1, infs=0, numel=1)]


def holter(*arguments: str, cwd: Path | None = None) -> tuple[int, str, str]:
    done = subprocess.run([*HOLTER, *arguments], capture_output=True, text=True, check=False, timeout=20, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


def start(run_dir: Path, listener: socket.socket, *words: str, ranks: int = 1) -> subprocess.Popen[str]:
    """As rank 0's sidecar does: the socket inherited, the token on standard input."""
    process = subprocess.Popen(
        [
            *(*HOLTER, "coordinator", "--run-dir", str(run_dir), "--run-id", RUN_ID, "--world-size", str(ranks)),
            *("--fd", str(listener.fileno()), "--token-file", "-"),
            *words,
        ],
        stdin=subprocess.PIPE,
        text=True,
        env=os.environ | {"HOLTER_LINGER_S": "0"},
        pass_fds=(listener.fileno(),),
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(TOKEN + "\n")
    process.stdin.close()
    return process


def num_incidents(run_dir: Path) -> int:
    return len(list(run_dir.glob("incidents/*/diagnosis.json")))


async def ended(process: subprocess.Popen[str]) -> int:
    return await asyncio.wait_for(asyncio.to_thread(process.wait), 10.0)


@pytest.mark.slow
async def test_a_run_from_start_to_report(tmp_path: Path) -> None:
    run_dir = tmp_path / "holter-runs" / RUN_ID
    listener = bound()
    port = listener.getsockname()[1]
    process = start(run_dir, listener)
    rank = SimulatedRank(0, port, world_size=1)
    rank.attach()
    rank.step(0)
    await eventually(lambda: rank.uplink.is_connected and (run_dir / "run.json").exists())
    await asyncio.sleep(0.5)

    code, output, _ = await asyncio.to_thread(holter, "status", f"127.0.0.1:{port}")
    assert 0 == code
    assert "1 of 1 ranks" in output
    assert "no open incident" in output
    assert (0, "[]\n", "") == await asyncio.to_thread(holter, "report", "--json", cwd=tmp_path)

    rank.step(1, nonfinite=NAN)
    await eventually(lambda: rank.notices)
    code, output, _ = await asyncio.to_thread(holter, "status", "--json", str(run_dir))
    assert (1, True) == (code, json.loads(output)["is_live"])
    live = await asyncio.to_thread(holter, "report", "--json", f"http://127.0.0.1:{port}")
    assert await rank.end(2)
    assert 0 == await ended(process)
    listener.close()
    check_afterwards(tmp_path, run_dir, json.loads(live[1]))


def check_afterwards(tmp_path: Path, run_dir: Path, live: list[dict[str, Any]]) -> None:
    """The coordinator is gone: the files say the same."""
    code, output, _ = holter("report", "--json", cwd=tmp_path)
    (incident,) = json.loads(output)
    assert (1, live) == (code, [incident])
    code, output, _ = holter("report", str(run_dir), incident["id"])
    assert (1, True) == (code, incident["causes"][0]["cause"] in output)
    assert 1 == holter("report", "--html", str(tmp_path / "page.html"), str(run_dir))[0]
    assert (tmp_path / "page.html").read_text().startswith("<!")
    code, output, _ = holter("status", cwd=tmp_path)
    assert 1 == code
    assert f"run {RUN_ID}: ended at" in output
    assert incident["id"] in output
    code, _, error = holter("report", str(run_dir), "20200101T000000-1")
    assert 2 == code
    assert incident["id"] in error


async def test_sigterm_ends_it_cleanly_with_a_last_judgement(tmp_path: Path) -> None:
    listener = bound()
    process = start(tmp_path, listener)
    rank = SimulatedRank(0, listener.getsockname()[1], world_size=1)
    rank.attach()
    await eventually(lambda: rank.uplink.is_connected)
    rank.step(0, nonfinite=NAN)
    await asyncio.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert 0 == await ended(process)
    await rank.uplink.close(0.0)
    listener.close()
    assert json.loads((tmp_path / "run.json").read_text())["ended_at"]
    assert 1 == num_incidents(tmp_path)


async def test_killed_it_leaves_what_it_knew_and_status_says_so(tmp_path: Path) -> None:
    listener = bound()
    process = start(tmp_path, listener)
    await eventually((tmp_path / "run.json").exists)
    process.kill()
    await ended(process)
    listener.close()
    code, output, _ = await asyncio.to_thread(holter, "status", str(tmp_path))
    assert 0 == code
    assert "does not answer" in output


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with bound() as taken:
        port = taken.getsockname()[1]
        code, _, error = holter("coordinator", "--run-dir", str(tmp_path), "--port", str(port))
    assert (
        2,
        f"holter: cannot listen on 127.0.0.1:{port}: Address already in use; see `holter coordinator --help`\n",
    ) == (code, error)


def test_a_run_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "run"
    code, _, error = holter("coordinator", "--run-dir", str(path))
    assert (2, f"holter: cannot use {path} as run directory: Not a directory; see `holter coordinator --help`\n") == (
        code,
        error,
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("status",), "there is no run below ./holter-runs; name a run directory or a coordinator's address"),
        (("report", "nowhere"), "nowhere is neither a run directory nor an address such as host:port"),
        (("report", "."), ". is not a run directory: it has no run.json"),
        (("status", "127.0.0.1:1"), "no coordinator answers at 127.0.0.1:1"),
        (("coordinator", "--run-dir", "x", "--token-file", "/none"), "--token-file /none: cannot be read: "),
        (("coordinator", "--run-dir", "x", "--fd", "987654"), "cannot listen on --fd 987654: Bad file descriptor"),
    ],
)
def test_wrong_use_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert 2 == main(arguments)
    output, error = capsys.readouterr()
    assert "" == output
    assert error.startswith(f"holter: {sentence}")
    assert 1 == error.count("\n")


def test_the_coordinator_imports_no_torch() -> None:
    code = "import sys, holter.coordinator.service, holter.transport.uplink; sys.exit('torch' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False, env=dict(os.environ)).returncode


async def test_nobody_takes_the_place_of_a_rank_while_the_coordinator_is_started_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        first = start(run_dir, listener)
        rank = SimulatedRank(0, port, world_size=1, key="true")
        rank.attach()
        await eventually(lambda: journal.segments(run_dir / "journal"))
        await asyncio.sleep(1.5)
        first.kill()
        first.wait()
        await rank.uplink.close(0.0)
        second = start(run_dir, listener)
        try:
            pretender = SimulatedRank(0, port, world_size=1, key="false", settings=UplinkSettings(replaced_pause_s=1.0))
            await eventually(lambda: pretender.uplink.refusal)
            assert "is kept for the sidecar" in pretender.uplink.refusal
            returned = SimulatedRank(0, port, world_size=1, key="true")
            await eventually(lambda: returned.uplink.is_connected)
            assert not pretender.uplink.is_connected
            await pretender.uplink.close(0.0)
            await returned.uplink.close(0.0)
        finally:
            second.kill()
            second.wait()


async def test_a_second_coordinator_on_one_directory_is_refused_by_hand(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = start(tmp_path, listener)
        try:
            await eventually((tmp_path / "coordinator.json").exists)
            code, _, errors = holter("coordinator", "--run-dir", str(tmp_path))
        finally:
            first.kill()
            first.wait()
    assert (2, True) == (code, f"another coordinator (process {first.pid}) writes to {tmp_path}" in errors)
    assert "Traceback" not in errors


def by_hand(run_dir: Path) -> subprocess.Popen[bytes]:
    words = ["coordinator", "--run-dir", str(run_dir), "--run-id", RUN_ID, "--world-size", "1"]
    return subprocess.Popen([*HOLTER, *words], stderr=subprocess.DEVNULL)


def access(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "coordinator.json").read_text()) if (run_dir / "coordinator.json").exists() else {}


@pytest.mark.parametrize("hours", [-24, 24])
async def test_a_journal_that_was_written_by_another_clock_moves_nothing(hours: int, tmp_path: Path) -> None:
    """As after the clock of the host was set: a file's time tells nothing where the former coordinator's clock is known."""
    for _ in range(2):
        process = by_hand(tmp_path)
        try:
            known = await eventually(lambda pid=process.pid: access(tmp_path).get("pid") == pid and access(tmp_path))
            rank = SimulatedRank(0, int(known["address"].rsplit(":", 1)[1]), world_size=1, token=known["token"])
            rank.attach()
            await eventually(lambda: journal.segments(tmp_path / "journal"))
            await rank.uplink.close(0.0)
        finally:
            process.kill()
            process.wait()
        assert abs(known["clock_base_ns"] - clock.base_ns()) < 10**9, "as the host says now"
        for _, path in journal.segments(tmp_path / "journal"):
            os.utime(path, ns=(clock.wall_ns() + hours * 3600 * 10**9,) * 2)
