"""Nobody halts a job without the key to halt: not another user of the host, not another host, and not with the key to report."""

import asyncio
import ctypes
import http.client
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.conftest import SCRIPT

from holter.transport import wire

pytestmark = [pytest.mark.job, pytest.mark.release]
NOBODY = 65534
CLONE_NEWNET = 0x40000000


def elsewhere(become: Callable[[], None], attack: Callable[[], Any]) -> Any:
    """What a process finds that has become somebody else; what it raises is found too."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become()
            found = attack()
        except BaseException as error:  # noqa: BLE001 - told to the parent
            found = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        content = told.read()
    os.waitpid(child, 0)
    return json.loads(content)


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def tried(call: Callable[[], Any]) -> str:
    try:
        return f"done: {call()!r:.80}"
    except OSError as error:
        return type(error).__name__


def asked(address: str, **headers: str) -> int:
    """The answer to a request to halt."""
    connection = http.client.HTTPConnection(address, timeout=5)
    body = json.dumps({"reason": "I want it", "by": "root"})
    connection.request("POST", "/api/v1/halt", body, headers)
    return connection.getresponse().status


def halts(address: str, report_token: str) -> list[int]:
    """Every way that comes to mind, without the key to halt."""
    report = f"Bearer {report_token}"
    ways = [
        {}, {"Authorization": report}, {"Authorization": report_token}, {"Authorization": "Bearer "}, {"Authorization": "Bearer \u00e9"},
        {"Cookie": f"holter_read={report_token}"}, {"Authorization": report, "Origin": f"http://{address}"},
        {"Authorization": report, "X-Forwarded-For": "127.0.0.1"}, {"Authorization": report, "Host": "localhost"},
    ]  # fmt: skip
    return [asked(address, **way) for way in ways]


async def speak_for(address: str, token: str, rank: int) -> str:
    """Why a pretender was sent away; empty: it was not."""
    hello = wire.Hello(
        run_id="", rank=rank, world_size=2, host="h", rank_pid=1, sidecar_pid=1, metrics_address="", key="mine"
    )
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://{address}/ingest", headers=headers) as line,
    ):
        await line.send_bytes(wire.encode(hello))
        frame = await line.receive(timeout=5)
        return str(frame.extra) if frame.type is aiohttp.WSMsgType.CLOSE else ""


def secrets_of(run_dir: Path) -> dict[str, str]:
    access = json.loads((run_dir / "coordinator.json").read_text())
    return {
        "report": access["token"],
        "halt": access["halt_token"],
        "address": access["address"].removeprefix("http://"),
    }


def attack_over_the_network(address: str, report_token: str) -> dict[str, Any]:
    return {
        "halts": halts(address, report_token),
        "rank 0": asyncio.run(speak_for(address, report_token, 0)),
    }


def is_unharmed(job: Any, status: Callable[[Any], dict[str, Any]], found: dict[str, Any]) -> None:
    assert {401, 403, 421} >= set(found["halts"])
    assert "another process speaks for rank 0" in found["rank 0"]
    told = status(job)
    assert (None, [], 2) == (told["halt"], told["incidents"], len(told["ranks"]))
    assert not (job.run_dir / "halt.json").exists()


def test_another_user_of_the_host_halts_nothing_and_reads_no_key(forks: Any, status: Any, wait_for: Any) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    folder = Path(tempfile.mkdtemp(prefix="holter-strangers-"))
    folder.chmod(0o755)
    try:
        job = forks.start(SCRIPT, "--steps", 1_000_000, env={"HOLTER_RUN_DIR": str(folder / "run")})
        wait_for(lambda: len(status(job)["ranks"]) == 2, 90, "two ranks")
        known = secrets_of(job.run_dir)
        pids = job.pids("coordinator") + job.pids("sidecar")

        def attack() -> dict[str, Any]:
            lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
            return attack_over_the_network(known["address"], known["report"]) | {
                "keys on a command line": [key for key in (known["report"], known["halt"]) if key in " ".join(lines)],
                "files": [tried((job.run_dir / name).read_bytes) for name in ("coordinator.json", "run.json", "logs")],
                "listing": tried(lambda: list(job.run_dir.iterdir())),
                "environments": {tried(Path(f"/proc/{pid}/environ").read_bytes) for pid in pids} == {"PermissionError"},
                "signals": {tried(lambda pid=pid: os.kill(pid, 9)) for pid in pids} == {"PermissionError"},
            }

        found = elsewhere(become_nobody, attack)
        assert isinstance(found, dict), found
        assert [] == found["keys on a command line"]
        assert {"PermissionError"} == {*found["files"], found["listing"]}
        assert found["environments"]
        assert found["signals"]
        is_unharmed(job, status, found)
        assert 202 == asked(known["address"], Authorization=f"Bearer {known['halt']}"), "who has the key may"
        job.end()
        job.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_another_host_halts_nothing(forks: Any, status: Any, wait_for: Any, other_host: Any) -> None:
    job = forks.start(SCRIPT, "--steps", 1_000_000, env={"HOLTER_LISTEN_HOST": other_host.ours})
    wait_for(lambda: len(status(job)["ranks"]) == 2, 90, "two ranks")
    known = secrets_of(job.run_dir)
    assert known["address"].startswith(other_host.ours)

    def go_there() -> None:
        descriptor = os.open(f"/run/netns/{other_host.name}", os.O_RDONLY)
        assert 0 == ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET)

    found = elsewhere(go_there, lambda: attack_over_the_network(known["address"], known["report"]))
    assert isinstance(found, dict), found
    is_unharmed(job, status, found)
    loopback = re.sub(r".*:", "127.0.0.1:", known["address"])
    unreachable = elsewhere(go_there, lambda: tried(lambda: asked(loopback)))
    assert unreachable in {"ConnectionRefusedError", "OSError"}
    job.end()
    job.wait()
