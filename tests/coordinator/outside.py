"""Others whom a coordinator tells: an HTTP server and a mail server on loopback that keep what they get."""

import contextlib
import http.server
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Received:
    """What came, in order."""

    port: int = 0
    posts: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    """(path, headers in lower case, body)"""
    mails: list[str] = field(default_factory=list)
    status: int = 200
    before: Callable[[], None] = lambda: None
    """Called before it answers."""


@contextlib.contextmanager
def http_server() -> Iterator[Received]:
    """Takes every POST."""
    received = Received()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            received.before()
            received.posts.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(received.status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with _serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler), received):
        yield received


@contextlib.contextmanager
def mail_server() -> Iterator[Received]:
    """Speaks as much SMTP as a client needs to leave a mail."""
    received = Received()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self._say("220 here")
            while line := self.rfile.readline():
                word = line.decode().split(" ")[0].strip().upper()
                if word == "DATA":
                    self._say("354 go on")
                    lines = list(iter(self.rfile.readline, b".\r\n"))
                    received.mails.append(b"".join(lines).decode())
                    self._say("250 kept")
                elif word == "QUIT":
                    self._say("221 bye")
                    return
                else:
                    self._say("250 fine")

        def _say(self, text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

    with _serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler), received):
        yield received


@contextlib.contextmanager
def _serving(server: socketserver.TCPServer, received: Received) -> Iterator[None]:
    received.port = server.server_address[1]
    server.daemon_threads = True  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
