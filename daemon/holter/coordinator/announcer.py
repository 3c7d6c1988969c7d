"""Tells others: incidents to a webhook, and Prometheus' scrape targets, at `/sd` and in a file on a shared disk.

Messages to the webhook are sent one after another, repeated with growing pauses, and never delay the judging. What
cannot be delivered is counted and shown in the status. The queue is bounded: the oldest message is dropped first.
"""

import asyncio
import contextlib
import logging
import re
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from holter import clock
from holter.coordinator.disk import Disk
from holter.coordinator.event_export import EventExport
from holter.coordinator.notifier import Notifier
from holter.coordinator.roster import Roster
from holter.coordinator.run import Run
from holter.exporters.alert_text import RUNBOOKS
from holter.exporters.webhook import Deliveries, Message, Pager
from holter.files import write_whole
from holter.transport.limits import Backoff
from holter.transport.otlp import OtlpSettings
from holter.transport.tls import SCHEME

LOOK_EVERY = 10
"""Number of calls of `write`, which comes once a second, between two checks that the file still exists."""

Targets = list[dict[str, Any]]


MAX_WAITING = 64
"""Largest number of waiting messages; an incident makes one, seldom two."""
TOO_OLD_S = 3600.0
"""Seconds after which a message that could not be delivered is given up."""
ATTEMPT_S = 10.0
_OK, _WRONG, _BROKEN = 200, 400, 500
_PATIENCE = (401, 403, 404, 408, 425, 429)
"""Status codes from 400 to 499 after which a retry makes sense: the receiver asks for it, or a person may repair a
token or a route."""
logger = logging.getLogger(__name__)


def sidecar_targets(roster: Roster, run_id: str) -> Targets:
    """Return the sidecars in the form of Prometheus' service discovery; ranks that ended are left out, lost ones are not."""
    return [
        _group(member.hello.metrics_address, run_id, role="sidecar", rank=str(rank), host=member.hello.host)
        for rank, member in sorted(roster.members.items())
        if member.state != "ended" and member.hello.metrics_address
    ]


def all_targets(roster: Roster, run_id: str, address: str) -> Targets:
    """Return the targets: the coordinator at this address, and every sidecar."""
    return [_group(address, run_id, role="coordinator"), *sidecar_targets(roster, run_id)]


class TargetsFile:
    """The file `<folder>/holter-<run id>.json`, written when ranks come or go, and removed at the end."""

    def __init__(self, folder: Path, run_id: str, address: str, disk: Disk) -> None:
        self._path = folder / ("holter-" + re.sub(r"[^\w.-]", "_", run_id) + ".json")
        self._run_id, self._address, self._disk = run_id, address, disk
        self._serial, self._content, self._num_unchanged = -1, b"", 0

    def write(self, roster: Roster) -> None:
        """Write the file if anything changed; now and then also if somebody removed it."""
        if roster.serial != self._serial:
            self._serial, self._num_unchanged = roster.serial, 0
            self._content = msgspec.json.encode(all_targets(roster, self._run_id, self._address))
            self._disk.submit(partial(write_whole, self._path, self._content, makes_folder=True))
            return
        self._num_unchanged += 1
        if self._num_unchanged % LOOK_EVERY == 0:
            self._disk.submit(partial(_write_if_gone, self._path, self._content))

    def remove(self) -> None:
        """Remove the file, because the run has ended; a new life of it may already have written its own, which stays."""
        self._disk.submit(partial(_remove, self._path, urlsplit(self._address).netloc))


def _write_if_gone(path: Path, content: bytes) -> None:
    if not path.exists():
        write_whole(path, content, makes_folder=True)


def _remove(path: Path, coordinator: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        groups = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
        if any(coordinator in group.get("targets", ()) for group in groups):
            path.unlink()


def _group(address: str, run_id: str, **about: str) -> dict[str, Any]:
    labels = {f"__meta_holter_{name}": value for name, value in {"run_id": run_id, **about}.items()}
    scheme = {"__scheme__": "https"} if address.startswith(SCHEME) else {}
    return {"targets": [address.rpartition("://")[2]], "labels": labels | scheme}


@dataclass(frozen=True)
class WebhookSettings:
    """Address of the webhook, and the credentials for it."""

    url: str
    token_file: str = ""
    """Read at each attempt, so that the secret can be changed; sent as a bearer token."""


class RefusedError(Exception):
    """The receiver will not take this message, however often it is sent."""


class WebhookSender:
    """Delivers messages to a webhook: `start`, `send`, `close`; what became of them is counted in `deliveries`."""

    def __init__(self, settings: WebhookSettings, deliveries: Deliveries, backoff: Backoff | None = None) -> None:
        self._settings, self._deliveries = settings, deliveries
        self._backoff = backoff or Backoff(first_s=0.5, cap_s=60.0)
        self._waiting: deque[tuple[float, Message]] = deque()
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin in the background."""
        self._task = asyncio.create_task(self._run(), name="webhook")

    def send(self, message: Message) -> None:
        """Queue a message; returns at once."""
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._deliveries.count("dropped", "too many messages wait")
        self._waiting.append((clock.monotonic_s(), message))
        self._idle.clear()
        self._news.set()

    async def close(self, deadline_s: float) -> None:
        """Deliver what waits, as far as the time allows; the rest is counted as dropped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        for _ in self._waiting:
            self._deliveries.count("dropped", self._deliveries.failure or "no time was left")
        if self._waiting:
            logger.error("gave up %d messages to the webhook: %s", len(self._waiting), self._deliveries.failure)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=ATTEMPT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._waiting:
                    await self._deliver(session)
                self._idle.set()

    async def _deliver(self, session: aiohttp.ClientSession) -> None:
        """Try to deliver the first message in the queue; it stays there until it is delivered or given up."""
        since_s, message = self._waiting[0]
        try:
            await self._post(session, message)
        except RefusedError as error:
            self._fail(str(error))
            self._give_up(message, str(error))
        except Exception as error:  # noqa: BLE001 - a network fails in any way; counted and shown
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._fail(reason)
            if clock.monotonic_s() - since_s > TOO_OLD_S:
                self._give_up(message, reason)
            await asyncio.sleep(self._backoff.next_s())
        else:
            self._backoff.attempts = 0
            self._deliveries.count("delivered")
            self._take_off(message)

    async def _post(self, session: aiohttp.ClientSession, message: Message) -> None:
        headers = {}
        if self._settings.token_file:
            token = await asyncio.to_thread(Path(self._settings.token_file).read_text, encoding="utf-8")
            headers["Authorization"] = f"Bearer {token.strip()}"
        # A redirect would carry the token to somebody else.
        asked = session.post(self._settings.url, json=message, headers=headers, allow_redirects=False)
        async with asked as answer:
            if _OK <= answer.status < 300:  # noqa: PLR2004
                return
            said = f"HTTP {answer.status} {answer.reason}"
            if _WRONG <= answer.status < _BROKEN and answer.status not in _PATIENCE:
                raise RefusedError(said)
            raise aiohttp.ClientError(said)

    def _fail(self, reason: str) -> None:
        if not self._deliveries.failure:
            logger.warning("the webhook does not take messages: %s", reason)
        self._deliveries.count("failed", reason)

    def _give_up(self, message: Message, reason: str) -> None:
        self._deliveries.count("dropped", reason)
        self._take_off(message)

    def _take_off(self, message: Message) -> None:
        """Remove this message from the queue, unless it was pushed out meanwhile."""
        if self._waiting and self._waiting[0][1] is message:
            self._waiting.popleft()


@dataclass(frozen=True)
class AnnouncerSettings:
    """Whom to tell; by default nobody."""

    webhook: WebhookSettings | None = None
    targets_dir: Path | None = None
    """Folder in which Prometheus looks for files with targets."""
    runbooks: str = RUNBOOKS
    """Address at which `grafana/runbooks` is served, for links in messages."""
    notify: str = field(default="", repr=False)
    """Phones and chats, as apprise's addresses, which contain secrets."""
    otlp: OtlpSettings | None = None
    """The OpenTelemetry collector to send events to."""
    step_spans: int = 0
    """Number of steps between two that are sent as spans; 0: none."""
    version: str = ""
    """Version of holter, for events."""
    deadline_s: float = 5.0
    """Seconds at the end for delivering what is left."""


class Announcer:
    """Tells everybody what is new; called often."""

    def __init__(self, run: Run, settings: AnnouncerSettings) -> None:
        self._run, self._deadline_s = run, settings.deadline_s
        self._pager = Pager(run.settings.link, settings.runbooks)
        self._webhook = WebhookSender(settings.webhook, run.deliveries) if settings.webhook is not None else None
        about = run.settings
        self._notifier = Notifier(settings.notify, about.link, run.notifications) if settings.notify else None
        self._events: EventExport | None = None
        if settings.otlp is not None:
            self._events = EventExport(run, settings.otlp, settings.version, settings.step_spans)
        self._targets: TargetsFile | None = None
        if settings.targets_dir is not None:
            self._targets = TargetsFile(settings.targets_dir, about.run_id, about.address, run.disk)

    def start(self) -> None:
        """Start in a running event loop."""
        if self._webhook is not None:
            self._pager.remember(self._run.left_open)
            self._webhook.start()
        for teller in (self._notifier, self._events):
            if teller is not None:
                teller.start(self._run.left_open)
        self.write_targets()

    def tell(self, *, is_final: bool = False) -> None:
        """Tell about incidents that opened, changed or closed; returns at once. At the end it waits for no better diagnosis."""
        incidents, now_ns = self._run.incidents, clock.wall_ns()
        standing = incidents.standing() if is_final else incidents.settled()
        if self._webhook is not None:
            for message in self._pager.look(standing, clock.rfc3339(now_ns)):
                self._webhook.send(message)
        if self._notifier is not None:
            self._notifier.look(standing, incidents.all(), clock.monotonic_s(), is_final=is_final)
        if self._events is not None:
            self._events.look(standing, incidents.all(), now_ns)

    def write_targets(self) -> None:
        """Write the targets' file if ranks came or went."""
        if self._targets is not None:
            self._targets.write(self._run.roster)

    async def close(self) -> None:
        """Remove the targets and tell what is still to be told, in the time that is left; the run has ended."""
        if self._targets is not None:
            self._targets.remove()
        self.tell(is_final=True)
        closings = [
            asyncio.to_thread(one.close, self._deadline_s) for one in (self._notifier, self._events) if one is not None
        ]
        if self._webhook is not None:
            closings.append(self._webhook.close(self._deadline_s))
        await asyncio.gather(*closings)
