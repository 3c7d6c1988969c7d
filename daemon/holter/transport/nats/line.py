"""One connection to the servers. It never reconnects: whoever needs another one opens it and introduces itself again.

    nats://host:4222,nats://other:4222      in the clear, unless TLS is set
    tls://host:4222                         by TLS

The file of credentials holds one of three things: a `.creds` file (a JWT and its seed), a seed (`SU…`), or `user:password`. Its path may
contain `{who}`: `rank-3`, `coordinator` or `reader` stands there then, each with permissions of its own.
"""

import asyncio
import contextlib
import importlib.util
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holter import clock
from holter.errors import UsageError
from holter.transport.tls import NO_TLS, TlsFiles

if TYPE_CHECKING:
    from nats.aio.client import Client

SCHEMES = ("nats", "tls")
INBOX = "_INBOX_"
CONNECT_S = 2.0
PING_S = 1.5
"""Seconds between pings; a server that leaves two unanswered is given up."""
PENDING_BYTES = 16 * 2**20
"""Largest number of bytes that may wait for the socket."""

logger = logging.getLogger(__name__)
# What it would say of a lost connection is logged here.
logging.getLogger("nats").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class NatsPlace:
    """Where the servers are, and with which credentials to connect."""

    address: str
    """One address or several, separated by commas."""
    credentials: str = ""
    """Path of a file of credentials."""
    tls: TlsFiles = NO_TLS

    @property
    def server(self) -> str:
        """A randomly chosen server: so not all connect to the first one, and after a dead one another is drawn."""
        return random.choice([part.strip() for part in self.address.split(",") if part.strip()])  # noqa: S311 - no secret

    @property
    def is_several(self) -> bool:
        """Whether there is another server to go to."""
        return "," in self.address

    def problem(self) -> str | None:
        """Return why this cannot work; None if it can."""
        if importlib.util.find_spec("nats") is None:
            return "NATS needs the package nats-py: pip install 'holter[nats]'"
        return None

    def options(self, who: str) -> dict[str, Any]:
        """Return options for the client; `who` is rank-N, coordinator or reader. Raises OSError, UsageError."""
        found: dict[str, Any] = {"inbox_prefix": inbox_of(who), "name": f"holter {who}"}
        if self.address.startswith("tls://") or self.tls.certificate or self.tls.ca:
            context = self.tls.client()
            if self.tls.certificate:
                context.load_cert_chain(self.tls.certificate, self.tls.key)
            found["tls"] = context
        if not self.credentials:
            return found
        path = self.credentials.replace("{who}", who)
        text = Path(path).read_text(encoding="utf-8").strip()
        if "-----BEGIN" in text:
            return found | {"user_credentials": path}
        if text.startswith("SU") and ":" not in text:
            return found | {"nkeys_seed_str": text}
        user, colon, password = text.partition(":")
        if not colon:
            raise UsageError(f"{path}: neither a .creds file nor a seed nor user:password")
        return found | {"user": user, "password": password}


def inbox_of(who: str) -> str:
    """Return the prefix of the subjects for answers; nobody else's permissions reach there."""
    return f"{INBOX}{who}"


class OpenLine:
    """A connection, as long as it lasts."""

    def __init__(self, client: "Client") -> None:
        self.client = client
        self.js: Any = client.jetstream(timeout=CONNECT_S)
        self.opened_s = clock.monotonic_s()
        self.is_lost = asyncio.Event()
        self.denied = ""
        """The last operation that the server did not permit, in its words."""

    async def lost(self) -> None:
        """Return when the connection is lost."""
        await self.is_lost.wait()

    async def on_closed(self) -> None:
        """Note the end of the connection; called by the client."""
        self.is_lost.set()

    async def on_error(self, error: Exception) -> None:
        """Log missing permissions; called by the client. Errors that end the connection are reported elsewhere."""
        text = str(error)
        if "ermissions" in text and text != self.denied:
            self.denied = text
            logger.warning("the NATS server refuses: %s", text)

    @property
    def max_bytes(self) -> int:
        """Size of the largest message."""
        return int(self.client.max_payload)


@contextlib.asynccontextmanager
async def line_to(place: NatsPlace, who: str) -> AsyncIterator[OpenLine]:
    """Connect to one of the servers; raises whatever prevents it."""
    from nats.aio.client import Client  # noqa: PLC0415 - an extra, and only who uses NATS has it

    client = Client()
    line = OpenLine(client)
    try:
        async with asyncio.timeout(CONNECT_S):
            await client.connect(
                servers=place.server,
                allow_reconnect=False,
                connect_timeout=CONNECT_S,  # type: ignore[arg-type]
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                ping_interval=PING_S,  # type: ignore[arg-type]
                max_outstanding_pings=2,
                pending_size=PENDING_BYTES,
                closed_cb=line.on_closed,
                disconnected_cb=line.on_closed,
                error_cb=line.on_error,
                **place.options(who),
            )
        yield line
    finally:
        line.is_lost.set()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(1.0):
                await client.close()


def failures(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the exceptions that a connection and its use may raise, and these."""
    import nats.errors  # noqa: PLC0415 - as above

    return (nats.errors.Error, OSError, TimeoutError, UsageError, ValueError, *others)
