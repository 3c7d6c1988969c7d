"""With two files nothing goes over the network in the clear, and nobody else's certificate is believed."""

import asyncio
import socket
import ssl
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.coordinator.conftest import RUN_ID, TOKEN, Running, eventually

from holter.cli.parts.run_reader import locate
from holter.config import load
from holter.coordinator.http.doors import DoorSettings
from holter.errors import ConfigError
from holter.transport import wire
from holter.transport.limits import UplinkSettings
from holter.transport.tls import TlsFiles
from holter.transport.uplink import RankUplink


def files(folder: Path, name: str = "127.0.0.1") -> TlsFiles:
    folder.mkdir(exist_ok=True)
    authority = trustme.CA()
    leaf = authority.issue_cert(name)
    leaf.private_key_pem.write_to_path(str(folder / "key.pem"))
    for number, blob in enumerate(leaf.cert_chain_pems):
        blob.write_to_path(str(folder / "certificate.pem"), append=number > 0)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    return TlsFiles(*(str(folder / f"{one}.pem") for one in ("certificate", "key", "ca")))


def uplink(running: Running, trusted: TlsFiles, rank: int = 0, scheme: str = "https://") -> RankUplink:
    hello = wire.Hello(
        run_id=RUN_ID, rank=rank, world_size=2, host="node-a", rank_pid=1000, sidecar_pid=1, metrics_address=""
    )
    address = f"{scheme}127.0.0.1:{running.port}"
    return RankUplink(address, TOKEN, hello, lambda _: None, UplinkSettings(tls=trusted))


async def connects(running: Running, trusted: TlsFiles, scheme: str = "https://", *, is_expected: bool = False) -> bool:
    line = uplink(running, trusted, scheme=scheme)
    line.start()
    try:
        await eventually(lambda: line.is_connected, 5.0 if is_expected else 1.0)
    except AssertionError:
        return False
    finally:
        await line.close(0.2)
    return True


async def test_a_sidecar_believes_the_authority_or_the_very_certificate_and_no_other(
    run_coordinator: Any, tmp_path: Path
) -> None:
    ours, others = files(tmp_path / "ours"), files(tmp_path / "others")
    running = await run_coordinator(doors=DoorSettings(TOKEN, tls=ours))
    pinned = TlsFiles(ours.certificate, ours.key)
    assert [True, True] == [await connects(running, trusted, is_expected=True) for trusted in (ours, pinned)]
    assert [False, False] == [await connects(running, trusted) for trusted in (others, TlsFiles())]
    assert not await connects(running, ours, scheme="")


async def test_with_an_authority_the_name_must_be_in_the_certificate(run_coordinator: Any, tmp_path: Path) -> None:
    elsewhere = files(tmp_path / "ours", "node-7.cluster")
    running = await run_coordinator(doors=DoorSettings(TOKEN, tls=elsewhere))
    assert not await connects(running, elsewhere)
    assert await connects(running, TlsFiles(elsewhere.certificate, elsewhere.key), is_expected=True)


async def test_connections_that_never_agree_on_tls_keep_nobody_out(
    run_coordinator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holter.coordinator.http.doors.MAX_HANDSHAKES", 20, raising=False)
    ours = files(tmp_path / "ours")
    running = await run_coordinator(doors=DoorSettings(TOKEN, tls=ours))
    silent = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(60)]
    assert await connects(running, ours, is_expected=True)
    assert len(running.coordinator.doors._tasks) <= 25
    for _, writer in silent:
        writer.close()


async def test_handshakes_of_one_address_push_out_each_other(
    run_coordinator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar of another address that came before them, and is slow, still gets in."""
    monkeypatch.setattr("holter.coordinator.http.doors.MAX_HANDSHAKES", 20, raising=False)
    monkeypatch.setattr("holter.coordinator.http.doors.MAX_STRANGERS", 20)
    ours = files(tmp_path / "ours")
    running = await run_coordinator(doors=DoorSettings(TOKEN, tls=ours))
    slow = _connected("127.0.0.9", running.port)
    flood = []
    for _ in range(80):
        flood.append(_connected("127.0.0.1", running.port))
        await asyncio.sleep(0.005)
    await eventually(lambda: running.coordinator.doors.pushed_out >= 50)
    _, writer = await asyncio.open_connection(sock=slow, ssl=ours.client(), server_hostname="127.0.0.1")
    assert len(running.coordinator.doors._tasks) <= 25
    for one in (writer, *flood):
        one.close()


def _connected(source: str, port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=10, source_address=(source, 0))
    made.setblocking(False)
    return made


async def test_the_page_and_the_shell_speak_tls(
    run_coordinator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = files(tmp_path / "ours")
    running = await run_coordinator(doors=DoorSettings(TOKEN, tls=ours))
    address = f"https://127.0.0.1:{running.port}"

    def read() -> tuple[int, Any]:
        context = ssl.create_default_context(cafile=ours.ca)
        with urllib.request.urlopen(f"{address}/healthz", timeout=10, context=context) as answer:
            return answer.status, locate(address).ask("/api/v1/status")

    monkeypatch.setenv("HOLTER_TLS_CA", ours.ca)
    code, status = await asyncio.to_thread(read)
    assert (200, RUN_ID) == (code, status["run_id"])
    monkeypatch.delenv("HOLTER_TLS_CA")
    assert await asyncio.to_thread(lambda: locate(address).ask("/api/v1/status")) is None


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    good = files(tmp_path / "ours")
    assert good.problem() is None
    assert TlsFiles().problem() is None
    missing = TlsFiles(str(tmp_path / "none.pem"), good.key)
    assert f"TLS cannot be used with {missing.certificate}, {good.key}: No such file or directory" == missing.problem()
    other = files(tmp_path / "others")
    assert "TLS cannot be used" in (TlsFiles(good.certificate, other.key).problem() or "")


def test_a_certificate_without_its_key_is_wrong_use() -> None:
    with pytest.raises(ConfigError, match="HOLTER_TLS_CERTIFICATE must be given together with tls_key"):
        load({"HOLTER_TLS_CERTIFICATE": "x.pem"})


async def test_prometheus_is_sent_to_https(run_coordinator: Any) -> None:
    running = await run_coordinator()
    rank = running.rank(0, metrics_address="https://0.0.0.0:9100")
    rank.attach()
    await eventually(lambda: running.coordinator.watched.roster.num_connected == 1)
    _, groups = await running.get("/sd")
    assert [["127.0.0.1:9100"]] == [group["targets"] for group in groups]
    assert "https" == groups[0]["labels"]["__scheme__"]
