"""Device links: errors of a device's NVLink or PCIe links grow.

What it detects
    Xid 74 and its successors (144 to 150); an NVLink that was up and is down; within ten minutes two recoveries of an NVLink, fifty
    replays, a thousand checksum errors, or fifty replays on the PCIe bus.

Why it matters
    What is sent again costs time at every collective, and all ranks wait for the one whose link does it. A link that recovers again
    and again goes down in the end, and the collective with it.

False positives
    A few replays, or one recovery, are what the links are made for. Counts from before the run do not matter: only growth does.

What to do
    Another host for this rank; then reseat or replace, with the vendor's link test before it comes back.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.devices.together import advice, joined
from holter.faults.shared import device_notes
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import cap, listed
from holter.faults.window import Note, Window
from holter.records import Device, DeviceEvent, Finding

FIELDS = {
    "nvlinks_down": "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    "nvlink_recoveries": "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    "nvlink_replays": "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "nvlink_crc_errors": "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    "nvlink_ecc_errors": "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
    "pcie_replays": "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
}
"""Counter -> the field of dcgm-exporter with the same number."""
WORDS = {
    "nvlinks_down": "NVLinks went down",
    "nvlink_recoveries": "recoveries of an NVLink",
    "nvlink_replays": "replays on NVLink",
    "nvlink_crc_errors": "checksum errors on NVLink",
    "nvlink_ecc_errors": "ECC errors on NVLink",
    "pcie_replays": "replays on the PCIe bus",
}


@dataclass(frozen=True)
class DeviceLinks:
    """Judges errors of devices' links."""

    name: ClassVar[str] = "device_links"

    min_recoveries: int = threshold(2, at_least=1)
    """Recoveries of NVLinks within ten minutes."""
    min_replays: int = threshold(50, at_least=1)
    """Replays on NVLink or PCIe within ten minutes."""
    min_checksum_errors: int = threshold(1000, at_least=1)
    """Checksum errors on NVLink within ten minutes."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield one finding per severity, for the ranks whose device's links fail."""
        yield from joined(self._each(window))

    def _each(self, window: Window) -> Iterator[Finding]:
        devices, events = device_notes.newest(window), device_notes.events(window)
        for rank in sorted(devices.keys() | events.keys()):
            known = devices.get(rank)
            told = [
                pair
                for pair in events.get(rank, [])
                if pair[1].kind == "xid" and device_notes.xid(pair[1].xid).kind == "link"
            ]
            told = [pair for pair in told if device_notes.xid(pair[1].xid).is_grave]
            grown = self._grown(known[1]) if known else {}
            if told or grown:
                yield _finding(window, rank, known, told, grown)

    def _grown(self, device: Device) -> dict[str, int]:
        limits = {
            "nvlinks_down": 1,
            "nvlink_recoveries": self.min_recoveries,
            "nvlink_replays": self.min_replays,
            "nvlink_crc_errors": self.min_checksum_errors,
            "nvlink_ecc_errors": self.min_checksum_errors,
            "pcie_replays": self.min_replays,
        }
        # A link that is down stays down.
        counted = device.recent | {name: device.grown[name] for name in ("nvlinks_down",) if name in device.grown}
        return {name: counted[name] for name, limit in limits.items() if counted.get(name, 0) >= limit}


def _finding(
    window: Window,
    rank: int,
    known: tuple[Note, Device] | None,
    told: list[tuple[Note, DeviceEvent]],
    grown: dict[str, int],
) -> Finding:
    device = known[1] if known else None
    steps = [note.step for note, _ in told] + ([known[0].step] if known and grown else [])
    said = [
        *(device_notes.event_text(event) for _, event in told),
        *(f"{value} {WORDS[name]}" for name, value in grown.items()),
    ]
    field = FIELDS[next(iter(grown))] if grown else "DCGM_FI_DEV_XID_ERRORS"
    return Finding(
        detector=DeviceLinks.name,
        severity="warning",
        first_step=min(steps),
        detected_step=max(steps),
        ranks=(rank,),
        summary=f"{cap(device_notes.place(window, rank, device))}, on which rank {rank} computes, has links that fail: {listed(dict.fromkeys(said))}.",
        facts={
            "is_link_failing": True,
            "is_link_quiet": False,
            "is_only_counted": not told,
            "is_device_assumed": device_notes.is_assumed(device, told),
        },
        evidence=(
            *([device_notes.event_evidence(rank, told)] if told else []),
            *(proof for proof in device_notes.evidence_of(window, rank) if proof.kind == "device"),
            advice(window, rank, device, (field, said[0]), is_needed=bool(told) or "nvlinks_down" in grown),
        ),
    )
