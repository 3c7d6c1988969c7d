"""Serves the Flight Recorder of the rank: a socket that answers even when the main thread never will.

    sidecar --POST /handler/fr_trace_json--> native threads of torch's worker server --> the recorder's JSON, without the interpreter lock
            --POST /handler/dump_traceback->                                         --> stacks, if the interpreter lock is free
            --POST /handler/call_lines-----> a Python thread on a socket beside it    --> the script's lines of the newest calls, likewise

The worker server is private API of torch. Where it is missing or fails, a Python thread answers instead (`flight_thread`): then a rank that holds
the interpreter lock cannot answer, and everything else is the same.

The socket lies in a directory that only the user can enter. The rank removes it at its end, or the sidecar if the rank could not.
"""

import atexit
import contextlib
import ctypes
import os
import pickle
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from holter import clock
from holter.flight import script_lines
from holter.threads import without_signals

NATIVE, PYTHON = "native", "python"
"""Names of the socket if native threads answer on it, and if a Python thread does."""
LINES = "lines"
"""Name of the socket for call lines. torch's server could run Python handlers, but frees them after the interpreter's end, which aborts the process."""
MAX_CALLS = 512
"""Number of the newest calls whose lines are given: a mismatch may be noticed some hundred calls later."""
MAX_PATH_BYTES = 107
"""Length of the longest path that fits a socket's address, which needs one more byte for its final zero."""
STOP_PATIENCE_S = 0.5
POLL_S = 0.005
REQUEST_DEADLINE_S = 2.0
LOG_LEVEL_ERROR = 2
_STATE, _CONNECTED = 5, ("02", "03")
"""Index of the state field in a line of /proc/net/unix, and its values for a connection that waits or is open."""


class FlightServer:
    """Serves this process's recorder from `start` to `stop`; a forked child neither serves nor cleans up."""

    def __init__(self) -> None:
        self.path = ""
        """Path of the socket; empty while nothing is served."""
        self._pid = 0
        self._server: Any = None

    def start(self) -> None:
        """Begin to serve. Raises OSError or RuntimeError if neither server can be started."""
        if not dist.is_available():
            return
        directory = _private_directory()
        try:
            self._server, name = _serve(directory)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self.path, self._pid = str(directory / name), os.getpid()
        # Never destroy the server: its destructor joins threads, which a forked child does not have, so it would wait for ever.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._server))
        atexit.register(self.stop)

    def stop(self) -> None:
        """Accept no more readers before the interpreter ends, and wait a moment for those that are being answered, who may need the interpreter.

        torch's own `shutdown` is not called: it waits for a slow reader, for seconds and with the interpreter lock held, and for ever
        if the server has only just been started. The server's threads, which are idle by now, end with the process.
        """
        if os.getpid() != self._pid or self._server is None:
            return
        server, self._server = self._server, None
        shutil.rmtree(Path(self.path).parent, ignore_errors=True)
        atexit.unregister(self.stop)
        deadline = clock.monotonic_s() + STOP_PATIENCE_S
        while _is_anyone_in(self.path) and clock.monotonic_s() < deadline:
            threading.Event().wait(POLL_S)
        if Path(self.path).name == PYTHON:
            server.shutdown()


def dump() -> bytes | None:
    """Return this process's recorder as JSON, read from inside the process; None if there is none."""
    native = getattr(torch._C, "_distributed_c10d", None)  # noqa: SLF001  private: it may be gone
    copy = getattr(native, "_dump_fr_trace_json", None)
    return None if copy is None else bytes(copy())


def call_lines(most: int = MAX_CALLS) -> dict[int, tuple[str, ...]]:
    """Return the script's own lines that made each call, by the call's number in the recorder.

    The newest `most` calls are covered, and as many older ones that are not over.

    To name compiled code, torch looks at `torch._inductor`, and imports it if nobody has: in a thread of ours, while the script may be importing
    what that needs, so that the script's import fails. There are no lines before the script has imported it, which its first optimizer does.
    """
    native = getattr(torch._C, "_distributed_c10d", None)  # noqa: SLF001  private: it may be gone
    copy = getattr(native, "_dump_fr_trace", None)
    if copy is None or "_inductor" not in vars(torch):
        return {}
    entries = pickle.loads(copy(True, True, False)).get("entries", [])  # noqa: S301  this process wrote it
    chosen = [entry for entry in entries[:-most] if not entry.get("retired")][-most:] + entries[-most:]
    return {
        int(entry["record_id"]): script_lines((f["filename"], f["line"], f["name"]) for f in entry.get("frames") or ())
        for entry in chosen
    }


def _private_directory() -> Path:
    for parent in (None, "/tmp"):  # noqa: S108  mkdtemp makes it ours alone
        directory = Path(tempfile.mkdtemp(prefix="holter-", dir=parent))
        if len(os.fsencode(directory / NATIVE)) <= MAX_PATH_BYTES:
            return directory
        directory.rmdir()
    raise OSError(f"a socket's address has {MAX_PATH_BYTES} bytes, and {directory} leaves no room for it")


def _serve(directory: Path) -> tuple[Any, str]:
    try:
        from torch._C._distributed_c10d import _WorkerServer  # noqa: PLC0415  private: it may be gone

        with _quiet(), without_signals():
            server = _WorkerServer(str(directory / NATIVE))
    except Exception:  # noqa: BLE001  whatever is wrong with it, the other way is tried
        # An HTTP server is not loaded into every rank for the few whose torch has none.
        from holter.rank.flight_thread import FlightThread  # noqa: PLC0415

        return FlightThread(str(directory / PYTHON), dump), PYTHON
    _serve_lines(directory)
    return server, NATIVE


def _serve_lines(directory: Path) -> None:
    """Start a thread that sleeps until it is asked, and ends with the process. Without it, evidence shows calls without their lines."""
    with contextlib.suppress(OSError, RuntimeError):
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(directory / LINES))
        listening.listen(1)
        with without_signals():
            threading.Thread(target=_answer_lines, args=(listening,), name="holter-lines", daemon=True).start()


def _answer_lines(listening: socket.socket) -> None:
    """Answer every request with the lines of the newest calls, and cut off a client that is slow to ask."""
    while True:
        with contextlib.suppress(Exception):
            asking, _ = listening.accept()
            with asking:
                asking.settimeout(REQUEST_DEADLINE_S)
                asking.recv(4096)
                body = msgspec.json.encode(call_lines())
                asking.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def _is_anyone_in(path: str) -> bool:
    """Whether somebody is connected to the socket, or waits to be; True if that cannot be read."""
    try:
        sockets = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    mine = [line.split() for line in sockets if line.endswith(f" {path}")]
    return any(fields[_STATE] in _CONNECTED for fields in mine)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let only errors of torch pass to standard error meanwhile: the worker server prints a warning when it starts."""
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        yield
        return
    before, level.value = level.value, max(level.value, LOG_LEVEL_ERROR)
    try:
        yield
    finally:
        level.value = before
