"""Reads NVIDIA devices through their driver's library (NVML, through nvidia-ml-py): which one is the rank's, its readings, its driver's events.

Each query is independent: what a device, a driver or a binding cannot provide is left out, asked in another way if there
is one, and logged once. Only a lost device ends a reading, and then that is what the reading says.

    TotalEccErrors ──NOT_SUPPORTED──▶ FieldValues ──▶ by location ──▶ not known
"""

import importlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from holter import clock
from holter.records import Device, DeviceEvent

REASONS = {
    "thermal": 0x20 | 0x40,  # software and hardware thermal slowdown
    "power": 0x04 | 0x80,  # software power cap, hardware power brake
    "hardware": 0x08,
}
"""Bits of NVML's clock event reasons. Idleness, chosen application clocks and displays are left out: they hold nothing
down."""

UNSUPPORTED, FUNCTION_NOT_FOUND, TIMED_OUT, LOST, RESET_REQUIRED = 3, 13, 10, 15, 16
"""Some of NVML's error numbers."""
FOR_GOOD = (UNSUPPORTED, FUNCTION_NOT_FOUND, 25, 26)
"""Error numbers after which a function is not called again: not supported, no such function, another version of its
argument, deprecated."""
XID_EVENT, DOUBLE_BIT_EVENT = 0x8, 0x2
ANY_INSTANCE = 0xFFFFFFFF
"""Instance number of an event that does not concern one MIG instance."""
MAX_LINKS = 36
MIN_WAIT_S = 0.5
"""Seconds to wait at least: a library that does not wait by itself must not keep a processor busy."""
MEMORY_V2 = 0x02000028
OLDER_NAMES = {
    "nvmlInitWithFlags": ("nvmlInit_v2", "nvmlInit"),
    "nvmlDeviceGetCount_v2": ("nvmlDeviceGetCount",),
    "nvmlDeviceGetHandleByIndex_v2": ("nvmlDeviceGetHandleByIndex",),
    "nvmlEventSetWait_v2": ("nvmlEventSetWait",),
}
"""Older names of functions that take the same arguments, or fill the beginning of the same struct."""

FIELDS = {
    3: "ecc_corrected",
    4: "ecc_uncorrected",
    5: "ecc_corrected_lifetime",
    6: "ecc_uncorrected_lifetime",
    31: "page_retirement_pending",
    38: "nvlink_crc_errors",
    52: "nvlink_replays",
    59: "nvlink_recoveries",
    74: "power_held_ns",
    75: "thermal_held_ns",
    94: "pcie_replays",
    142: "rows_remapped_corrected",
    143: "rows_remapped_uncorrected",
    144: "row_remap_pending",
    145: "row_remap_failed",
    160: "nvlink_ecc_errors",
    230: "reset_required",  # which of its ways to recovery the driver asks for; 0: none
}
"""Field numbers of `nvmlDeviceGetFieldValues`, through which newer drivers report what their own functions no longer do."""
STATES = ("reset_required", "page_retirement_pending", "row_remap_pending", "row_remap_failed")
LINK_COUNTERS = {0: "nvlink_replays", 1: "nvlink_recoveries", 2: "nvlink_crc_errors", 4: "nvlink_ecc_errors"}
"""Counter kinds of `nvmlDeviceGetNvLinkErrorCounter`."""
ECC = {
    "ecc_corrected": (0, 0),
    "ecc_uncorrected": (1, 0),
    "ecc_corrected_lifetime": (0, 1),
    "ecc_uncorrected_lifetime": (1, 1),
}
"""Counter -> (kind of error, 0 since the driver was loaded or 1 in the device's life)."""
HELD = {"power_held_ns": 0, "thermal_held_ns": 1}
"""Counter -> kind of `nvmlDeviceGetViolationStatus`."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WantedDevice:
    """Which device the rank computes on."""

    uuid: str = ""
    """UUID as the rank said it; empty if it has not said."""
    local_rank: int = 0
    visible: str | None = None
    """`CUDA_VISIBLE_DEVICES` or another vendor's equivalent; None if not set."""

    @property
    def is_assumed(self) -> bool:
        """Whether the device is assumed from the local rank, because nothing says which one it is."""
        return not self.uuid and self.visible is None

    @property
    def place(self) -> int:
        """Index among the visible devices: a rank that sees only one has that one, whatever its local rank."""
        return 0 if self.visible is not None and "," not in self.visible else self.local_rank

    @property
    def name(self) -> str:
        """Name for a device that does not provide its own."""
        place = "the host" if self.visible is None else f"those visible ({self.visible})"
        return self.uuid or f"device {self.place} of {place}"


class NoDeviceError(Exception):
    """Raised when there is no such device, or it cannot be asked; the text says why."""


class NvmlReader:
    """Reads one NVIDIA device."""

    def __init__(self, wanted: WantedDevice) -> None:
        """Open the device; raise ImportError without the binding, `NoDeviceError` without library, driver or device."""
        self._wanted = wanted
        self._nvml: Any = importlib.import_module("pynvml")
        self._refused: set[str] = set()
        self._said: set[str] = set()
        self._events: Any = None
        self._num_links: int | None = None
        self._is_lost = self._needs_reset = False
        self._has_memory_v2 = True
        try:
            _initialise(self._nvml)
            self._own = self._find()
            self._whole, self._instance = self._parent()
        except self._nvml.NVMLError as error:
            if error.value != LOST:
                raise NoDeviceError(f"NVMLError: {error}") from None
            self._is_lost, self._own, self._whole, self._instance = True, None, None, ANY_INSTANCE
        self._identity = self._identify()
        _log_once(f"reads {self._identity['uuid']} through NVML")

    def read(self) -> Device:
        """Read the device once; raise `NoDeviceError` if it answered no question at all."""
        if self._own is None:
            return Device(**self._identity, throttled_by=[], states=["lost"])
        self._is_lost = self._needs_reset = False
        refused = len(self._refused)
        counters, states = self._errors()
        reasons = self._reasons()
        used, total = self._memory()
        temperature, power = self._ask("nvmlDeviceGetTemperature", 0), self._ask("nvmlDeviceGetPowerUsage")
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        clock, most = self._clock("nvmlDeviceGetClockInfo"), self._clock("nvmlDeviceGetMaxClockInfo")
        gone = ["lost"] * self._is_lost + ["reset_required"] * (self._needs_reset and "reset_required" not in states)
        if gone:
            states = [*gone, *states]
        elif reasons is None and not counters and total is None and temperature is None and clock is None:
            raise NoDeviceError("NVML answers no question about it")
        if len(self._refused) > refused:
            _log_once(f"not told by this device or driver: {', '.join(sorted(self._refused))}")
        return Device(
            **self._identity,
            throttled_by=[name for name, bits in REASONS.items() if (reasons or 0) & bits],
            clock_mhz=clock,
            clock_limit_mhz=most,
            temperature_c=None if temperature is None else float(temperature),
            power_w=None if power is None else power / 1000,
            power_limit_w=None if limit is None else limit / 1000,
            memory_used_bytes=used,
            memory_total_bytes=total,
            states=states,
            counters=counters,
        )

    @property
    def is_reached(self) -> bool:
        """Whether the device could be opened when it was looked for."""
        return self._own is not None

    def wait(self, timeout_s: float) -> list[DeviceEvent] | None:
        """Return what the driver reports within this time; None if this device reports nothing, or nothing any more."""
        if self._whole is None:
            return None
        began_s = clock.monotonic_s()
        try:
            self._events = self._events if self._events is not None else self._register()
            told = self._nvml.nvmlEventSetWait_v2(self._events, round(timeout_s * 1000))
        except (AttributeError, self._nvml.NVMLError) as error:
            return self._waited(error, timeout_s - (clock.monotonic_s() - began_s))
        is_ours = self._instance == ANY_INSTANCE or told.gpuInstanceId in {ANY_INSTANCE, self._instance}
        if not is_ours or told.eventType != XID_EVENT:
            # A double-bit error also moves a counter, which is read.
            return []
        known = {"uuid": self._identity["uuid"], "is_assumed": self._wanted.is_assumed}
        return [DeviceEvent(kind="xid", source="driver", xid=int(told.eventData), **known)]

    def _waited(self, error: Any, left_s: float) -> list[DeviceEvent] | None:
        """Handle a wait that gave no event: it timed out, or this device cannot be waited for (None)."""
        number = getattr(error, "value", FUNCTION_NOT_FOUND)
        if number in FOR_GOOD:
            _log_once(f"reports no events: {error}")
            return None
        if number != TIMED_OUT:
            # If the device is lost, the next reading says so.
            _log_once(f"waiting for events: {error}")
        threading.Event().wait(max(0.0, min(left_s, MIN_WAIT_S) if number == TIMED_OUT else left_s))
        return []

    def _register(self) -> Any:
        supported = self._ask("nvmlDeviceGetSupportedEventTypes", of=self._whole)
        wanted = (XID_EVENT | DOUBLE_BIT_EVENT) & supported if supported else XID_EVENT
        events = self._nvml.nvmlEventSetCreate()
        try:
            self._nvml.nvmlDeviceRegisterEvents(self._whole, wanted or XID_EVENT, events)
        except self._nvml.NVMLError:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(events)
            raise
        return events

    def _ask(self, name: str, *arguments: Any, of: Any = None) -> Any:
        """Call one function for the device (or for `of`) and return its result; None if it is not available."""
        if name in self._refused or self._own is None:
            return None
        handle = of if of is not None else self._whole
        try:
            return getattr(self._nvml, name)(handle, *arguments)
        except self._nvml.NVMLError as error:
            self._judge(name, error)
        except (AttributeError, TypeError, ValueError) as error:
            # An older binding, one that takes other arguments, or text that cannot be decoded.
            self._refused.add(name)
            self._say(name, error)
        return None

    def _judge(self, name: str, error: Any) -> None:
        if error.value == LOST:
            self._is_lost = True
        elif error.value == RESET_REQUIRED:
            self._needs_reset = True
        elif error.value in FOR_GOOD:
            self._refused.add(name)
        else:
            self._say(name, error)

    def _say(self, name: str, error: Exception) -> None:
        if name not in self._said:
            self._said.add(name)
            logger.info("NVML: %s: %s", name, error)

    def _find(self) -> Any:
        if self._wanted.uuid:
            return self._by_uuid(self._wanted.uuid)
        visible = list(self._visible())
        if not visible:
            raise NoDeviceError("no device is visible to this rank")
        place = self._wanted.place
        if place >= len(visible):
            raise NoDeviceError(f"local rank {self._wanted.local_rank} has none of {len(visible)} visible devices")
        if visible[place] is None:
            raise self._nvml.NVMLError(LOST)
        return visible[place]

    def _by_uuid(self, uuid: str) -> Any:
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError as error:
            if error.value == LOST:
                raise
            # CUDA accepts the beginning of a UUID, and a part of a device by its own UUID or by its parent's (MIG-GPU-.../1/0).
            everything = list(self._all())
            there = [gpu for gpu in everything if gpu is not None]
            for handle in (*there, *(mig for gpu in there for mig in self._parts(gpu))):
                own = str(self._ask_any("nvmlDeviceGetUUID", handle) or "")
                if own.startswith(uuid) or own.removeprefix("MIG-") == uuid.removeprefix("GPU-"):
                    return handle
            if None in everything:
                raise nvml.NVMLError(LOST) from None
            raise

    def _visible(self) -> Iterator[Any]:
        """Yield the visible devices as CUDA counts them, None for a lost one.

        Devices listed after one that does not exist are not visible.
        """
        text = self._wanted.visible
        if text is None:
            everything = list(self._all())
            parts = [part for gpu in everything if gpu is not None for part in self._parts(gpu)]
            # Of a device's parts (MIG), a process sees only one, unless it is told which.
            yield from parts[:1] or everything
            return
        for word in (part.strip() for part in text.split(",")):
            try:
                if not word:
                    return
                if word.lstrip("-").isdigit():
                    if int(word) < 0:
                        return
                    yield self._by_index(int(word))
                elif word.startswith("MIG-GPU-"):
                    yield self._by_instance(word)
                else:
                    yield self._by_uuid(word)
            except self._nvml.NVMLError as error:
                if error.value != LOST:
                    return
                yield None

    def _by_instance(self, word: str) -> Any:
        """Find a part by `MIG-GPU-<uuid>/<instance>/<compute instance>`, as drivers before 470 name it."""
        uuid, *numbers = word.removeprefix("MIG-").split("/")
        for part in self._parts(self._nvml.nvmlDeviceGetHandleByUUID(uuid)):
            found = (
                self._ask_any("nvmlDeviceGetGpuInstanceId", part),
                self._ask_any("nvmlDeviceGetComputeInstanceId", part),
            )
            if (
                numbers
                and str(found[0]) == numbers[0]
                and (len(numbers) == 1 or found[1] is None or str(found[1]) == numbers[1])
            ):
                return part
        raise self._nvml.NVMLError(6)

    def _all(self) -> Iterator[Any]:
        """Yield the devices of this host; None for one that is lost, which may be another rank's."""
        yield from (self._by_index(index) for index in range(self._nvml.nvmlDeviceGetCount()))

    def _by_index(self, index: int) -> Any:
        try:
            return self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError as error:
            if error.value != LOST:
                raise
            return None

    def _parts(self, handle: Any) -> Iterator[Any]:
        mode = self._ask_any("nvmlDeviceGetMigMode", handle)
        if not mode or not mode[0]:
            return
        for index in range(self._ask_any("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            part = self._ask_any("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            if part is not None:
                yield part

    def _ask_any(self, name: str, *arguments: Any) -> Any:
        """Call one function before our device is known; None if it is not available."""
        with suppress(AttributeError, self._nvml.NVMLError):
            return getattr(self._nvml, name)(*arguments)
        return None

    def _parent(self) -> tuple[Any, int]:
        """Return the whole device, and the number of the MIG instance that is ours."""
        is_part = self._ask_any("nvmlDeviceIsMigDeviceHandle", self._own)
        if not getattr(is_part, "value", is_part):
            return self._own, ANY_INSTANCE
        whole = self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._own)
        instance = self._ask_any("nvmlDeviceGetGpuInstanceId", self._own)
        return whole, ANY_INSTANCE if instance is None else int(instance)

    def _identify(self) -> dict[str, Any]:
        told = self._ask("nvmlDeviceGetUUID", of=self._own)
        known: dict[str, Any] = {"uuid": str(told or self._wanted.name), "is_assumed": self._wanted.is_assumed}
        if self._own is None:
            return known
        known["name"] = str(self._ask("nvmlDeviceGetName") or "")
        known["index"] = self._ask("nvmlDeviceGetIndex")
        if self._whole is not self._own:
            known["parent"] = str(self._ask("nvmlDeviceGetUUID", of=self._whole) or "")
        pci = self._ask("nvmlDeviceGetPciInfo")
        if pci is not None:
            known["address"] = address_of(pci.busId)
        return known

    def _reasons(self) -> int | None:
        """Return the bits that say what holds the clock down.

        Drivers and libraries before 2023 have them under an older name.
        """
        found = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        found = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") if found is None else found
        return None if found is None else int(found)

    def _clock(self, name: str) -> float | None:
        """Return a clock of the multiprocessors, or else of the graphics, which is the same on most devices."""
        found = self._ask(name, 1)
        found = self._ask(name, 0) if found is None else found
        return None if found is None else float(found)

    def _memory(self) -> tuple[int | None, int | None]:
        """Return the bytes used and the bytes in all, of our own part of the device."""
        found = self._ask("nvmlDeviceGetMemoryInfo", MEMORY_V2, of=self._own) if self._has_memory_v2 else None
        if "nvmlDeviceGetMemoryInfo" in self._refused and self._has_memory_v2:
            # The binding has one function for both versions: the older one may still work.
            self._has_memory_v2 = False
            self._refused.discard("nvmlDeviceGetMemoryInfo")
        if not self._has_memory_v2:
            found = self._ask("nvmlDeviceGetMemoryInfo", of=self._own)
        return (None, None) if found is None else (int(found.used), int(found.total))

    def _errors(self) -> tuple[dict[str, int], list[str]]:
        """Return the error counters, and the error states that hold now."""
        fields = self._fields()
        found: dict[str, int | None] = {name: self._ask_ecc(name, *kinds, fields) for name, kinds in ECC.items()}
        rows = self._ask("nvmlDeviceGetRemappedRows")
        if rows is not None:
            found["rows_remapped_corrected"], found["rows_remapped_uncorrected"] = rows[0], rows[1]
            found["row_remap_pending"], found["row_remap_failed"] = rows[2], rows[3]
        pages = [self._ask("nvmlDeviceGetRetiredPages", cause) for cause in (0, 1)]
        if any(pages_of is not None for pages_of in pages):
            found["pages_retired"] = sum(len(pages_of or ()) for pages_of in pages)
        found["page_retirement_pending"] = self._ask("nvmlDeviceGetRetiredPagesPendingStatus")
        found["pcie_replays"] = self._ask("nvmlDeviceGetPcieReplayCounter")
        for name, kind in HELD.items():
            told = self._ask("nvmlDeviceGetViolationStatus", kind)
            found[name] = None if told is None else int(told.violationTime)
        # Where two ways differ, one of them is no longer kept up, and says 0.
        known = fields | {
            name: max(int(value), fields.get(name, 0)) for name, value in found.items() if value is not None
        }
        known |= {} if self._is_lost else self._links(known)
        return (
            {name: value for name, value in known.items() if name not in STATES},
            [name for name in STATES if known.get(name)],
        )

    def _ask_ecc(self, name: str, kind: int, lasting: int, fields: Mapping[str, int]) -> int | None:
        found = self._ask("nvmlDeviceGetTotalEccErrors", kind, lasting)
        if found is not None or name in fields:
            return None if found is None else int(found)
        places = [self._ask("nvmlDeviceGetMemoryErrorCounter", kind, lasting, place) for place in (2, 7)]
        return None if all(one is None for one in places) else sum(one or 0 for one in places)

    def _fields(self) -> dict[str, int]:
        """Return those of `FIELDS` that could be read; each has its own error code."""
        told = self._ask("nvmlDeviceGetFieldValues", list(FIELDS))
        known = {}
        for one in told if told is not None else ():
            if one.nvmlReturn == LOST:
                self._is_lost = True
            elif one.nvmlReturn == 0 and one.fieldId in FIELDS:
                known[FIELDS[one.fieldId]] = _number(one)
        return known

    def _links(self, known: dict[str, int]) -> dict[str, int]:
        """Count how many NVLinks went down, and the errors on the others where the fields did not have them."""
        active = []
        for link in range(MAX_LINKS):
            is_active = self._ask_any("nvmlDeviceGetNvLinkState", self._whole, link)
            if is_active is None:
                break
            active += [link] * bool(is_active)
        if not active and not self._num_links:
            return {}
        self._num_links = max(self._num_links or 0, len(active))
        found = {"nvlinks_down": self._num_links - len(active)}
        for kind, name in LINK_COUNTERS.items():
            if name not in known:
                said = [self._ask_any("nvmlDeviceGetNvLinkErrorCounter", self._whole, link, kind) for link in active]
                found |= {name: sum(one or 0 for one in said)} if any(one is not None for one in said) else {}
        return found


def _initialise(nvml: ModuleType) -> None:
    """Initialise NVML, and tell the binding the older names of functions that this library lacks under newer ones."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value != FUNCTION_NOT_FOUND or not _knows_older_names(nvml):
            raise
        nvml.nvmlInit()
    else:
        _knows_older_names(nvml)


def _knows_older_names(nvml: ModuleType) -> bool:
    library, known = getattr(nvml, "nvmlLib", None), getattr(nvml, "_nvmlGetFunctionPointer_cache", None)
    if library is None or known is None:
        return False
    for name, older in OLDER_NAMES.items():
        found = next((each for each in (name, *older) if hasattr(library, each)), None)
        if found is not None:
            known.setdefault(name, getattr(library, found))
    return True


def _number(told: Any) -> int:
    """Convert a field's value according to its type: a double, 32 bits, 64 bits, or signed."""
    parts: Sequence[str] = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    name = parts[told.valueType] if 0 <= told.valueType < len(parts) else "ullVal"
    return int(getattr(told.value, name))


def address_of(bus_id: str | bytes) -> str:
    """Return a PCI address as the kernel writes it: `0000:3b:00.0` for NVML's `00000000:3B:00.0`."""
    text = (bus_id.decode() if isinstance(bus_id, bytes) else bus_id).lower()
    domain, colon, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest}" if colon and domain else text


_logged: set[str] = set()


def _log_once(text: str) -> None:
    if text not in _logged:
        _logged.add(text)
        logger.info("%s", text)
