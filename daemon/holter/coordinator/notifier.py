"""Sends incidents to phones and chats through apprise (`HOLTER_NOTIFY=slack://…`), which knows a hundred services.

    NewsDesk ──▶ phone_text ──▶ Rationing ──▶ a Courier for each address

Critical incidents and warnings are told once each; again when cause, ranks or severity change, when a halt has kept a
checkpoint, and when they are over. An address is a secret: neither log nor status says more of it than the name of its
service.
"""

import importlib
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from holter import clock
from holter.coordinator.courier import Courier
from holter.exporters.incident_news import NewsDesk
from holter.exporters.phone_text import Kind, PhoneMessage, digest, message
from holter.exporters.webhook import Deliveries
from holter.records import Diagnosis

TOLD = ("critical", "warning")
BURST, EVERY_S = 6, 60.0
"""Number of messages in a row, and seconds until one more may follow; the others are joined into one."""
MAX_KEPT = 200
"""Largest number of messages that wait to be joined."""
SERVICE_S = 20
"""Seconds that a service may take to answer."""
_KINDS: dict[Kind, str] = {"critical": "failure", "warning": "warning", "info": "info", "over": "success"}

_BETWEEN = re.compile(r"[\s,]+(?=[\w+.-]+://)")
"""Separators between addresses."""

logger = logging.getLogger(__name__)


class Rationing:
    """Limits the number of messages; those beyond the limit are joined. Pure: time is an argument."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._left, self._since_s = float(BURST), 0.0
        self._kept: deque[PhoneMessage] = deque(maxlen=MAX_KEPT)

    def take(self, fresh: Sequence[PhoneMessage], now_s: float, *, is_final: bool = False) -> list[PhoneMessage]:
        """Return the messages to send now; at the end all of them, in one message if necessary."""
        self._left = min(float(BURST), self._left + max(0.0, now_s - self._since_s) / EVERY_S)
        self._since_s = now_s
        waiting = [*self._kept, *fresh]
        self._kept.clear()
        if not waiting or (len(waiting) <= self._left and not is_final):
            self._left -= len(waiting)
            return waiting
        # One is reserved for the message that says how many there are.
        num_alone = min(len(waiting), max(0, int(self._left) - 1))
        alone, rest = waiting[:num_alone], waiting[num_alone:]
        self._left -= len(alone)
        if len(rest) == 1 and (self._left >= 1 or is_final):
            self._left -= 1
            return [*alone, *rest]
        if self._left >= 1 or is_final:
            self._left -= 1
            return [*alone, digest(rest, self._address)] if rest else alone
        self._kept.extend(rest)
        return alone


class Notifier:
    """Sends messages about a run's incidents: `start`, `look` often, `close`."""

    def __init__(self, addresses: str, link: str, deliveries: Deliveries) -> None:
        self._link = link
        self._desk, self._rations = NewsDesk(TOLD), Rationing(link)
        self._addresses, self._deliveries = addresses, deliveries
        self._couriers: list[Courier[PhoneMessage]] | None = None
        # Loading a hundred services takes seconds: the dispatcher does it first, in its own thread.
        self._dispatcher = Courier[PhoneMessage | None]("apprise", self._dispatch, Deliveries("apprise"))

    def start(self, left_open: Sequence[Diagnosis]) -> None:
        """Begin; `left_open` are incidents that a former life of the run told about."""
        self._desk.remember(left_open)
        self._dispatcher.start()
        self._dispatcher.send(None)

    def look(
        self, standing: Sequence[Diagnosis], known: Sequence[Diagnosis], now_s: float, *, is_final: bool = False
    ) -> None:
        """Send what is new; returns at once."""
        fresh = [message(news, self._link) for news in self._desk.look(standing, known)]
        for one in self._rations.take(fresh, now_s, is_final=is_final):
            self._dispatcher.send(one)

    def close(self, deadline_s: float) -> None:
        """Block until everything is sent, at most for `deadline_s`."""
        until_s = clock.monotonic_s() + deadline_s
        self._dispatcher.close(deadline_s)
        for courier in self._couriers or ():
            courier.close(max(0.0, until_s - clock.monotonic_s()))

    def _dispatch(self, one: PhoneMessage | None) -> str:
        if self._couriers is None:
            self._couriers = [Courier(name, send, self._deliveries) for name, send in services(self._addresses)]
            for courier in self._couriers:
                courier.start()
        if one is not None:
            for courier in self._couriers:
                courier.send(one)
        return ""


Send = Callable[[PhoneMessage], str]


def services(addresses: str) -> list[tuple[str, Send]]:
    """Return the services as (name, function to send); an unusable address is logged by its place in the list."""
    try:
        apprise: Any = importlib.import_module("apprise")
    except ImportError:
        logger.warning("HOLTER_NOTIFY takes no effect: apprise is not installed (pip install holter[notify])")
        return []
    # Its log would show addresses with their secrets.
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    found: list[tuple[str, Send]] = []
    for number, address in enumerate(_BETWEEN.split(addresses.strip()), start=1):
        with_deadline = f"{address}{'&' if '?' in address else '?'}cto={SERVICE_S}&rto={SERVICE_S}"
        plugin = apprise.Apprise.instantiate(with_deadline, suppress_exceptions=True)
        if plugin is None:
            scheme = address.partition("://")[0]
            logger.warning("HOLTER_NOTIFY: address %d (%s) is none that apprise knows", number, scheme[:16])
            continue
        name = str(plugin.service_name)
        found.append((name, partial(_send, plugin, name)))
    return found


def _send(plugin: Any, name: str, one: PhoneMessage) -> str:
    """Send a message and return why it failed, or an empty string."""
    if one.incident and hasattr(plugin, "dedup") and hasattr(plugin, "action"):
        # PagerDuty: further messages about an incident update its page there, and the last one resolves it.
        plugin.dedup, plugin.action = one.incident, "map"
    is_sent = plugin.notify(body=one.body, title=one.title, notify_type=_KINDS[one.kind], body_format="text")
    return "" if is_sent else f"{name} did not take the message"
