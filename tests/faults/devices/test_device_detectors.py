"""Devices: what their drivers report and count is judged by what it means, and what healthy devices tell is silent.

Each case is a window of two ranks; rank 1's device is the odd one.
"""

from typing import Any

import pytest

from holter.diagnosis import rank_causes, top_cause
from holter.diagnosis.correlate import Incident, brings_about, correlate
from holter.faults.devices.device_clocks import DeviceClocks
from holter.faults.devices.device_errors import DeviceErrors
from holter.faults.devices.device_links import DeviceLinks
from holter.faults.devices.device_memory import DeviceMemory
from holter.faults.hangs.dead_rank import DeadRank
from holter.faults.shared.device_notes import XIDS
from holter.faults.window import Note, RankExit, Window
from holter.records import Device, DeviceEvent, Exited, Farewell, Finding, Phase
from made_up import made_window

DETECTORS = (DeviceErrors(), DeviceMemory(), DeviceLinks(), DeviceClocks())
S = 10**9


def device(rank: int = 1, **told: Any) -> Device:
    usual = {
        "uuid": f"GPU-{rank}",
        "throttled_by": [],
        "clock_mhz": 1980.0,
        "clock_limit_mhz": 1980.0,
        "index": rank,
        "address": f"0000:3{rank}:00.0",
    }
    return Device(**{**usual, **told})


def xid(number: int, **more: Any) -> DeviceEvent:
    return DeviceEvent(**{"uuid": "GPU-1", "kind": "xid", "source": "driver", "xid": number, **more})


def window(
    *bodies: Device | DeviceEvent, others: Device | None = None, step: int = 40, now_s: float = 100, **known: Any
) -> Window:
    notes = (
        Note(0, 0, 0, others if others is not None else device(0)),
        *(Note(1, step, 60 * S, body) for body in bodies),
    )
    return made_window(now_ns=round(now_s * S), notes=notes, hosts={0: "node0", 1: "node7"}, **known)


def judge(found: Window) -> list[Finding]:
    return [finding for detector in DETECTORS for finding in detector.judge(found)]


def texts(finding: Finding) -> str:
    return "\n".join([finding.summary, *(proof.summary for proof in finding.evidence)])


@pytest.mark.parametrize(
    ("number", "cause", "severity"),
    [
        (79, "device_fault", "warning"), (119, "device_fault", "warning"), (120, "device_fault", "warning"), (62, "device_fault", "warning"),
        (109, "device_fault", "warning"), (154, "device_fault", "warning"),
        (48, "device_memory_error", "critical"), (64, "device_memory_error", "critical"), (94, "device_memory_error", "critical"),
        (95, "device_memory_error", "critical"), (140, "device_memory_error", "critical"), (63, "device_memory_error", "warning"),
        (92, "device_memory_error", "warning"), (74, "link_errors", "warning"), (149, "link_errors", "warning"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("source", ["driver", "kernel"])
def test_an_xid_is_called_what_it_means(number: int, cause: str, severity: str, source: str) -> None:
    (finding,) = judge(window(device(), xid(number, source=source)))
    assert (cause, severity, (1,), 40) == (top_cause(finding), finding.severity, finding.ranks, finding.first_step)
    for word in (f"Xid {number}", "node7", "GPU-1", "0000:31:00.0", "DCGM_FI_DEV_"):
        assert word in texts(finding)
    assert rank_causes(finding)[0].basis == "observation"


@pytest.mark.parametrize("numbers", [(13,), (31,), (43,), (45,), (69,), (31, 43, 45), (121,)])
def test_an_xid_of_the_scripts_own_doing_is_no_fault_of_the_device(numbers: tuple[int, ...]) -> None:
    assert [] == judge(window(device(), *(xid(number) for number in numbers)))


def test_an_xid_that_nobody_knows_is_a_question() -> None:
    (finding,) = judge(window(device(), xid(999)))
    (cause, *_) = rank_causes(finding)
    assert ("device_fault", "inference", "warning") == (cause.cause, cause.basis, finding.severity)
    assert cause.missing


def test_every_xid_of_the_table_has_a_meaning() -> None:
    assert all(one.means and one.kind for one in XIDS.values())


@pytest.mark.parametrize(
    ("told", "cause", "severity"),
    [
        ({"states": ["lost"]}, "device_fault", "warning"),
        ({"states": ["reset_required"]}, "device_fault", "warning"),
        ({"counters": {"ecc_uncorrected": 3}, "grown": {"ecc_uncorrected": 1}}, "device_memory_error", "critical"),
        ({"counters": {"ecc_uncorrected_lifetime": 3}, "grown": {"ecc_uncorrected_lifetime": 1}}, "device_memory_error", "critical"),
        ({"counters": {"ecc_uncorrected": 3}}, "device_memory_error", "warning"),
        ({"states": ["row_remap_pending"]}, "device_memory_error", "warning"),
        ({"states": ["row_remap_failed"]}, "device_memory_error", "warning"),
        ({"states": ["page_retirement_pending"]}, "device_memory_error", "warning"),
        ({"recent": {"nvlink_recoveries": 2}}, "link_errors", "warning"),
        ({"recent": {"nvlink_replays": 60}}, "link_errors", "warning"),
        ({"recent": {"pcie_replays": 60}}, "link_errors", "warning"),
        ({"grown": {"nvlinks_down": 1}}, "link_errors", "warning"),
        ({"throttled_by": ["thermal"], "clock_mhz": 1200.0}, "device_throttled", "warning"),
        ({"throttled_by": ["hardware"], "clock_mhz": 1200.0}, "device_throttled", "warning"),
        ({"throttled_by": ["power"], "clock_mhz": 1200.0}, "device_throttled", "warning"),
    ],
)  # fmt: skip
def test_a_reading_is_called_what_it_means(told: dict[str, Any], cause: str, severity: str) -> None:
    (finding,) = judge(window(device(**told)))
    assert (cause, severity, (1,)) == (top_cause(finding), finding.severity, finding.ranks)
    assert "node7" in texts(finding)
    assert "GPU-1" in texts(finding)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"counters": {"ecc_corrected": 90_000}, "grown": {"ecc_corrected": 9_000}, "recent": {"ecc_corrected": 9_000}},
        {"counters": {"ecc_uncorrected_lifetime": 12, "rows_remapped_uncorrected": 1, "pages_retired": 2}},
        {"counters": {"nvlink_replays": 70_000, "pcie_replays": 9_000}},
        {"grown": {"nvlink_replays": 1, "pcie_replays": 40}, "recent": {"nvlink_replays": 1}},
        {"recent": {"nvlink_recoveries": 1, "nvlink_crc_errors": 200}},
        {"throttled_by": ["power"], "clock_mhz": 1700.0},
        {"throttled_by": ["thermal"], "clock_mhz": 1950.0},
        {"clock_mhz": 345.0},
        {"clock_mhz": None, "clock_limit_mhz": None, "throttled_by": ["power"]},
    ],
)
def test_what_healthy_devices_tell_is_silent(told: dict[str, Any]) -> None:
    assert [] == judge(window(device(**told)))


def test_a_power_cap_that_all_share_is_silent_and_so_is_one_that_just_began() -> None:
    capped = {"throttled_by": ["power"], "clock_mhz": 1300.0}
    assert [] == judge(window(device(**capped), others=device(0, **capped)))
    assert [] == judge(window(device(throttled_by=["thermal"], clock_mhz=900.0), now_s=70))
    assert [] == judge(window(device(throttled_by=["power"], clock_mhz=900.0), others=device(0, clock_mhz=None)))


def test_heat_that_all_share_is_measured_by_the_devices_own_limit() -> None:
    hot = {"throttled_by": ["thermal"], "clock_mhz": 1200.0}
    (finding,) = judge(window(device(**hot), others=device(0, **hot, throttled_s={"thermal": 60.0})))
    assert (0, 1) == finding.ranks


def test_a_device_that_nobody_named_is_named_with_less_certainty() -> None:
    (sure,) = judge(window(device(), xid(79)))
    (assumed,) = judge(window(device(is_assumed=True), xid(79, is_assumed=True)))
    assert rank_causes(assumed)[0].confidence < rank_causes(sure)[0].confidence
    assert "documented" == rank_causes(assumed)[0].basis, "it halts nothing: the rank may not use it at all"
    assert "was not said" in texts(assumed)


def test_a_hosts_own_memory_and_its_machine_checks() -> None:
    (finding,) = judge(window(DeviceEvent(uuid="", kind="memory", source="kernel", text="EDAC MC0: 1 UE")))
    assert ("device_memory_error", "critical") == (top_cause(finding), finding.severity)
    assert "rank 1 runs" in finding.summary
    (finding,) = judge(window(DeviceEvent(uuid="", kind="machine", source="kernel", text="Machine Check Exception")))
    assert ("device_fault", "warning") == (top_cause(finding), finding.severity)


def test_ranks_with_the_same_trouble_are_one_finding_and_a_graver_one_is_another() -> None:
    waiting = device(0, states=["row_remap_pending"])
    (finding,) = judge(window(device(states=["row_remap_pending"]), others=waiting, step=0))
    assert (0, 1) == finding.ranks
    grave, old = judge(window(device(), xid(94), others=waiting))
    assert [("critical", (1,)), ("warning", (0,))] == [(one.severity, one.ranks) for one in (grave, old)]
    incidents = correlate((), [grave, old], stamp="s")
    assert 2 == len(incidents)
    assert () == correlate(incidents, [grave, old], stamp="s"), "they stay apart"


def killed(
    *bodies: Device | DeviceEvent, at_step: int = 40, farewell: Farewell | None = None, memory: bool = False
) -> Window:
    ended = Exited(
        pid=1, exit_code=1 if farewell else None, signal=None if farewell else 9, out_of_memory=memory, last_step=at_step, last_phase=Phase.FORWARD, farewell=farewell,
    )  # fmt: skip
    return window(*bodies, now_s=200, exits=(RankExit(1, 100 * S, ended),))


def led(found: Window) -> list[Incident]:
    findings = [*DeadRank().judge(found), *judge(found)]
    return [one for one in correlate((), findings, stamp="s") if one.merged_into is None]


@pytest.mark.parametrize("number", [79, 119, 94, 95, 48, 74])
def test_a_rank_that_died_when_its_device_failed_is_the_devices_incident(number: int) -> None:
    found = killed(
        device(memory_used_bytes=70 << 30, memory_total_bytes=80 << 30, age_s=2.0), xid(number), xid(43), xid(45)
    )
    (incident,) = led(found)
    assert top_cause(incident.leading) in {"device_fault", "device_memory_error", "link_errors"}
    assert ["dead_rank"] == [one.detector for one in incident.consequences]
    (dead,) = DeadRank().judge(found)
    assert "10.0 of 80.0 GiB free" in texts(dead)
    assert f"Xid {number}" in texts(dead)


@pytest.mark.parametrize(
    "found",
    [
        killed(device(), xid(31), xid(43)),
        killed(device(states=["row_remap_pending"])),
        killed(device(), xid(999)),
        killed(device(recent={"pcie_replays": 90})),
        killed(device(), xid(79), memory=True),
        killed(
            device(),
            xid(94),
            farewell=Farewell(kind="exception", text="KeyError: 'labels'", where="a.py:1 in f", own=["a.py:1 in f: x"]),
        ),
        killed(device(), xid(79), at_step=12),
    ],
)
def test_what_the_device_did_not_bring_about_is_not_its_incident(found: Window) -> None:
    (dead,) = DeadRank().judge(found)
    assert not any(brings_about(finding, dead) for finding in judge(found))
    assert any(one.leading.detector == "dead_rank" for one in led(found))


def test_an_error_of_the_devices_that_ends_the_script_is_the_devices_incident() -> None:
    said = Farewell(
        kind="exception",
        text="AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        where="a.py:1 in f",
        own=["a.py:1 in f: x"],
    )
    (incident,) = led(killed(device(counters={"ecc_uncorrected": 1}, grown={"ecc_uncorrected": 1}), farewell=said))
    assert "device_memory_error" == top_cause(incident.leading)
