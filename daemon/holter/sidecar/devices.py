"""The rank's accelerator, read through NVML (nvidia-ml-py) where there is one: is its clock held down, and why.

A driver that hangs must not hold up the sidecar: a thread asks, and `poll` only takes what it found. Without the library, without a driver,
or with a device that does not answer nothing is said, but that is logged, once.
"""

import importlib
import logging
import threading
from types import ModuleType

from holter.records import Device

POLL_S = 5.0
RETRY_S = 60.0
"""After a failure."""
NUM_ALIKE = 2
"""So many readings in a row must agree before a change is told: power caps flicker."""

REASONS = {
    "thermal": 0x20 | 0x40,  # software and hardware thermal slowdown
    "power": 0x04 | 0x80,  # software power cap, hardware power brake
    "hardware": 0x08,
}
"""Bits of NVML's clock event reasons. Idleness, chosen application clocks and displays hold nothing down."""

logger = logging.getLogger(__name__)


class Devices:
    """Reads one device, the one that the rank said it computes on."""

    def __init__(self) -> None:
        self.latest: Device | None = None
        """The last reading; None while there is none, or the device does not answer."""
        self._uuid = ""
        self._due_s = 0.0
        self._reading: threading.Thread | None = None
        self._found: Device | None = None
        self._error = ""
        self._nvml: ModuleType | None = None
        self._told: list[str] | None = None
        self._last: list[str] | None = None
        self._num_alike = 0
        self._is_logged = False

    def learn(self, uuid: str) -> None:
        """The rank computes on this device."""
        if uuid != self._uuid:
            self._uuid, self._due_s, self._told, self._last = uuid, 0.0, None, None
            self.latest = None

    def poll(self, now_s: float) -> list[Device]:
        """A reading, if it is the first or the reasons that hold the clock down have changed; never waits."""
        if not self._uuid:
            return []
        if self._reading is not None and self._reading.is_alive():
            self.latest = self.latest if now_s < self._due_s else None
            return []
        if self._reading is not None:
            self._reading = None
            return self._take(now_s)
        if now_s >= self._due_s:
            self._due_s = now_s + POLL_S
            self._reading = threading.Thread(target=self._read, args=(self._uuid,), name="nvml", daemon=True)
            self._reading.start()
        return []

    def _take(self, now_s: float) -> list[Device]:
        device, self._found = self._found, None
        self.latest = device if device is not None and device.uuid == self._uuid else None
        if device is None:
            self._due_s = now_s + RETRY_S
            if not self._is_logged:
                self._is_logged = True
                logger.info("no device readings: %s", self._error)
            return []
        if device.uuid != self._uuid:
            return []
        self._num_alike = self._num_alike + 1 if device.throttled_by == self._last else 1
        self._last = device.throttled_by
        if self._told is not None and (device.throttled_by == self._told or self._num_alike < NUM_ALIKE):
            return []
        self._told = device.throttled_by
        return [device]

    def _read(self, uuid: str) -> None:
        """In a thread of its own."""
        try:
            if self._nvml is None:
                nvml = importlib.import_module("pynvml")
                nvml.nvmlInit()
                self._nvml = nvml
            self._found = read(self._nvml, uuid)
        except Exception as error:  # noqa: BLE001 - a driver may fail in any way; said in the log
            self._error = f"{type(error).__name__}: {error}"


def read(nvml: ModuleType, uuid: str) -> Device:
    """One look at a device; raises whatever the driver says."""
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    reasons = _reasons(nvml, handle)
    return Device(
        uuid=uuid,
        throttled_by=[name for name, bits in REASONS.items() if reasons & bits],
        clock_mhz=float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        clock_limit_mhz=float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
        temperature_c=float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    )


def _reasons(nvml: ModuleType, handle: object) -> int:
    """Drivers and libraries before 2023 know the same bits under an older name."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except (AttributeError, nvml.NVMLError):
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
