"""A rank's recorder, asked from outside: alive, stopped, locked, gone, hostile."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from holter.sidecar import recorder as recorder_module
from holter.sidecar.recorder import COSTS_KEPT, Recorder, RecorderError, remove

RANK = """
import ctypes, sys, time
import torch, torch.distributed as dist
from holter.rank import flight_server as flight
if sys.argv[2] == "python":
    def fails(*_):
        raise RuntimeError
    torch._C._distributed_c10d._WorkerServer = fails
server = flight.FlightServer()
server.start()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(5):
    dist.all_reduce(torch.ones(3))
print(server.path, flush=True)
if sys.argv[1] == "locked":
    ctypes.PyDLL(None).usleep(int(15e6))
    print("free", flush=True)
time.sleep(100)
"""


@pytest.fixture
def rank(tmp_path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    started = []

    def start(how: str = "idle", by: str = "native") -> tuple[subprocess.Popen[str], str]:
        environ = {**os.environ, "TMPDIR": str(tmp_path)}
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, how, by], env=environ, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("by", ["native", "python"])
async def test_a_copy_and_an_interpreter_that_answers(rank, by):
    process, path = rank(by=by)
    recorder = Recorder(path)
    flight = await recorder.flight(20)
    assert 5 == len(flight.calls)
    assert ((3,),) == flight.calls[-1].sizes
    assert 0 == recorder.cost_s, "one copy tells nothing yet"
    for _ in range(COSTS_KEPT):
        await recorder.flight(20)
    assert 0 < recorder.cost_s < 20
    assert await recorder.is_lock_free(20) is True
    process.kill()
    process.wait()
    await recorder.close()
    assert not Path(path).parent.exists()


@pytest.mark.release
@pytest.mark.slow
async def test_a_rank_that_holds_the_interpreter_lock_gives_its_copy_and_is_found_out(rank):
    process, path = rank("locked")
    recorder = Recorder(path)
    assert 5 == len((await recorder.flight(5)).calls)
    assert await recorder.is_lock_free(2) is False
    # Not one thread of the server for each question.
    for _ in range(20):
        assert await recorder.is_lock_free(0.01) is False
    assert 5 == len((await recorder.flight(5)).calls)
    assert "free" == (await asyncio.to_thread(process.stdout.readline)).strip()
    await asyncio.sleep(0.2)
    assert await recorder.is_lock_free(10) is True
    await recorder.close()


@pytest.mark.slow
async def test_a_stopped_rank_is_not_waited_for(rank, wait_for):
    process, path = rank()
    recorder = Recorder(path)
    os.kill(process.pid, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, 20, "its stop")
    began = time.monotonic()
    with pytest.raises(RecorderError, match=r"did not answer fr_trace_json in 0\.5 s"):
        await recorder.flight(0.5)
    assert await recorder.is_lock_free(0.5) is None
    assert time.monotonic() - began < 15
    os.kill(process.pid, signal.SIGCONT)
    assert 5 == len((await recorder.flight(20)).calls)
    await recorder.close()


async def test_a_rank_that_is_gone_is_one_sentence(tmp_path):
    recorder = Recorder(str(tmp_path / "none"))
    with pytest.raises(RecorderError, match="cannot be asked for fr_trace_json"):
        await recorder.flight()
    assert await recorder.is_lock_free() is None
    await recorder.close()


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "with 404"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "cannot be read"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nhello", "cannot be asked"),
        (b"garbage\r\n\r\n", "cannot be asked"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5000, "more than 0 MB"),
    ],
)
async def test_an_answer_that_is_none(tmp_path, monkeypatch, answer, sentence):
    monkeypatch.setattr(recorder_module, "MAX_BYTES", 1000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    path = str(tmp_path / "s")
    async with await asyncio.start_unix_server(serve, path):
        with pytest.raises(RecorderError, match=sentence):
            await Recorder(path).flight(10)


async def test_a_copy_is_of_the_moment_at_which_it_was_asked_for(tmp_path):
    asked_ns = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked_ns.append(time.time_ns())
        # What is called from now on is not in the copy.
        await asyncio.sleep(0.2)
        body = b'{"entries": []}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    path = str(tmp_path / "s")
    async with await asyncio.start_unix_server(serve, path):
        assert (await Recorder(path).flight(10)).taken_ns <= asked_ns[0]


def test_only_a_socket_and_an_empty_directory_are_removed(tmp_path):
    precious = tmp_path / "native"
    precious.write_text("data")
    remove(str(precious))
    assert precious.exists()
    remove(str(tmp_path / "missing" / "native"))
