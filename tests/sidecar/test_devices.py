"""A device that is held down is told, and when it no longer is; no library, no driver and no answer are silent, and never wait."""

import logging
import sys
import threading
import time

import pytest

from holter.exporters.prometheus import families
from holter.records import Device
from holter.sidecar.devices import POLL_S, RETRY_S, Devices, read
from holter.sidecar.state import RankState
from holter.testing.nvml import FakeNvml, Gpu

THERMAL = FakeNvml.nvmlClocksEventReasonHwThermalSlowdown | FakeNvml.nvmlClocksEventReasonHwSlowdown
POWER = FakeNvml.nvmlClocksEventReasonSwPowerCap


class Clock:
    """Time goes from one reading to the next."""

    def __init__(self, devices: Devices) -> None:
        self.devices, self.now_s = devices, 0.0

    def reading(self, after_s: float = POLL_S) -> list[Device]:
        """The next reading, when its thread has ended."""
        self.now_s += after_s
        found = self.devices.poll(self.now_s)
        deadline = time.monotonic() + 10
        while self.devices._reading is not None and time.monotonic() < deadline:
            time.sleep(0.001)
            found += self.devices.poll(self.now_s)
        return found


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(Gpu("GPU-1"), Gpu("GPU-2", reasons=THERMAL))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def clock(nvml: FakeNvml) -> Clock:
    del nvml
    devices = Devices()
    devices.learn("GPU-1")
    return Clock(devices)


def test_the_first_reading_is_told_and_then_what_changes(nvml: FakeNvml, clock: Clock) -> None:
    (first,) = clock.reading()
    assert first == Device(
        uuid="GPU-1", throttled_by=[], clock_mhz=1980.0, clock_limit_mhz=1980.0, temperature_c=55.0, power_w=350.0
    )
    assert [] == clock.reading()
    gpu = nvml.gpus["GPU-1"]
    gpu.reasons, gpu.sm_clock_mhz, gpu.temperature_c = THERMAL, 1200, 89
    assert [] == clock.reading()
    (hot,) = clock.reading()
    assert (["thermal", "hardware"], 1200.0, 89.0) == (hot.throttled_by, hot.clock_mhz, hot.temperature_c)
    assert [] == clock.reading()
    gpu.reasons = 0
    told = clock.reading() + clock.reading()
    assert [[]] == [device.throttled_by for device in told]


def test_a_power_cap_that_flickers_is_not_told_each_time(nvml: FakeNvml, clock: Clock) -> None:
    clock.reading()
    told = []
    for number in range(20):
        nvml.gpus["GPU-1"].reasons = POWER * (number % 2)
        told += clock.reading()
    assert [] == told


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (FakeNvml.nvmlClocksEventReasonGpuIdle | FakeNvml.nvmlClocksEventReasonApplicationsClocksSetting, []),
        (FakeNvml.nvmlClocksEventReasonSwThermalSlowdown, ["thermal"]),
        (POWER, ["power"]),
        (FakeNvml.nvmlClocksEventReasonHwPowerBrakeSlowdown, ["power"]),
        (FakeNvml.nvmlClocksEventReasonHwSlowdown, ["hardware"]),
    ],
)
@pytest.mark.parametrize("is_old", [False, True])
def test_reasons_have_plain_names(nvml: FakeNvml, bits: int, expected: list[str], is_old: bool) -> None:  # noqa: FBT001
    nvml.is_old_driver = is_old
    nvml.gpus["GPU-1"].reasons = bits
    nvml.nvmlInit()
    assert expected == read(nvml, "GPU-1").throttled_by


def test_nothing_is_asked_before_the_rank_said_its_device(nvml: FakeNvml) -> None:
    clock = Clock(Devices())
    assert [] == clock.reading() + clock.reading()
    assert 0 == nvml.num_calls


def test_readings_are_seconds_apart(nvml: FakeNvml, clock: Clock) -> None:
    clock.reading()
    before = nvml.num_calls
    assert [] == clock.reading(after_s=0.1)
    assert before == nvml.num_calls


def test_another_device_is_a_new_beginning(clock: Clock) -> None:
    clock.reading()
    clock.devices.learn("GPU-2")
    (device,) = clock.reading()
    assert ("GPU-2", ["thermal", "hardware"]) == (device.uuid, device.throttled_by)


def test_no_library_no_driver_no_such_device_and_a_lost_one_are_silent_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lost = FakeNvml(Gpu("GPU-1", error=FakeNvml.NVML_ERROR_GPU_IS_LOST))
    for module, words in [
        (None, "ModuleNotFoundError"),
        (FakeNvml(init_error=FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED), "Driver Not Loaded"),
        (FakeNvml(Gpu("GPU-7")), "Not Found"),
        (lost, "GPU is lost"),
    ]:
        monkeypatch.setitem(sys.modules, "pynvml", module)
        caplog.clear()
        devices = Devices()
        devices.learn("GPU-1")
        clock = Clock(devices)
        with caplog.at_level(logging.INFO):
            assert [] == clock.reading() + clock.reading(RETRY_S) + clock.reading(RETRY_S)
        (record,) = caplog.records
        assert words in record.getMessage()


def test_a_device_that_answers_again_is_read_again(nvml: FakeNvml, clock: Clock) -> None:
    nvml.gpus["GPU-1"].error = FakeNvml.NVML_ERROR_GPU_IS_LOST
    assert [] == clock.reading()
    nvml.gpus["GPU-1"].error = 0
    assert [] == clock.reading()
    assert [[]] == [device.throttled_by for device in clock.reading(RETRY_S)]


def test_a_driver_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    monkeypatch.setattr(nvml, "nvmlInit", lambda: time.sleep(2.0))
    devices = Devices()
    devices.learn("GPU-1")
    began = time.monotonic()
    assert [] == [device for turn in range(100) for device in devices.poll(10.0 * turn)]
    assert time.monotonic() - began < 1.5


def test_a_scrape_shows_the_last_reading_asks_no_driver_and_forgets_a_device_that_is_lost(
    nvml: FakeNvml, clock: Clock
) -> None:
    assert clock.devices.latest is None
    clock.reading()
    gpu = nvml.gpus["GPU-1"]
    gpu.temperature_c = 90
    assert 55.0 == _shown(clock.devices, "holter_device_temperature_celsius"), "a scrape reads nothing by itself"
    clock.reading()
    assert 90.0 == _shown(clock.devices, "holter_device_temperature_celsius")
    gpu.error = FakeNvml.NVML_ERROR_GPU_IS_LOST
    clock.reading()
    assert _shown(clock.devices, "holter_device_temperature_celsius") is None, "no stale reading"


def test_a_driver_that_hangs_leaves_no_stale_reading(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, clock: Clock
) -> None:
    clock.reading()
    stuck = threading.Event()
    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByUUID", lambda _: stuck.wait(10))
    clock.devices.poll(clock.now_s + POLL_S)
    assert clock.devices.latest is not None
    clock.devices.poll(clock.now_s + 2 * POLL_S)
    assert clock.devices.latest is None
    stuck.set()


def _shown(devices: Devices, name: str) -> float | None:
    state = RankState(0, "host")
    shown = families("r", "v", [state.snapshot(0, devices.latest)])
    return next((family.samples[0].value for family in shown if family.name == name), None)
