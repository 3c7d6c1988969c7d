"""A device's readings are told when they change; what it cannot tell is left out; no library, no driver and no answer are silent, and never wait."""

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from holter.exporters.prometheus import families
from holter.records import Device, DeviceEvent
from holter.sidecar import devices as module
from holter.sidecar.devices import POLL_S, RETRY_S, TELL_XID, Devices
from holter.sidecar.nvml import NoDeviceError, NvmlReader, WantedDevice
from holter.sidecar.state import RankState
from holter.testing.nvml import LOST, NvmlLibrary

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="no C compiler, of which the stand-in for NVML is made"
)
THERMAL, POWER, IDLE, BRAKE, SOFT_HEAT = 0x40 | 0x8, 0x4, 0x1 | 0x2, 0x80, 0x20


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> NvmlLibrary:
    library = NvmlLibrary.build(tmp_path_factory.mktemp("nvml"))
    library.load()
    return library


@pytest.fixture
def nvml(built: NvmlLibrary, monkeypatch: pytest.MonkeyPatch) -> NvmlLibrary:
    monkeypatch.setenv("HOLTER_TESTING_NVML", str(built.control))
    built.clear()
    for number, uuid in enumerate(("GPU-1", "GPU-2")):
        built.set(number, uuid=uuid)
    return built


class Clock:
    """Time goes from one reading to the next."""

    def __init__(self, devices: Devices) -> None:
        self.devices, self.now_s = devices, 0.0

    def reading(self, after_s: float = POLL_S) -> list[Device]:
        """The next reading, when its thread has ended."""
        return [one for one in self.news(after_s) if isinstance(one, Device)]

    def news(self, after_s: float = POLL_S) -> list[Device | DeviceEvent]:
        self.now_s += after_s
        found = self.devices.poll(self.now_s)
        deadline = time.monotonic() + 10
        while self.devices._reading is not None and time.monotonic() < deadline:
            time.sleep(0.001)
            found += self.devices.poll(self.now_s)
        return found

    def events(self, number: int) -> list[DeviceEvent]:
        """So many, as they come."""
        told: list[DeviceEvent] = []
        deadline = time.monotonic() + 10
        while len(told) < number and time.monotonic() < deadline:
            time.sleep(0.01)
            told += [one for one in self.devices._poll_events() if isinstance(one, DeviceEvent)]
        return told


def on(uuid: str, **more: object) -> Clock:
    devices = Devices(**more)  # type: ignore[arg-type]
    devices.learn(uuid)
    return Clock(devices)


@pytest.fixture
def clock(nvml: NvmlLibrary) -> Clock:
    del nvml
    return on("GPU-1")


def test_the_first_reading_is_told_and_then_what_changes(nvml: NvmlLibrary, clock: Clock) -> None:
    (first,) = clock.reading()
    assert ("GPU-1", [], 1980.0, 1980.0) == (first.uuid, first.throttled_by, first.clock_mhz, first.clock_limit_mhz)
    assert (55.0, 350.0, 20 << 30, 80 << 30) == (
        first.temperature_c,
        first.power_w,
        first.memory_used_bytes,
        first.memory_total_bytes,
    )
    assert ("0000:3b:00.0", 0, False) == (first.address, first.index, first.is_assumed)
    assert [] == clock.reading()
    nvml.set(0, reasons=THERMAL, clock=1200, temperature=89)
    assert [] == clock.reading()
    (hot,) = clock.reading()
    assert (["thermal", "hardware"], 1200.0, 89.0) == (hot.throttled_by, hot.clock_mhz, hot.temperature_c)
    assert [] == clock.reading()
    nvml.set(0, reasons=0)
    told = clock.reading() + clock.reading()
    assert [[]] == [device.throttled_by for device in told]


def test_how_long_a_clock_is_held_down_is_told_again(nvml: NvmlLibrary, clock: Clock) -> None:
    nvml.set(0, reasons=THERMAL)
    told = [device for _ in range(9) for device in clock.reading()]
    assert [0.0, 30.0] == [device.throttled_s["thermal"] for device in told]


def test_a_power_cap_that_flickers_is_not_told_each_time(nvml: NvmlLibrary, clock: Clock) -> None:
    clock.reading()
    told = []
    for number in range(20):
        nvml.set(0, reasons=POWER * (number % 2))
        told += clock.reading()
    assert [] == told


@pytest.mark.parametrize(
    ("bits", "expected"),
    [(IDLE, []), (SOFT_HEAT, ["thermal"]), (POWER, ["power"]), (BRAKE, ["power"]), (0x8, ["hardware"]), (0x100, [])],
)
@pytest.mark.parametrize("is_old", [False, True])
def test_reasons_have_plain_names(nvml: NvmlLibrary, bits: int, expected: list[str], is_old: bool) -> None:  # noqa: FBT001
    if is_old:
        nvml.set(0, error__nvmlDeviceGetCurrentClocksEventReasons=13)
    nvml.set(0, reasons=bits)
    assert expected == NvmlReader(WantedDevice("GPU-1")).read().throttled_by


def test_errors_that_could_not_be_corrected_are_told_at_once_and_by_how_much_they_grew(
    nvml: NvmlLibrary, clock: Clock
) -> None:
    nvml.set(0, ecc_uncorrected=3, ecc_corrected=100)
    (first,) = clock.reading()
    assert {} == first.grown
    nvml.set(0, ecc_corrected=5000)
    assert [] == clock.reading()
    nvml.set(0, ecc_uncorrected=5, remap_pending=1)
    (worse,) = clock.reading()
    assert (["row_remap_pending"], 2, 4900) == (
        worse.states,
        worse.grown["ecc_uncorrected"],
        worse.grown["ecc_corrected"],
    )


def test_a_driver_that_was_loaded_anew_counts_from_zero(nvml: NvmlLibrary, clock: Clock) -> None:
    nvml.set(0, ecc_uncorrected=9)
    clock.reading()
    nvml.set(0, ecc_uncorrected=0)
    (reset,) = clock.reading()
    assert {} == reset.grown
    nvml.set(0, ecc_uncorrected=1)
    (one,) = clock.reading()
    assert {"ecc_uncorrected": 1} == one.grown


def test_counters_that_may_move_are_told_now_and_then(nvml: NvmlLibrary, clock: Clock) -> None:
    clock.reading()
    told = []
    for number in range(24):
        nvml.set(0, pcie_replays=number)
        told += clock.reading()
    assert 2 == len(told)


def test_what_grew_in_the_last_ten_minutes_forgets_the_rest(nvml: NvmlLibrary, clock: Clock) -> None:
    clock.reading()
    nvml.set(0, pcie_replays=90)
    (told,) = clock.reading(POLL_S * 20)
    assert (90, 90) == (told.grown["pcie_replays"], told.recent["pcie_replays"])
    for _ in range(4):
        clock.reading(200)
    nvml.set(0, pcie_replays=91)
    (told,) = clock.reading(200)
    assert (91, 1) == (told.grown["pcie_replays"], told.recent["pcie_replays"])


def test_links_and_pages_and_what_the_driver_wants(nvml: NvmlLibrary, clock: Clock) -> None:
    nvml.set(
        0, nvlinks=4, nvlink_replays=7, retired_double=2, retired_single=1, retirement_pending=1, recovery_action=1
    )
    (device,) = clock.reading()
    assert (7, 0, 3) == (
        device.counters["nvlink_replays"],
        device.counters["nvlinks_down"],
        device.counters["pages_retired"],
    )
    assert ["reset_required", "page_retirement_pending"] == device.states
    nvml.set(0, nvlinks_active=3)
    (device,) = clock.reading()
    assert 1 == device.grown["nvlinks_down"]


@pytest.mark.parametrize(
    "gone",
    [
        {"error__nvmlDeviceGetTotalEccErrors": 3},
        {"error__nvmlDeviceGetTotalEccErrors": 3, "no_fields": 1},
        {"error__nvmlDeviceGetRemappedRows": 13},
        {"error__nvmlDeviceGetTotalEccErrors": 3, "error__nvmlDeviceGetMemoryErrorCounter": 3},
        {"no_fields": 1},
        {"error__nvmlDeviceGetFieldValues": 2},
        {"no_link_fields": 1},
        {"error__nvmlDeviceGetPcieReplayCounter": 3},
        {"error__nvmlDeviceGetMemoryInfo_v2": 13},
        {"error__nvmlDeviceGetMemoryInfo_v2": 25},
    ],
)
def test_what_one_function_does_not_tell_another_does(nvml: NvmlLibrary, gone: dict[str, int]) -> None:
    nvml.set(0, ecc_uncorrected=2, remap_failed=1, nvlinks=2, nvlink_recoveries=4, pcie_replays=6, **gone)
    reader = NvmlReader(WantedDevice("GPU-1"))
    for device in (reader.read(), reader.read()):
        assert (2, 4, 6) == tuple(
            device.counters[name] for name in ("ecc_uncorrected", "nvlink_recoveries", "pcie_replays")
        )
        assert (["row_remap_failed"], 80 << 30) == (device.states, device.memory_total_bytes)


def functions() -> list[str]:
    source = Path(module.__file__).parent.parent / "testing" / "nvml.c"
    return sorted({word for word in source.read_text().replace("(", " ").replace(",", " ").split() if word.startswith("nvmlDeviceGet")} - {
        "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetFieldValues", "nvmlDeviceGetCount_v2",
    })  # fmt: skip


@pytest.mark.parametrize("code", [3, 7, 13, 999])
def test_a_function_that_fails_takes_nothing_else_with_it(nvml: NvmlLibrary, code: int) -> None:
    whole = NvmlReader(WantedDevice("GPU-1")).read()
    for name in functions():
        nvml.clear()
        nvml.set(0, uuid="GPU-1", **{f"error__{name}": code})
        device = NvmlReader(WantedDevice("GPU-1")).read()
        lost = [
            field
            for field in ("clock_mhz", "temperature_c", "power_w", "memory_total_bytes")
            if getattr(device, field) is None
        ]
        assert ("GPU-1", True) == (device.uuid, len(lost) <= 1), (name, lost)
        assert len(device.counters) >= len(whole.counters) - 2, name


def test_a_device_that_tells_nothing_at_all_is_no_reading(nvml: NvmlLibrary) -> None:
    nvml.set(0, **{f"error__{name}": 999 for name in functions() if name != "nvmlDeviceGetUUID"}, no_fields=1)
    with pytest.raises(NoDeviceError):
        NvmlReader(WantedDevice("GPU-1")).read()


def test_a_device_that_is_lost_is_told_and_the_next_reading_still_comes(nvml: NvmlLibrary, clock: Clock) -> None:
    clock.reading()
    nvml.set(0, error=LOST)
    (lost,) = clock.reading()
    assert ("GPU-1", ["lost"]) == (lost.uuid, lost.states)
    assert [] == clock.reading()
    nvml.set(0, error=0)
    (back,) = clock.reading()
    assert [] == back.states


def test_one_that_was_lost_before_it_was_looked_for_is_told_too(nvml: NvmlLibrary, clock: Clock) -> None:
    nvml.set(0, error=LOST)
    (lost,) = clock.reading()
    assert ("GPU-1", ["lost"]) == (lost.uuid, lost.states)


@pytest.mark.parametrize("visible", [None, "0,1", "GPU-1,GPU-2", "GPU-,GPU-2"])
def test_a_device_that_another_rank_has_lost_is_not_this_ones(nvml: NvmlLibrary, visible: str | None) -> None:
    nvml.set(1, error=LOST)
    assert [] == NvmlReader(WantedDevice("", 0, visible)).read().states
    assert ["lost"] == NvmlReader(WantedDevice("", 1, visible)).read().states


def test_faults_that_the_driver_reports_are_told_and_repeats_are_counted(nvml: NvmlLibrary, clock: Clock) -> None:
    nvml.event(0, 13)
    clock.reading()
    time.sleep(0.3)
    nvml.event(0, 79)
    nvml.event(1, 48)
    (event,) = clock.events(1)
    assert ("xid", 79, "driver", "GPU-1") == (event.kind, event.xid, event.source, event.uuid)
    for _ in range(11):
        nvml.event(0, 31)
    assert [31] * 2 == [event.xid for event in clock.events(2)]
    assert TELL_XID[:2] == (1, 10)


def test_without_events_the_readings_still_come(nvml: NvmlLibrary, clock: Clock) -> None:
    nvml.set(0, error__nvmlDeviceRegisterEvents=3)
    assert 1 == len(clock.reading())
    time.sleep(0.2)
    nvml.event(0, 79)
    assert [] == clock.reading()


@pytest.mark.parametrize(
    ("visible", "local_rank", "expected"),
    [
        (None, 1, "GPU-2"), ("0,1", 1, "GPU-2"), ("1,0", 0, "GPU-2"), ("1", 1, "GPU-2"), ("GPU-2,GPU-1", 0, "GPU-2"),
        ("GPU-1,GPU-2", 1, "GPU-2"), ("GPU-", 0, "GPU-1"), ("", 0, ""), ("-1", 0, ""), ("0,7,1", 2, ""), ("NoDevFiles", 0, ""), (None, 2, ""),
    ],
)  # fmt: skip
def test_which_device_is_the_ranks(nvml: NvmlLibrary, visible: str | None, local_rank: int, expected: str) -> None:
    del nvml
    wanted = WantedDevice("", local_rank, visible)
    if not expected:
        with pytest.raises(NoDeviceError):
            NvmlReader(wanted)
        return
    device = NvmlReader(wanted).read()
    assert (expected, visible is None) == (device.uuid, device.is_assumed)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("MIG-b,MIG-a", "MIG-b"), ("MIG-GPU-1/2/0", "MIG-b"), ("MIG-GPU-1/1/0,MIG-b", "MIG-a"), (None, "MIG-a")],
)
def test_a_part_of_a_device_has_its_own_memory_and_its_parents_heat(
    nvml: NvmlLibrary, visible: str | None, expected: str
) -> None:
    nvml.clear()
    nvml.lines("0 uuid GPU-1", "0 mig MIG-a 1 0", "0 mig MIG-b 2 0", "0 temperature 70", "0 ecc_uncorrected 1")
    device = NvmlReader(WantedDevice("", 0, visible)).read()
    assert (expected, "GPU-1", 70.0, 1) == (
        device.uuid,
        device.parent,
        device.temperature_c,
        device.counters["ecc_uncorrected"],
    )
    assert device.memory_total_bytes == 80 << 30


def test_a_rank_that_says_nothing_has_the_device_of_its_local_rank(nvml: NvmlLibrary) -> None:
    del nvml
    clock = Clock(Devices(1))
    assert [] == clock.reading()
    clock.devices.assume()
    (device,) = clock.reading()
    assert ("GPU-2", True) == (device.uuid, device.is_assumed)
    clock.devices.learn("GPU-1")
    (device,) = clock.reading()
    assert ("GPU-1", False) == (device.uuid, device.is_assumed)


def test_readings_are_seconds_apart(clock: Clock) -> None:
    clock.reading()
    assert [] == clock.reading(after_s=0.1)
    assert clock.devices._reading is None


def broken(nvml: NvmlLibrary, how: str) -> None:
    nvml.clear()
    match how:
        case "no driver":
            nvml.set(None, init_error=9)
        case "another device":
            nvml.set(0, uuid="GPU-7")
        case "no device":
            pass


@pytest.mark.parametrize(
    ("how", "words"), [("no driver", "Driver Not Loaded"), ("another device", "Not Found"), ("no device", "Not Found")]
)
def test_without_a_driver_or_such_a_device_it_is_silent_and_logged_once(
    nvml: NvmlLibrary, caplog: pytest.LogCaptureFixture, how: str, words: str
) -> None:
    broken(nvml, how)
    clock = on("GPU-1")
    with caplog.at_level(logging.INFO):
        assert [] == clock.reading() + clock.reading(RETRY_S) + clock.reading(RETRY_S)
    (record,) = [record for record in caplog.records if "no device readings" in record.getMessage()]
    assert words in record.getMessage()


def test_without_the_binding_it_is_silent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level(logging.INFO):
        assert [] == on("GPU-1").reading()
    assert any("ModuleNotFoundError" in record.getMessage() for record in caplog.records)


def hang(monkeypatch: pytest.MonkeyPatch, name: str) -> Callable[[], None]:
    stuck = threading.Event()
    monkeypatch.setattr(pynvml, name, lambda *_: stuck.wait(10))
    return stuck.set


def test_a_driver_that_hangs_holds_up_nobody_and_leaves_no_stale_reading(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    clock.reading()
    let_go = hang(monkeypatch, "nvmlDeviceGetTemperature")
    began = time.monotonic()
    clock.devices.poll(clock.now_s + POLL_S)
    assert clock.devices.latest is not None
    for turn in range(2, 50):
        clock.devices.poll(clock.now_s + turn * POLL_S)
    assert clock.devices.latest is None
    assert time.monotonic() - began < 5
    let_go()


def test_a_driver_that_hangs_in_the_library_itself(nvml: NvmlLibrary, clock: Clock) -> None:
    clock.reading()
    nvml.set(0, hang__nvmlDeviceGetPowerUsage=3)
    began = time.monotonic()
    clock.devices.poll(clock.now_s + POLL_S)
    clock.devices.poll(clock.now_s + 2 * POLL_S)
    assert time.monotonic() - began < 2
    assert clock.devices.latest is None


async def test_when_its_rank_has_died_the_last_reading_is_told_and_then_what_is_wrong(
    nvml: NvmlLibrary, clock: Clock
) -> None:
    nvml.set(0, memory_used=79 << 30)
    clock.reading()
    nvml.set(0, memory_used=0, ecc_uncorrected=1)
    (before,) = clock.devices.before_the_end(clock.now_s + 3)
    assert isinstance(before, Device)
    assert (79 << 30, 3.0) == (before.memory_used_bytes, before.age_s)
    (after,) = await clock.devices.after_the_end(time.monotonic)
    assert isinstance(after, Device)
    assert (79 << 30, {"ecc_uncorrected": 1}) == (after.memory_used_bytes, after.grown)


async def test_a_dead_ranks_driver_that_hangs_is_not_waited_for(nvml: NvmlLibrary, clock: Clock) -> None:
    clock.reading()
    nvml.set(0, hang__nvmlDeviceGetPowerUsage=4)
    began = time.monotonic()
    assert [] == await asyncio.wait_for(clock.devices.after_the_end(time.monotonic), 10)
    assert time.monotonic() - began < 3.5


def test_a_scrape_shows_the_last_reading_and_asks_no_driver(nvml: NvmlLibrary, clock: Clock) -> None:
    assert clock.devices.latest is None
    clock.reading()
    nvml.set(0, temperature=90, ecc_uncorrected=2)
    assert 55.0 == _shown(clock.devices, "holter_device_temperature_celsius"), "a scrape reads nothing by itself"
    clock.reading()
    assert 90.0 == _shown(clock.devices, "holter_device_temperature_celsius")
    assert 80 << 30 == _shown(clock.devices, "holter_device_memory_size_bytes")
    nvml.set(0, error=LOST)
    clock.reading()
    assert _shown(clock.devices, "holter_device_temperature_celsius") is None, "no stale reading"


def test_the_library_is_what_a_process_of_its_own_loads(nvml: NvmlLibrary) -> None:
    program = (
        "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetCount())"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], env=dict(nvml.environment), capture_output=True, text=True, check=True
    )
    assert "550.54.15 2" == told.stdout.strip()


def test_an_old_librarys_names_are_found_and_text_that_is_none_costs_no_reading(tmp_path: Path) -> None:
    renamed = ("InitWithFlags=nvmlOther", "DeviceGetCount_v2=nvmlDeviceGetCount")
    renamed += ("DeviceGetHandleByIndex_v2=nvmlDeviceGetHandleByIndex", "EventSetWait_v2=nvmlEventSetWait")
    library = NvmlLibrary.build(tmp_path, "cc", [f"-Dnvml{each}" for each in renamed])
    library.set(0, uuid="GPU-1")
    program = r"""
import sys, threading
import pynvml
from holter.sidecar.nvml import NvmlReader, WantedDevice
def name(handle): raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
pynvml.nvmlDeviceGetName = name
reader = NvmlReader(WantedDevice("", 0, "0"))
print(reader.read().temperature_c, flush=True)
threading.Timer(0.5, lambda: open(sys.argv[1], "a").write("0 xid 79\n")).start()
print(next(told[0].xid for _ in range(20) if (told := reader.wait(0.5))))
"""
    command = [sys.executable, "-c", program, library.control]
    env = os.environ | dict(library.environment)
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert "55.0\n79\n" == told.stdout, told.stderr


def _shown(devices: Devices, name: str) -> float | None:
    state = RankState(0, "host")
    shown = families("r", "v", [state.snapshot(0, devices.latest)])
    return next((family.samples[0].value for family in shown if family.name == name), None)
