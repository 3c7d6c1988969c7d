"""Device clocks: a device's clock is held down by heat, by its power supply or by the hardware, and the others' are not.

What it detects
    For half a minute the driver names heat or the hardware as what holds the clock down, and the clock is below nine tenths of the
    other ranks' (of its own limit, where there are no others to compare with); or power holds it, and it is below eight tenths of
    theirs.

Why it matters
    The same work takes longer there, and every step of the job lasts as long as on this device, whether or not its lateness can be
    seen in the collectives yet.

False positives
    A power cap at full load is how devices are run: it counts only where one device is far below the others. A clock that is low
    because the device is idle is held down by nothing. A brief touch of a limit is not told.

What to do
    Compare temperature, power and limit with the neighbours'; move the rank; then see to cooling or supply.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from holter.faults.devices.together import advice, joined
from holter.faults.shared import device_notes
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import cap, listed
from holter.faults.window import Note, Window
from holter.records import Device, Finding

HEAT = ("thermal", "hardware")
FIELDS = {
    "thermal": "DCGM_FI_DEV_THERMAL_VIOLATION",
    "power": "DCGM_FI_DEV_POWER_VIOLATION",
    "hardware": "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS",
}
WORDS = {"thermal": "heat", "power": "power", "hardware": "the hardware itself"}


@dataclass(frozen=True)
class DeviceClocks:
    """Judges clocks that are held down."""

    name: ClassVar[str] = "device_clocks"

    min_held_s: float = threshold(30.0, above=0)
    max_share: float = threshold(0.9, above=0, below=1)
    """Share of the others' clock, or of its own limit, from which on the clock counts as free."""
    max_share_by_power: float = threshold(0.8, above=0, below=1)
    """The same if only power holds it down."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield one finding per severity, for the ranks whose device is held down."""
        yield from joined(self._each(window))

    def _each(self, window: Window) -> Iterator[Finding]:
        devices = device_notes.newest(window)
        for rank, (note, device) in sorted(devices.items()):
            held = {
                reason: device.throttled_s.get(reason, 0.0) + (window.now_ns - note.at_ns) / 1e9
                for reason in device.throttled_by
            }
            long = [reason for reason in device.throttled_by if held[reason] >= self.min_held_s]
            others = [other for number, (_, other) in devices.items() if number != rank and other.uuid != device.uuid]
            if long and not _has_ended(window, rank) and self._is_low(device, others, long):
                yield _finding(window, note, device, {reason: held[reason] for reason in long}, others)

    def _is_low(self, device: Device, others: list[Device], reasons: list[str]) -> bool:
        clocks = [other.clock_mhz for other in others if other.clock_mhz]
        if device.clock_mhz is None:
            return bool(set(reasons) & set(HEAT))
        if set(reasons) & set(HEAT):
            free = [median(clocks)] if clocks else []
            limit = [device.clock_limit_mhz] if device.clock_limit_mhz else []
            # If all are hot, the others are no measure.
            are_others_held = sum(bool(set(other.throttled_by) & set(HEAT)) for other in others) * 2 >= max(
                len(others), 1
            )
            measure = limit if are_others_held or not free else free
            return bool(measure) and device.clock_mhz < self.max_share * measure[0]
        return bool(clocks) and device.clock_mhz < self.max_share_by_power * median(clocks)


def _has_ended(window: Window, rank: int) -> bool:
    return any(end.rank == rank for end in window.processes.exits)


def _finding(window: Window, note: Note, device: Device, held: dict[str, float], others: list[Device]) -> Finding:
    rank = note.rank
    said = listed(WORDS[reason] for reason in held)
    clocks = [other.clock_mhz for other in others if other.clock_mhz]
    against = f", the others' are at {median(clocks):.0f} MHz" if clocks else ""
    clock = f" at {device.clock_mhz:.0f} MHz" if device.clock_mhz is not None else ""
    gravest = next(reason for reason in ("thermal", "hardware", "power") if reason in held)
    return Finding(
        detector=DeviceClocks.name,
        severity="warning",
        first_step=note.step,
        detected_step=note.step,
        ranks=(rank,),
        summary=f"{cap(device_notes.place(window, rank, device))}, on which rank {rank} computes, is held down by {said}{clock} for {max(held.values()):.0f} s{against}.",
        facts={
            "is_held_down": True,
            "is_held_by_heat": bool(set(held) & set(HEAT)),
            "is_clock_free": False,
            "is_device_assumed": device.is_assumed,
        },
        evidence=(
            *(proof for proof in device_notes.evidence_of(window, rank) if proof.kind == "device"),
            advice(window, rank, device, (FIELDS[gravest], f"held down by {said}"), is_needed=False),
        ),
    )
