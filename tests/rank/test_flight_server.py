"""The recorder's way out of a rank: who answers, and that nothing about the rank's end changes."""

import ctypes
import http.client
import json
import multiprocessing
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from holter.rank import flight_server
from holter.rank.flight_server import FlightServer, dump
from holter.rank.flight_thread import FlightThread


class Connection(http.client.HTTPConnection):
    """Over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("rank", timeout=20)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(self._path)


def ask(path: str, handler: str) -> tuple[int, bytes]:
    connection = Connection(path)
    connection.request("POST", f"/handler/{handler}")
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


@pytest.fixture
def server() -> Iterator[FlightServer]:
    made = FlightServer()
    made.start()
    yield made
    made.stop()


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_it_answers_before_there_is_a_group_and_after(server):
    status, body = ask(server.path, "fr_trace_json")
    assert status == 200
    num_before = len(json.loads(body).get("entries", []))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(7))
        entries = json.loads(ask(server.path, "fr_trace_json")[1])["entries"]
    finally:
        dist.destroy_process_group()
    assert num_before + 1 == len(entries)
    assert [[7]] == entries[-1]["input_sizes"]


def test_the_socket_is_the_users_alone_and_removed_at_the_end(server):
    directory = Path(server.path).parent
    assert 0o700 == stat.S_IMODE(directory.stat().st_mode)
    assert "native" == Path(server.path).name
    server.stop()
    assert not directory.exists()
    server.stop()


def test_a_temporary_directory_with_a_long_name_is_passed_over(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    server = FlightServer()
    server.start()
    assert len(server.path) <= 107
    assert 200 == ask(server.path, "ping")[0]
    server.stop()
    assert [] == list(long.iterdir())


@pytest.mark.slow
def test_nothing_is_written_to_standard_error():
    code = "from holter.rank.flight_server import FlightServer; s = FlightServer(); s.start(); assert s.path; s.stop()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "" == ended.stderr


LINES = """
import sys, torch, torch.distributed as dist
from holter.rank.flight_server import call_lines

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(7))
before = call_lines(), sorted(name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo")))
import torch._inductor
print(before, len(call_lines()))
dist.destroy_process_group()
"""


def test_to_ask_for_the_lines_of_calls_imports_nothing_that_the_script_may_be_importing():
    ended = subprocess.run([sys.executable, "-c", LINES], capture_output=True, text=True, timeout=100, check=True)
    assert ended.stdout == "({}, []) 1\n"


def test_the_log_level_of_the_user_is_as_before():
    level = ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")
    before = level.value
    assert before < 2
    with flight_server._quiet():
        assert level.value == 2
    assert level.value == before


@pytest.mark.usefixtures("group")
def test_without_the_private_api_a_thread_answers_the_same(monkeypatch, wait_for):
    def fails(*_: object) -> None:
        raise RuntimeError("not in this version")

    monkeypatch.setattr(torch._C._distributed_c10d, "_WorkerServer", fails)
    server = FlightServer()
    server.start()
    try:
        assert "python" == Path(server.path).name
        dist.all_reduce(torch.ones(5))
        # A thread of gloo's writes that it is over, a moment later.
        wait_for(lambda: all(entry["retired"] for entry in json.loads(dump())["entries"]), 20, "the end of the call")
        status, body = ask(server.path, "fr_trace_json")
        assert 200 == status
        assert json.loads(dump())["entries"] == json.loads(body)["entries"]
        assert b"test_flight_server.py" in ask(server.path, "dump_traceback")[1]
        assert (200, b"pong") == ask(server.path, "ping")
        assert 404 == ask(server.path, "nothing")[0]
    finally:
        server.stop()
    assert not Path(server.path).exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "holter-flight"]


@pytest.mark.slow
def test_a_client_of_the_thread_that_says_nothing_is_cut_off(tmp_path):
    path = str(tmp_path / "s")
    served = FlightThread(path, lambda: b"{}")
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(path)
    assert (200, b"{}") == ask(path, "fr_trace_json")
    silent.close()
    served.shutdown()


def _child(path: str) -> None:
    sys.exit(3 if Path(path).exists() else 4)


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_neither_serves_nor_removes(server):
    child = multiprocessing.get_context("fork").Process(target=_child, args=(server.path,))
    child.start()
    child.join(20)
    assert 3 == child.exitcode
    # As plain fork children end: through the interpreter's own end.
    pid = os.fork()
    if pid == 0:
        server.stop()
        os._exit(5)
    assert 5 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert 200 == ask(server.path, "ping")[0]


ENDS = """
import os, socket, sys, time
import torch, torch.distributed as dist
from holter.rank.flight_server import FlightServer
server = FlightServer()
server.start()
if sys.argv[1] != "fork":  # torch's own destructors hang in a child that was forked from a group
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(600):
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()  # else torch's own threads may meet the interpreter's end and abort; the recorder keeps its calls
def connect(handler):
    asked = socket.socket(socket.AF_UNIX)
    asked.connect(server.path)
    if handler:
        asked.sendall(f"POST /handler/{handler} HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 0\\r\\n\\r\\n".encode())
    return asked
held = [connect(handler) for handler in sys.argv[2:]]
print(server.path, flush=True)
if sys.argv[1] == "fork":
    pid = os.fork()
    if pid == 0:
        sys.exit(6)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
if sys.argv[1] == "raise":
    raise ValueError("as asked")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "requests", "code"),
    [
        ("0", [], 0),
        ("7", [], 7),
        ("raise", [], 1),
        ("fork", [], 6),
        ("0", [""], 0),
        ("0", ["fr_trace_json"], 0),
        ("7", ["dump_traceback", "fr_trace_json", "dump_traceback"], 7),
    ],
)
def test_the_process_ends_as_it_meant_to(how, requests, code):
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, how, *requests], capture_output=True, text=True, timeout=100, check=False
    )
    assert code == ended.returncode, ended.stderr
    assert not Path(ended.stdout.split()[0]).parent.exists()
    # Import of torch included; a server that waits for its reader would take ten seconds and more, or for ever.
    assert time.monotonic() - began < 60
