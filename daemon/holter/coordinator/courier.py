"""Delivers messages to somebody outside, in a thread: however slow the receiver is, nobody here waits.

    send ──▶ [bounded queue] ──▶ thread: deliver, again after a pause, give up ──▶ Deliveries

Delivering may block for as long as it likes: what waits meanwhile is bounded, the oldest goes first, and the end of the coordinator does not wait
for the thread beyond a deadline.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from holter import clock
from holter.exporters.webhook import Deliveries

T = TypeVar("T")

MAX_WAITING = 64
MAX_ATTEMPTS = 5
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0
logger = logging.getLogger(__name__)


class Courier(Generic[T]):
    """The queue and thread of one receiver: `start`, `send`, `close`."""

    def __init__(self, name: str, deliver: Callable[[T], str], deliveries: Deliveries) -> None:
        """Make a courier; `deliver` returns why it failed, without any secret, or an empty string."""
        self._name, self._deliver, self._deliveries = name, deliver, deliveries
        self._waiting: deque[T] = deque()
        self._change = threading.Condition()
        self._is_busy = self._is_closing = False

    def start(self) -> None:
        """Begin in the background."""
        threading.Thread(target=self._run, name=f"holter-{self._name}", daemon=True).start()

    def send(self, message: T) -> None:
        """Queue a message; returns at once."""
        with self._change:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self._deliveries.count("dropped", "too many messages wait")
            self._waiting.append(message)
            self._change.notify_all()

    def close(self, deadline_s: float) -> None:
        """Wait until everything is delivered, for at most `deadline_s`; the rest is counted as dropped."""
        until_s = clock.monotonic_s() + deadline_s
        with self._change:
            while (self._waiting or self._is_busy) and (left_s := until_s - clock.monotonic_s()) > 0:
                self._change.wait(left_s)
            self._is_closing = True
            lost = len(self._waiting) + self._is_busy
            self._waiting.clear()
            self._change.notify_all()
        for _ in range(lost):
            self._deliveries.count("dropped", self._deliveries.failure or "no time was left")
        if lost:
            logger.error("gave up %d messages to %s", lost, self._name)

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._waiting and not self._is_closing:
                    self._change.wait()
                if self._is_closing:
                    return
                message, self._is_busy = self._waiting.popleft(), True
            self._try(message)
            with self._change:
                self._is_busy = False
                self._change.notify_all()

    def _try(self, message: T) -> None:
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, MAX_ATTEMPTS + 1):
            failure = self._attempt(message)
            if self._is_closing:
                # It was counted as lost already.
                return
            if not failure:
                self._deliveries.count("delivered")
                return
            self._deliveries.count("failed", failure)
            if attempt == 1:
                logger.warning("%s does not take messages: %s", self._name, failure)
            if attempt < MAX_ATTEMPTS:
                with self._change:
                    self._change.wait_for(lambda: self._is_closing, pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
        self._deliveries.count("dropped", failure)

    def _attempt(self, message: T) -> str:
        try:
            return self._deliver(message)
        except Exception as error:  # noqa: BLE001 - whatever a library raises; what it says may hold a secret
            return type(error).__name__
