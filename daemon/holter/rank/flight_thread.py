"""The same two answers as torch's worker server gives, from a Python thread, for a torch that has no such server. It needs the interpreter lock."""

import contextlib
import faulthandler
import socketserver
import tempfile
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from holter.threads import without_signals

REQUEST_DEADLINE_S = 2.0
POLL_S = 0.2


class FlightThread:
    """Serves from its construction until `shutdown`."""

    def __init__(self, path: str, dump: Callable[[], bytes | None]) -> None:
        answers: dict[str, Callable[[], bytes | None]] = {
            "/handler/fr_trace_json": dump,
            "/handler/dump_traceback": _traceback,
            "/handler/ping": lambda: b"pong",
        }
        self._server = _Server(path, answers)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="holter-flight", daemon=True
        )
        with without_signals():
            self._thread.start()

    def shutdown(self) -> None:
        """Answer the current request, then stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(REQUEST_DEADLINE_S)


class _Server(socketserver.UnixStreamServer):
    """Answers one request at a time, and cuts off a client that is slow to ask."""

    def __init__(self, path: str, answers: dict[str, Callable[[], bytes | None]]) -> None:
        self.answers = answers
        super().__init__(path, _Handler)

    def handle_error(self, *_: Any) -> None:
        """Print nothing: that a sidecar went away is no news for the job's log."""


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_DEADLINE_S
    server: _Server

    def do_POST(self) -> None:
        answer = self.server.answers.get(self.path)
        body = answer() if answer is not None else None
        self.send_response(HTTPStatus.NOT_FOUND if body is None else HTTPStatus.OK)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body or b"")

    def log_message(self, *_: Any) -> None:
        """Print nothing: standard error belongs to the job."""


def _traceback() -> bytes:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file.fileno(), all_threads=True)
        file.seek(0)
        return file.read()
