"""Reads AMD devices through their driver's library (amdsmi, which comes with ROCm), into the same records as NVIDIA's.

Each query is independent: what a device or a version of the library cannot provide ("N/A", an exception, a missing
function) is left out. Events are not waited for, because the kernel's log has them (`amdgpu ...: uncorrectable hardware
errors detected`).
"""

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from holter.records import Device, DeviceEvent
from holter.sidecar.nvml import NoDeviceError, WantedDevice

HELD_DOWN = {
    "thermal": ("active_socket_thrm", "active_hbm_thrm", "active_vr_thrm"),
    "power": ("active_ppt_pwr",),
    "hardware": ("active_prochot_thrm",),
}
"""Reason why the clock is held down -> the library's violation flags that mean it."""
MB = 1 << 20

logger = logging.getLogger(__name__)


class AmdReader:
    """Reads one AMD device."""

    is_reached = True

    def __init__(self, wanted: WantedDevice) -> None:
        """Open the device; raise ImportError without the library, `NoDeviceError` without a driver or such a device."""
        try:
            self._smi: Any = importlib.import_module("amdsmi")
            self._smi.amdsmi_init()
            handles = list(self._smi.amdsmi_get_processor_handles())
        except ImportError:
            raise
        except Exception as error:  # noqa: BLE001 - it loads ROCm's library when it is imported, and says in its own words what is missing
            raise NoDeviceError(f"amdsmi: {type(error).__name__}: {error}") from None
        self._said: set[str] = set()
        self._handle = self._find(handles, wanted)
        uuid = str(self._ask("amdsmi_get_gpu_device_uuid") or wanted.uuid)
        address = str(self._ask("amdsmi_get_gpu_device_bdf") or "").lower()
        self._identity: dict[str, Any] = {
            "uuid": uuid,
            "address": address,
            "is_assumed": wanted.is_assumed,
            "index": handles.index(self._handle),
        }

    def read(self) -> Device:
        """Read the device once; raise `NoDeviceError` if it answered no question at all."""
        smi = self._smi
        clock = self._ask("amdsmi_get_clock_info", lambda: smi.AmdSmiClkType.GFX) or {}
        power = self._ask("amdsmi_get_power_info") or {}
        used = self._ask("amdsmi_get_gpu_vram_usage") or {}
        held = self._ask("amdsmi_get_violation_status") or {}
        hot = self._ask(
            "amdsmi_get_temp_metric",
            lambda: smi.AmdSmiTemperatureType.HOTSPOT,
            lambda: smi.AmdSmiTemperatureMetric.CURRENT,
        )
        counters, states = self._errors()
        if not (clock or power or used or counters or hot is not None):
            raise NoDeviceError("amdsmi answers no question about it")
        draws = next(
            (
                number(power, name)
                for name in ("current_socket_power", "socket_power", "average_socket_power")
                if number(power, name) is not None
            ),
            None,
        )
        vram = {name: number(used, name) for name in ("vram_used", "vram_total")}
        return Device(
            **self._identity,
            throttled_by=[
                reason for reason, names in HELD_DOWN.items() if any(held.get(name) is True for name in names)
            ],
            clock_mhz=number(clock, "clk"),
            clock_limit_mhz=number(clock, "max_clk"),
            temperature_c=number({"": hot}, ""),
            power_w=draws,
            memory_used_bytes=None if vram["vram_used"] is None else int(vram["vram_used"]) * MB,
            memory_total_bytes=None if vram["vram_total"] is None else int(vram["vram_total"]) * MB,
            counters=counters,
            states=states,
        )

    def wait(self, timeout_s: float) -> list[DeviceEvent] | None:
        """Return None: this library reports no events."""
        del timeout_s
        return None

    def _errors(self) -> tuple[dict[str, int], list[str]]:
        ecc = self._ask("amdsmi_get_gpu_total_ecc_count") or {}
        links = (self._ask("amdsmi_get_pcie_info") or {}).get("pcie_metric", {})
        pages = self._ask("amdsmi_get_gpu_bad_page_info")
        told = {
            "ecc_corrected": number(ecc, "correctable_count"),
            "ecc_uncorrected": number(ecc, "uncorrectable_count"),
            "pcie_replays": number(links, "pcie_replay_count"),
            "pages_retired": float(len(pages)) if isinstance(pages, list) else None,
        }
        is_pending = isinstance(pages, list) and any(
            "PENDING" in str(page.get("status", "")) for page in pages if isinstance(page, dict)
        )
        return {name: int(value) for name, value in told.items() if value is not None}, [
            "page_retirement_pending"
        ] * is_pending

    def _find(self, handles: list[Any], wanted: WantedDevice) -> Any:
        if wanted.uuid:
            tail = wanted.uuid.removeprefix("GPU-").lower()
            for handle in handles:
                self._handle = handle
                if tail in str(self._ask("amdsmi_get_gpu_device_uuid") or "").lower():
                    return handle
        visible = [int(word) for word in (wanted.visible or "").split(",") if word.strip().isdigit()] or list(
            range(len(handles))
        )
        place = wanted.place
        if wanted.uuid or place >= len(visible) or visible[place] >= len(handles):
            raise NoDeviceError("amdsmi knows no such device")
        return handles[visible[place]]

    def _ask(self, name: str, *arguments: Callable[[], Any]) -> Any:
        """Call a function of the library and return its result; None if it is missing or fails.

        Arguments are looked up in here, because an older library may lack them too.
        """
        try:
            return getattr(self._smi, name)(self._handle, *(argument() for argument in arguments))
        except Exception as error:  # noqa: BLE001 - the library's own exceptions, of which a version may have others
            if name not in self._said:
                self._said.add(name)
                logger.info("%s: %s: %s", name, type(error).__name__, error)
            return None


def number(told: Mapping[str, Any], name: str) -> float | None:
    """Return a reading if it is a number, None if it is missing or "N/A"."""
    value = told.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
