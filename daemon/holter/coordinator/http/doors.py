"""Access to the coordinator's only port: limits on connections, and checks of Host and token.

    accept ──▶ a limited number of strangers, per address and in all; the oldest makes room ──▶ Host ──▶ read token ──▶ the pages
                                     who shows a token is no stranger any more ──▶ /ingest

A stranger is a connection that has shown no token. Sidecars show theirs with their first bytes, so that thousands of
silent connections displace each other and nobody else.
"""

import asyncio
import contextlib
import logging
import resource
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestHandler

from holter.transport.access import bearer, is_own_host, is_same, oldest_of_busiest, own_names
from holter.transport.tls import NO_TLS, TlsFiles

HEADER_DEADLINE_S = 10.0
"""Seconds allowed for the first request of a connection, and between two requests."""
MAX_OF_ADDRESS = 128
"""Largest number of strangers from one address: browsers, scrapers, a proxy."""
MAX_STRANGERS = 512
MAX_HANDSHAKES = 256
"""Largest number of connections during their TLS handshake; each takes a quarter of a megabyte."""
KEPT_BACK = 64
"""Descriptors that no connection may take: they are for journal, database, reports and halt.json."""
FULL_PAUSE_S = 0.2
READ_COOKIE = "holter_read"

logger = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class DoorSettings:
    """Who may come in, and how."""

    report_token: str = ""
    read_token: str = ""
    """Secret needed for page, API and metrics; empty: everybody who reaches the port may read."""
    hosts: Sequence[str] = ()
    """Names under which the coordinator is known, in addition to this host's own and every plain address."""
    tls: TlsFiles = NO_TLS


class Doors:
    """Guards the port: `middleware` belongs to the application, `open` to its server."""

    def __init__(self, settings: DoorSettings) -> None:
        self.pushed_out = 0
        """Number of strangers that had to make room for others."""
        self.foreign_hosts = 0
        """Number of requests under a foreign host name."""
        self._settings = settings
        self._tls = settings.tls.server()
        self._names = {name.lower() for name in (*settings.hosts, *own_names())}
        self._strangers: OrderedDict[RequestHandler, str] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes: dict[asyncio.Task[None], str] = {}
        """Handshakes in progress with their address, oldest first."""
        self._is_full = False
        self._listener: socket.socket | None = None

    async def open(self, listener: socket.socket, server: web.Server) -> None:
        """Accept connections from now on in the background, until `close`."""
        listener.setblocking(False)
        self._listener = listener
        self._keep(self._accept(listener, server))

    async def close(self) -> None:
        """Stop accepting."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests under a foreign host name, and from clients that may not read."""
        if self._has(request, self._settings.report_token):
            if request.path == "/ingest":
                # From here on the listener counts it, until it has said whose connection it is.
                self._strangers.pop(request.protocol, None)
                return await handler(request)
        elif not is_own_host(request.host, self._names):
            self.foreign_hosts += 1
            return web.Response(status=421, text="no such host here; HOLTER_PUBLIC_URL names one\n")
        if self._settings.read_token and request.path not in {"/healthz", "/ingest", "/api/v1/halt"}:
            return await self._read(request, handler)
        return await handler(request)

    async def _read(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._has(request, self._settings.read_token):
            self._strangers.pop(request.protocol, None)
            return await handler(request)
        if is_same(request.query.get("token", ""), self._settings.read_token):
            # A browser shows the token once, in the address; from then on it is in a cookie and no longer in the
            # address.
            found = web.HTTPFound("/" + quote(request.path.lstrip("/")))
            found.set_cookie(
                READ_COOKIE,
                self._settings.read_token,
                httponly=True,
                samesite="Strict",
                secure=request.secure,
                path="/",
            )
            raise found
        why = "a read token is needed: as `Authorization: Bearer …`, or once as ?token=… in a browser\n"
        return web.Response(status=401, text=why, headers={hdrs.WWW_AUTHENTICATE: "Bearer"})

    def _has(self, request: web.Request, token: str) -> bool:
        shown = bearer(request.headers.get(hdrs.AUTHORIZATION, "")) or request.cookies.get(READ_COOKIE, "")
        return bool(token) and is_same(shown, token)

    async def _accept(self, listener: socket.socket, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                if not self._is_full:
                    self._is_full = True
                    logger.warning("cannot accept connections now: %s", error)
                self._push_out(list(self._strangers)[: KEPT_BACK // 2])
                await asyncio.sleep(FULL_PAUSE_S)
                continue
            self._is_full = False
            task = self._keep(self._admit(connection, str(address[0]), server))
            self._handshakes[task] = str(address[0])
            if len(self._handshakes) > MAX_HANDSHAKES:
                self._end_a_handshake()
            # sock_accept returns at once while connections wait: without this a flood of them would starve everything
            # else.
            await asyncio.sleep(0)

    def _end_a_handshake(self) -> None:
        oldest = oldest_of_busiest(self._handshakes)
        del self._handshakes[oldest]
        oldest.cancel()
        self.pushed_out += 1

    async def _admit(self, connection: socket.socket, address: str, server: web.Server) -> None:
        deadline_s = None if self._tls is None else HEADER_DEADLINE_S
        try:
            _, handler = await asyncio.get_running_loop().connect_accepted_socket(
                server, connection, ssl=self._tls, ssl_handshake_timeout=deadline_s
            )
        except (OSError, asyncio.CancelledError):
            connection.close()
            return
        assert isinstance(handler, RequestHandler)
        self._strangers[handler] = address
        if len(self._strangers) > MAX_OF_ADDRESS:
            self._make_room(address)

    def _make_room(self, address: str) -> None:
        """Drop closed connections, then the oldest of this address beyond its limit, then the oldest of all."""
        for handler in [one for one in self._strangers if one.transport is None or one.transport.is_closing()]:
            del self._strangers[handler]
        here = [one for one, known in self._strangers.items() if known == address]
        self._push_out(here[: max(0, len(here) - MAX_OF_ADDRESS)])
        self._push_out(list(self._strangers)[: max(0, len(self._strangers) - MAX_STRANGERS)])

    def _push_out(self, handlers: Sequence[RequestHandler]) -> None:
        for handler in handlers:
            del self._strangers[handler]
            if handler.transport is not None:
                handler.transport.abort()
                self.pushed_out += 1

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, done: asyncio.Task[None]) -> None:
        self._tasks.discard(done)
        self._handshakes.pop(done, None)


def runner_of(app: web.Application, shutdown_timeout: float = 1.0) -> web.AppRunner:
    """Serves it; what is sent compressed stays so: a stranger's three hundred kilobytes would be unpacked to as many megabytes before anybody asks who it is."""
    return web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=shutdown_timeout,
        keepalive_timeout=HEADER_DEADLINE_S,
        auto_decompress=False,
    )


def raise_descriptor_limit(num_ranks: int) -> str | None:
    """Allow as many descriptors as the host permits; return a sentence if they are too few for this job."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    needed = num_ranks + MAX_STRANGERS + KEPT_BACK
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    return f"only {soft} file descriptors may be open here and {num_ranks} ranks need {needed}: raise `ulimit -n` on this host"
