"""AMD's devices give the same records; what its library does not know ("N/A", an exception, a function that is missing) is left out."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from holter.sidecar.amd import AmdReader
from holter.sidecar.nvml import NoDeviceError, WantedDevice

N_A = "N/A"
READINGS: dict[str, Any] = {
    "amdsmi_get_gpu_device_bdf": "0000:0C:00.0",
    "amdsmi_get_clock_info": {"clk": 1300, "min_clk": 132, "max_clk": 2100, "clk_locked": N_A, "clk_deep_sleep": N_A},
    "amdsmi_get_power_info": {
        "socket_power": 740,
        "current_socket_power": N_A,
        "average_socket_power": N_A,
        "power_limit": 750,
    },
    "amdsmi_get_temp_metric": 91,
    "amdsmi_get_gpu_vram_usage": {"vram_total": 196592, "vram_used": 1000},
    "amdsmi_get_violation_status": {"active_prochot_thrm": False, "active_ppt_pwr": N_A, "active_socket_thrm": True},
    "amdsmi_get_gpu_total_ecc_count": {"correctable_count": 9, "uncorrectable_count": 2, "deferred_count": 0},
    "amdsmi_get_pcie_info": {"pcie_static": {}, "pcie_metric": {"pcie_replay_count": 5, "pcie_width": 16}},
    "amdsmi_get_gpu_bad_page_info": [{"value": 1, "page_address": 4096, "page_size": 4096, "status": "PENDING"}],
}


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package's own names, which answer by the handle."""
    made: Any = ModuleType("amdsmi")
    made.amdsmi_init = lambda: None
    made.amdsmi_get_processor_handles = lambda: ["first", "second"]
    made.amdsmi_get_gpu_device_uuid = lambda handle: {"first": "aaaa-1", "second": "bbbb-2"}[handle]
    made.AmdSmiClkType = SimpleNamespace(GFX=1)
    made.AmdSmiTemperatureType = SimpleNamespace(HOTSPOT=1)
    made.AmdSmiTemperatureMetric = SimpleNamespace(CURRENT=0)
    for name, told in READINGS.items():
        setattr(made, name, lambda *_, told=told: told)
    monkeypatch.setitem(sys.modules, "amdsmi", made)
    return made


def test_its_readings(smi: ModuleType) -> None:
    del smi
    device = AmdReader(WantedDevice("GPU-bbbb-2")).read()
    assert ("bbbb-2", "0000:0c:00.0", 1) == (device.uuid, device.address, device.index)
    assert (["thermal"], 1300.0, 2100.0, 91.0, 740.0) == (
        device.throttled_by,
        device.clock_mhz,
        device.clock_limit_mhz,
        device.temperature_c,
        device.power_w,
    )
    assert (1000 << 20, 196592 << 20) == (device.memory_used_bytes, device.memory_total_bytes)
    assert {"ecc_corrected": 9, "ecc_uncorrected": 2, "pcie_replays": 5, "pages_retired": 1} == device.counters
    assert ["page_retirement_pending"] == device.states


@pytest.mark.parametrize("name", READINGS)
@pytest.mark.parametrize("how", ["raises", "is missing"])
def test_a_function_that_fails_takes_nothing_else_with_it(smi: Any, name: str, how: str) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("AMDSMI_STATUS_NOT_SUPPORTED")

    setattr(smi, name, fail) if how == "raises" else delattr(smi, name)
    device = AmdReader(WantedDevice("", 0, "0")).read()
    known = [
        device.clock_mhz,
        device.power_w,
        device.temperature_c,
        device.memory_total_bytes,
        device.counters.get("ecc_corrected"),
        device.address or None,
    ]
    assert known.count(None) <= 1


def test_one_that_tells_nothing_a_device_that_is_not_there_and_no_library(
    smi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoDeviceError):
        AmdReader(WantedDevice("GPU-cccc"))
    with pytest.raises(NoDeviceError):
        AmdReader(WantedDevice("", 2, None))
    for name in READINGS:
        delattr(smi, name)
    with pytest.raises(NoDeviceError):
        AmdReader(WantedDevice("", 0, "0")).read()
    smi.amdsmi_init = lambda: 1 / 0
    with pytest.raises(NoDeviceError, match="ZeroDivisionError"):
        AmdReader(WantedDevice("", 0, "0"))
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(ImportError):
        AmdReader(WantedDevice("", 0, "0"))


def test_it_reports_no_events(smi: ModuleType) -> None:
    del smi
    assert AmdReader(WantedDevice("", 0, "0")).wait(1.0) is None
