"""Keeps the lease, in a thread with its own connection, so that a long judgement does not cost the coordinator its place.

stand by ──look──▶ decide ──take──▶ renew ... renew ──▶ released | ended | taken by another
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable

import msgspec

from holter import clock
from holter.files import UNREADABLE
from holter.transport.nats import lease as law
from holter.transport.nats.lease import Lease, Sighting, Standing, State
from holter.transport.nats.line import NatsPlace, OpenLine, failures, line_to
from holter.transport.nats.subjects import BUCKET, BUCKET_STREAM, Subjects
from holter.transport.nats.tail import NOT_CLUSTERED, REPLICAS

BUCKET_TTL_S = 30 * 86400.0
"""Seconds after which runs that nobody has watched are forgotten."""
PAUSE_S = 0.2
"""Seconds between two attempts to reach a server."""
END_S = 2.0
TICK_S = 0.05
WRONG_LAST = (10071, 10164)

logger = logging.getLogger(__name__)


class LeaseKeeper:
    """The lease of one coordinator.

    `start` it, wait until `is_held`, ask `standing` before each order, `close` it at the end.
    """

    def __init__(self, place: NatsPlace, run_id: str, on_change: Callable[[], None]) -> None:
        self.token = 0
        """Token of the lease that is or was held."""
        self.why = ""
        """Why the lease was taken, or what is being waited for."""
        self.holder = ""
        """Who holds it, if it is somebody else."""
        self.is_over = False
        """Whether the run ended while this coordinator stood by."""
        self.taken_s = 0.0
        self._me = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
        self._place, self._subjects, self._on_change = place, Subjects(run_id), on_change
        self._revision = 0
        self._asked_s = 0.0
        self._is_held = False
        self._is_lost = False
        self._sign_s = clock.monotonic_s()
        self._card = msgspec.Raw(b"null")
        self._end: State | None = None
        self._has_ended = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="holter-lease", daemon=True)

    def start(self) -> None:
        """Begin in the background."""
        self._thread.start()

    @property
    def is_held(self) -> bool:
        """Whether the lease was taken; it may have been lost since."""
        return self._is_held

    def standing(self) -> Standing:
        """Return what may be done now; asked before each order, and before each write."""
        return law.standing(self._asked_s, clock.monotonic_s(), is_taken=self._is_lost or not self._is_held)

    def sign(self, card: bytes = b"") -> None:
        """Confirm that the coordinator still judges; `card` is what is shown of its run."""
        self._sign_s = clock.monotonic_s()
        if card:
            self._card = msgspec.Raw(card)

    def close(self, state: State = "released") -> None:
        """Give the lease up, or record that the run has ended; takes at most END_S."""
        self._end = state
        self._is_closing.set()
        self._has_ended.wait(END_S)

    def _work(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception:
            logger.exception("the lease cannot be kept")
            self._is_lost = True
            self._on_change()
        finally:
            self._has_ended.set()

    async def _run(self) -> None:
        said = ""
        while not self._is_closing.is_set() and not self.is_over and not self._is_lost:
            try:
                async with line_to(self._place, "coordinator") as line:
                    await _make_bucket(line)
                    await self._stand_by(line)
                    await self._hold(line)
            except failures() as error:
                why = f"{type(error).__name__}: {error}"
                if why != said:
                    logger.warning("no NATS server can be had for the lease: %s", why)
                said = why
                await asyncio.sleep(PAUSE_S)

    async def _stand_by(self, line: OpenLine) -> None:
        seen = Sighting()
        while not self._is_held and not self._is_closing.is_set():
            revision, known = await self._read(line)
            seen = law.look(seen, revision, known, clock.monotonic_s())
            decision, self.why = law.decide(seen, self._me)
            self.holder = known.holder if known is not None else ""
            if decision == "over":
                self.is_over = True
                self._on_change()
                return
            if decision == "take":
                await self._take(line, seen)
                continue
            await asyncio.sleep(law.LOOK_S)

    async def _take(self, line: OpenLine, seen: Sighting) -> None:
        asked_s, token = clock.monotonic_s(), law.next_token(seen)
        revision = await self._write(line, Lease(token=token, holder=self._me), seen.revision)
        if revision is None:
            return  # Somebody else was quicker.
        self.token, self._revision, self._asked_s = token, revision, asked_s
        self.taken_s = self._sign_s = clock.monotonic_s()
        self._is_held = True
        logger.info("this coordinator gives the orders now, with token %d: %s", token, self.why)
        self._on_change()

    async def _hold(self, line: OpenLine) -> None:
        while self._is_held and not self._is_lost:
            state = self._end or "held"
            asked_s = clock.monotonic_s()
            if state != "held" or asked_s - self._sign_s < law.SIGN_S:
                now = Lease(token=self.token, holder=self._me, state=state, card=self._card)
                revision = await self._write(line, now, self._revision)
                if revision is None:
                    revision = await self._find_own(line, now)
                if revision is None:
                    self._is_lost = True
                    logger.warning("another coordinator gives the orders now: %s", self.holder)
                    self._on_change()
                    return
                self._revision, self._asked_s = revision, max(self._asked_s, asked_s)
            if state != "held":
                return
            await self._pause()

    async def _pause(self) -> None:
        for _ in range(int(law.RENEW_S / TICK_S)):
            if self._is_closing.is_set():
                return
            await asyncio.sleep(TICK_S)

    async def _find_own(self, line: OpenLine, now: Lease) -> int | None:
        """Renew on top of somebody's write that may have been our own, whose answer was lost; None if it was not."""
        revision, known = await self._read(line)
        if known is None or (known.holder, known.token) != (self._me, self.token):
            self.holder = known.holder if known is not None else "nobody"
            return None
        return await self._write(line, now, revision)

    async def _read(self, line: OpenLine) -> tuple[int, Lease | None]:
        from nats.js.errors import NotFoundError  # noqa: PLC0415 - an extra

        try:
            found = await line.js.get_msg(BUCKET_STREAM, subject=f"$KV.{BUCKET}.{self._subjects.key}")
        except NotFoundError:
            return 0, None
        try:
            return found.seq, msgspec.json.decode(found.data, type=Lease)
        except UNREADABLE:
            return found.seq, None

    async def _write(self, line: OpenLine, what: Lease, last: int) -> int | None:
        """Write the lease and return its revision; None if another revision than `last` is the newest."""
        from nats.js.errors import APIError  # noqa: PLC0415 - an extra

        headers = {"Nats-Expected-Last-Subject-Sequence": str(last)}
        subject = f"$KV.{BUCKET}.{self._subjects.key}"
        try:
            return int((await line.js.publish(subject, msgspec.json.encode(what), headers=headers)).seq)
        except APIError as error:
            if error.err_code in WRONG_LAST:
                return None
            raise


async def _make_bucket(line: OpenLine) -> None:
    from nats.js import api, errors  # noqa: PLC0415 - an extra

    with contextlib.suppress(errors.NotFoundError):
        await line.js.stream_info(BUCKET_STREAM)
        return
    about = api.StreamConfig(
        name=BUCKET_STREAM,
        subjects=[f"$KV.{BUCKET}.>"],
        max_age=BUCKET_TTL_S,
        max_msgs_per_subject=1,
        storage=api.StorageType.FILE,
        allow_rollup_hdrs=True,
        deny_delete=True,
        discard=api.DiscardPolicy.NEW,
        num_replicas=REPLICAS,
    )
    try:
        await line.js.add_stream(about)
    except errors.APIError as error:
        if error.err_code != NOT_CLUSTERED:
            raise
        await line.js.add_stream(about.evolve(num_replicas=1))
