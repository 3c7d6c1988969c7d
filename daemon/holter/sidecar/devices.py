"""The rank's accelerator: its readings, how they have changed, and what its driver and the kernel report about it.

every five seconds   a thread reads it ─▶ DeviceHistory: what grew, what holds its clock down and for how long ─▶ Device, if that is news
all the time         a second thread waits for its driver's events ─▶ DeviceEvent
twice a second       the kernel's log ─▶ DeviceEvent

A driver that hangs must not hold up the sidecar: threads query it, and `poll` only collects what they found. Without a
library, without a driver, or with a device that does not answer, nothing is reported, but that is logged once. A rank
that does not say which device it uses is assumed to use the one of its local rank, and the reading says that this is
assumed.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from holter.records import Device, DeviceEvent
from holter.sidecar.amd import AmdReader
from holter.sidecar.kernel_log import KernelLog
from holter.sidecar.nvml import NoDeviceError, NvmlReader, WantedDevice

POLL_S = 5.0
RETRY_S = 60.0
"""Seconds between attempts after a failure."""
NUM_ALIKE = 2
"""Number of readings in a row that must agree before a change of what holds the clock down is reported: power caps
flicker."""
RECENT_S = 600.0
TOLD_AGAIN_S = 60.0
"""Seconds between two reported readings when only a counter moved that may well move."""
TOLD_SOON_S, MANY = 10.0, 50
"""The same in seconds, when that counter grew by at least `MANY`."""
HELD_S = (30.0, 300.0, 3000.0)
"""Seconds: a clock that stays held down is reported again when it has been held this long."""
AT_ONCE = (
    "ecc_uncorrected",
    "ecc_uncorrected_lifetime",
    "rows_remapped_uncorrected",
    "nvlink_recoveries",
    "nvlinks_down",
)
"""Counters of which every change is reported."""
QUIETLY = ("ecc_corrected", "ecc_corrected_lifetime", "power_held_ns", "thermal_held_ns")
"""Counters whose change alone is not reported."""
WAIT_S = 1.0
"""Seconds of one wait for driver events."""
MAX_EVENTS = 64
TELL_XID = (1, 10, 100, 1000)
"""An Xid is reported when it occurs for the first, 10th, 100th and 1000th time."""
UNSAID_S = 30.0
"""Seconds after the start at which the device is assumed, if the rank has not named it and has completed no step."""
LAST_S = 1.5
"""Seconds for a last reading when the rank has died."""

logger = logging.getLogger(__name__)
News = Device | DeviceEvent


class Reader(Protocol):
    """Reads one device of some vendor."""

    @property
    def is_reached(self) -> bool:
        """Whether the device could be opened when it was looked for."""

    def read(self) -> Device:
        """Read the device once."""

    def wait(self, timeout_s: float) -> list[DeviceEvent] | None:
        """Return what its driver reports within this time; None if it reports nothing, or nothing any more."""


READERS: tuple[Callable[[WantedDevice], Reader], ...] = (NvmlReader, AmdReader)


class Devices:
    """Watches one device, the one that the rank computes on."""

    def __init__(
        self, local_rank: int = 0, visible: str | None = None, kernel_log: str = "", *, assumes: bool = True
    ) -> None:
        self.latest: Device | None = None
        """The last reading; None before the first, and while the device does not answer."""
        self._wanted = WantedDevice("", local_rank, visible)
        self._assumes = assumes
        self._is_known = False
        self._due_s = 0.0
        self._began_s: float | None = None
        self._read_s = 0.0
        self._reading: threading.Thread | None = None
        self._found: Device | None = None
        self._error = ""
        self._reader: Reader | None = None
        self._watch: EventWatch | None = None
        self._history = DeviceHistory()
        self._events = EventLog()
        self._kernel_log = KernelLog(kernel_log)
        self._is_logged = False
        self._is_late_logged = False

    def learn(self, uuid: str) -> None:
        """Take in which device the rank computes on."""
        if uuid != self._wanted.uuid:
            self._wanted = replace(self._wanted, uuid=uuid)
            self._begin()

    def assume(self) -> None:
        """Assume the device of the local rank, because the rank has not said which one it uses."""
        if self._assumes and not self._is_known:
            self._begin()

    def _begin(self) -> None:
        self._is_known, self._due_s, self.latest = True, 0.0, None
        self._reader, self._history = None, DeviceHistory()
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def poll(self, now_s: float) -> list[News]:
        """Return the new readings and events; never waits."""
        self._began_s = now_s if self._began_s is None else self._began_s
        if not self._is_known and now_s - self._began_s >= UNSAID_S:
            self.assume()
        return [*self._poll_device(now_s), *self._poll_events()]

    def _poll_events(self) -> list[News]:
        told = self._watch.take() if self._watch is not None else []
        known = self.latest if self.latest is not None else self._history.last
        told += self._kernel_log.read(known)
        return [event for event in told if self._events.is_news(event)]

    def _poll_device(self, now_s: float) -> list[News]:
        if not self._is_known:
            return []
        if self._reading is not None and self._reading.is_alive():
            self._say_if_late(now_s)
            self.latest = self.latest if now_s < self._due_s else None
            return []
        if self._reading is not None:
            self._reading = None
            return self._take(now_s)
        if now_s >= self._due_s:
            self._look(now_s)
        return []

    def _look(self, now_s: float) -> None:
        self._due_s, self._read_s = now_s + POLL_S, now_s
        self._reading = threading.Thread(target=self._read, args=(self._wanted,), name="device", daemon=True)
        self._reading.start()

    def _say_if_late(self, now_s: float) -> None:
        if now_s - self._read_s > UNSAID_S and not self._is_late_logged:
            self._is_late_logged = True
            logger.warning("the device's driver has not answered for %.0f s", now_s - self._read_s)

    def _take(self, now_s: float) -> list[News]:
        found, self._found = self._found, None
        if found is None:
            self.latest = None
            self._due_s = now_s + RETRY_S
            if not self._is_logged:
                self._is_logged = True
                logger.info("no device readings: %s", self._error)
            return []
        self.latest, is_news = self._history.add(found, now_s)
        if self._watch is None and self._reader is not None and self._reader.is_reached:
            self._watch = EventWatch(self._reader)
        return [self.latest] if is_news else []

    def _read(self, wanted: WantedDevice) -> None:
        """Read the device; runs in a thread of its own."""
        try:
            reader = self._reader if self._reader is not None else _open(wanted)
            found = reader.read()
        except Exception as error:  # noqa: BLE001 - a driver may fail in any way; said in the log
            self._error = str(error) if isinstance(error, NoDeviceError) else f"{type(error).__name__}: {error}"
            return
        if wanted == self._wanted:
            # A device that was lost when it was opened is opened again next time.
            self._reader, self._found = reader if reader.is_reached else None, found

    def before_the_end(self, now_s: float) -> list[News]:
        """Return the last reading before the rank died, with its age, and events that were reported about the device."""
        before = self.latest
        told: list[News] = self._poll_events()
        return (
            told if before is None else [msgspec.structs.replace(before, age_s=round(now_s - self._read_s, 1)), *told]
        )

    async def after_the_end(self, now: Callable[[], float]) -> list[News]:
        """Read the device once more after the rank's death, if it answers soon; return what is new.

        Its memory is free again by now, so only new errors and states are reported.
        """
        before, until_s = self._history.last, now() + LAST_S
        if self._reader is None or before is None:
            return []
        if self._reading is None:
            self._look(now())
        thread = self._reading
        if thread is not None:
            await asyncio.to_thread(thread.join, max(0.0, until_s - now()))
        told: list[News] = []
        if self._found is not None:
            after, _ = self._history.add(self._found, now())
            if after.states != before.states or after.grown != before.grown:
                errors = {name: getattr(after, name) for name in ("states", "counters", "grown", "recent")}
                told = [msgspec.structs.replace(before, **errors)]
        return [*told, *self._poll_events()]


def _open(wanted: WantedDevice) -> Reader:
    """Open the device with the first vendor's library that knows it; raise `NoDeviceError` with what each library said."""
    said = []
    for reader in READERS:
        try:
            return reader(wanted)
        except (ImportError, NoDeviceError) as error:
            said.append(f"{type(error).__name__}: {error}" if isinstance(error, ImportError) else str(error))
    raise NoDeviceError("; ".join(said))


class EventWatch:
    """Waits for a driver's events in a thread of its own."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._told: deque[DeviceEvent] = deque(maxlen=MAX_EVENTS)
        self._is_stopped = False
        threading.Thread(target=self._run, name="device events", daemon=True).start()

    def stop(self) -> None:
        """Stop after the present wait."""
        self._is_stopped = True

    def take(self) -> list[DeviceEvent]:
        """Return the events since the last call."""
        return [self._told.popleft() for _ in range(len(self._told))]

    def _run(self) -> None:
        while not self._is_stopped:
            try:
                told = self._reader.wait(WAIT_S)
            except Exception as error:  # noqa: BLE001 - a driver may fail in any way; said in the log
                logger.info("no device events: %s: %s", type(error).__name__, error)
                return
            if told is None:
                return
            self._told.extend(told)


class EventLog:
    """Counts events of the driver and the kernel, to tell one that is new from one that comes again and again."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, int, str], int] = {}

    def is_news(self, event: DeviceEvent) -> bool:
        """Count this event; whether it is to be reported."""
        key = (event.kind, event.xid, event.source)
        if key not in self._times and len(self._times) >= MAX_EVENTS:
            return False
        times = self._times[key] = self._times.get(key, 0) + 1
        return times in TELL_XID


class DeviceHistory:
    """The history of a device's readings.

    It holds how much the counters grew, for how long the clock has been held down, and whether a reading is news.
    """

    def __init__(self) -> None:
        self.last: Device | None = None
        self._first: dict[str, int] = {}
        self._recent: deque[tuple[float, Mapping[str, int]]] = deque()
        self._held_since: dict[str, float] = {}
        self._alike: tuple[Sequence[str], int] = ((), 0)
        self._told: Device | None = None
        self._told_s = 0.0

    def add(self, device: Device, now_s: float) -> tuple[Device, bool]:
        """Return the reading with its past added, and whether it is to be reported."""
        for name, value in device.counters.items():
            # After a reload of the driver, counters start from zero.
            self._first[name] = min(self._first.get(name, value), value)
        self._recent.append((now_s, device.counters))
        while len(self._recent) > 1 and self._recent[0][0] < now_s - RECENT_S:
            self._recent.popleft()
        self._held_since = {reason: self._held_since.get(reason, now_s) for reason in device.throttled_by}
        full = msgspec.structs.replace(
            device,
            grown=_growth(self._first, device.counters),
            recent=_growth(self._recent[0][1], device.counters),
            throttled_s={reason: round(now_s - since_s, 1) for reason, since_s in self._held_since.items()},
        )
        is_news = self._is_news(full, now_s)
        if is_news:
            self._told, self._told_s = full, now_s
        self.last = full
        return full, is_news

    def _is_news(self, device: Device, now_s: float) -> bool:
        reasons, number = self._alike
        number = number + 1 if reasons == device.throttled_by else 1
        self._alike = (device.throttled_by, number)
        told = self._told
        if told is None:
            return True
        if device.states != told.states or any(
            device.counters.get(name) != told.counters.get(name) for name in AT_ONCE
        ):
            return True
        if device.throttled_by != told.throttled_by:
            return number >= NUM_ALIKE
        if _times_held(device) > _times_held(told):
            return True
        grown = _growth(told.counters, device.counters)
        most = max((value for name, value in grown.items() if name not in QUIETLY), default=0)
        return most > 0 and now_s - self._told_s >= (TOLD_SOON_S if most >= MANY else TOLD_AGAIN_S)


def _growth(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in now.items() if value > before.get(name, value)}


def _times_held(device: Device) -> int:
    longest = max(device.throttled_s.values(), default=0.0)
    return sum(longest >= limit for limit in HELD_S)
