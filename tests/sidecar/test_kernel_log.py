"""The kernel's log: what it says of the rank's device and of the host is told, what the hardware corrected is not."""

from pathlib import Path

import pytest

from holter.records import Device
from holter.sidecar.kernel_log import KernelLog, events_in, is_same_address

DEVICE = Device(uuid="GPU-1", throttled_by=[], address="0000:3b:00.0")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            [("xid", 79, "GPU-1")],
        ),
        ("NVRM: Xid (0000:3B:00): 31, Ch 00000010, intr 10000000. MMU Fault", [("xid", 31, "GPU-1")]),
        ("NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus.", []),
        ("NVRM: GPU at PCI:0000:3b:00: GPU-1", []),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0", [("memory", 0, "")]),
        ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0", []),
        ("EDAC MC0: 0 UE memory read error", []),
        ("mce: Uncorrected hardware memory error in user-access at 3f2a", [("memory", 0, "")]),
        ("mce: [Hardware Error]: Machine check events logged", []),
        ("mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 4: b200000000070f0f", [("machine", 0, "")]),
        ("[Hardware Error]: Corrected error, no action required.", []),
        ("[Hardware Error]: event severity: fatal", [("machine", 0, "")]),
        (
            "amdgpu 0000:3b:00.0: amdgpu: 4 uncorrectable hardware errors detected in umc block",
            [("memory", 0, "GPU-1")],
        ),
        ("amdgpu 0000:3b:00.0: amdgpu: 0 uncorrectable hardware errors detected in umc block", []),
        ("amdgpu 0000:5e:00.0: amdgpu: 4 uncorrectable hardware errors detected in umc block", []),
        ("amdgpu 0000:3b:00.0: amdgpu: GPU reset begin!", [("machine", 0, "GPU-1")]),
        ("usb 1-1: new high-speed USB device", []),
    ],
)
def test_lines(line: str, expected: list[tuple[str, int, str]]) -> None:
    assert expected == [(event.kind, event.xid, event.uuid) for event in events_in(line, DEVICE)]


def test_only_what_is_new_is_told_and_lines_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_text("NVRM: Xid (PCI:0000:3b:00): 48, DBE\n")
    log = KernelLog(str(path))
    assert [] == log.read(DEVICE)
    with path.open("a") as file:
        file.write("NVRM: Xid (PCI:0000:3b:00): 7")
        file.flush()
        assert [] == log.read(DEVICE)
        file.write("9, gone\nNVRM: Xid (PCI:0000:3b:00): 43, stopped\n")
    assert [79, 43] == [event.xid for event in log.read(DEVICE)]
    assert [] == log.read(DEVICE)


@pytest.mark.parametrize("path", ["", "/nowhere/kmsg", "/"])
def test_what_cannot_be_read_is_no_fault(path: str) -> None:
    assert [] == KernelLog(path).read(DEVICE)


def test_without_a_device_only_the_host_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.touch()
    log = KernelLog(str(path))
    path.write_text("NVRM: Xid (PCI:0000:3b:00): 79, gone\nEDAC MC0: 2 UE memory read error\n")
    assert ["memory"] == [event.kind for event in log.read(None)]


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("0000:3b:00", "0000:3b:00.0", True),
        ("3b:00.0", "0000:3B:00.0", True),
        ("0001:3b:00", "0000:3b:00.0", False),
        ("", "", False),
        ("gpu", "gpu", True),
    ],
)
def test_addresses(one: str, other: str, is_same: bool) -> None:  # noqa: FBT001
    assert is_same == is_same_address(one, other)
