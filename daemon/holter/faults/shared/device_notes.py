"""What is known of the ranks' devices: the newest reading of each, the events reported about it, and the words for both.

An Xid is an error number of NVIDIA's driver. Most say what failed; some only say that a kernel did something invalid, which
is usually the script's own fault.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from holter.faults.window import Note, Window
from holter.records import Device, DeviceEvent, Evidence

XidKind = Literal["application", "memory", "link", "device", "unknown"]


@dataclass(frozen=True)
class Xid:
    """The meaning of one Xid."""

    kind: XidKind
    means: str
    is_grave: bool = True
    """Whether the device, or a part of its memory, is out of use until somebody acts."""


XIDS = {
    8: Xid("application", "the device did not finish a program's work in time"),
    13: Xid("application", "a kernel accessed memory out of bounds, or was not valid"),
    31: Xid("application", "a kernel used an address that is not mapped"),
    37: Xid("application", "the driver was given work that is not valid"),
    43: Xid("application", "the device stopped a program's work after an error of that program"),
    45: Xid("application", "work was taken off the device, after another error or because its program ended"),
    68: Xid("application", "the video decoder met an error"),
    69: Xid("application", "a kernel was not valid for the engine"),
    137: Xid("application", "a kernel used an address of a peer that it may not use"),
    48: Xid("memory", "memory that could not be corrected (double-bit ECC error)"),
    63: Xid("memory", "a row of memory was set aside, from the next reset on", is_grave=False),
    64: Xid("memory", "a bad row of memory could not be set aside"),
    92: Xid("memory", "many errors that were corrected", is_grave=False),
    94: Xid("memory", "memory that could not be corrected, contained to the program that used it"),
    95: Xid("memory", "memory that could not be corrected, and not contained: every program on the device may be hit"),
    140: Xid("memory", "an ECC error that was not recovered from"),
    74: Xid("link", "an NVLink error"),
    121: Xid("link", "errors of the link to the processor, corrected", is_grave=False),
    **{number: Xid("link", "an NVLink error") for number in range(144, 151)},
    32: Xid(
        "unknown",
        "commands that are not valid reached the device: by the driver, the program or the bus",
        is_grave=False,
    ),
    38: Xid("device", "the driver's firmware failed"),
    61: Xid("device", "the device's own controller stopped"),
    62: Xid("device", "the device's own controller halted"),
    79: Xid("device", "it has fallen off the bus"),
    109: Xid("device", "it did not switch from one program to the next in time"),
    110: Xid("device", "a security fault"),
    119: Xid("device", "its system processor (GSP) did not answer in time"),
    120: Xid("device", "its system processor (GSP) failed"),
    122: Xid("device", "its power controller could not be read"),
    143: Xid("device", "it could not be initialised"),
    154: Xid("device", "its driver asks for a reset or a reboot", is_grave=False),
}
"""The known numbers with their meanings."""


def xid(number: int) -> Xid:
    """Return the meaning of a number, of kind `unknown` if it is not in the table."""
    return XIDS.get(number, Xid("unknown", "a number that is not in holter's table", is_grave=False))


def newest(window: Window) -> dict[int, tuple[Note, Device]]:
    """Return each rank's last reading."""
    return {note.rank: (note, device) for note, device in window.notes_of(Device)}


def events(window: Window) -> dict[int, list[tuple[Note, DeviceEvent]]]:
    """Return the events of each rank's device or host, oldest first."""
    told: dict[int, list[tuple[Note, DeviceEvent]]] = {}
    for note, event in window.notes_of(DeviceEvent):
        told.setdefault(note.rank, []).append((note, event))
    return told


def place(window: Window, rank: int, device: Device | None) -> str:
    """Name a rank's device: `host node7, device GPU-8a1c (number 3, 0000:3b:00.0)`."""
    host = window.processes.hosts.get(rank, "")
    known = [f"host {host}"] if host else []
    if device is not None:
        inside = f", a part of {device.parent}" if device.parent else ""
        number = ", ".join(
            word for word in (f"number {device.index}" if device.index is not None else "", device.address) if word
        )
        known.append(f"device {device.uuid}{inside}{f' ({number})' if number else ''}")
    return ", ".join(known)


def is_assumed(device: Device | None, told: Iterable[tuple[Note, DeviceEvent]] = ()) -> bool:
    """Whether the device is only assumed from the local rank, because nobody said which one the rank uses."""
    return bool(device is not None and device.is_assumed) or any(event.is_assumed for _, event in told)


def _assumed(*, is_assumed: bool) -> str:
    return "; which device the rank uses was not said, this is its local rank's" if is_assumed else ""


def event_text(event: DeviceEvent) -> str:
    """Describe an event: `Xid 79 (it has fallen off the bus), by its driver`."""
    by = "the kernel's log" if event.source == "kernel" else "its driver"
    if event.kind == "xid":
        return f"Xid {event.xid} ({xid(event.xid).means}), by {by}"
    what = "memory that could not be corrected" if event.kind == "memory" else "a machine check"
    return f"{what}, by {by}: {event.text}"


def reading_text(device: Device) -> str:
    """Describe a reading: clock, heat, power and memory, as far as they are known."""
    held = f"held down by {', '.join(device.throttled_by)}" if device.throttled_by else ""
    clock = _of(device.clock_mhz, device.clock_limit_mhz, "MHz")
    heat = "" if device.temperature_c is None else f"{device.temperature_c:.0f} C"
    power = _of(device.power_w, device.power_limit_w, "W")
    memory = ""
    if device.memory_used_bytes is not None and device.memory_total_bytes:
        free = (device.memory_total_bytes - device.memory_used_bytes) / 2**30
        memory = f"{free:.1f} of {device.memory_total_bytes / 2**30:.1f} GiB free"
    wrong = ", ".join(state.replace("_", " ") for state in device.states)
    return ", ".join(word for word in (wrong, held, clock, heat, power, memory) if word) or "no reading"


def _of(value: float | None, most: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.0f} {unit}" if most is None else f"{value:.0f} of {most:.0f} {unit}"


def evidence_of(window: Window, rank: int) -> Iterator[Evidence]:
    """Yield the last reading and the events of a rank's device, for a rank that ended, hangs or is late."""
    known = newest(window).get(rank)
    if known is not None:
        note, device = known
        age = f", read {device.age_s:.0f} s before its end was seen" if device.age_s else ""
        yield Evidence(
            kind="device",
            summary=f"rank {rank}'s {place(window, rank, device)}: {reading_text(device)} (step {note.step}{age}){_assumed(is_assumed=device.is_assumed)}",
            values=values_of(rank, device),
        )
    told = events(window).get(rank, [])
    if told:
        yield event_evidence(rank, told)


def values_of(rank: int, device: Device) -> dict[str, object]:
    """Return the numbers of a reading; unknown ones are left out."""
    known: dict[str, object] = {
        name: value
        for name in (
            "clock_mhz",
            "clock_limit_mhz",
            "temperature_c",
            "power_w",
            "memory_used_bytes",
            "memory_total_bytes",
            "index",
            "address",
            "parent",
        )
        if (value := getattr(device, name)) not in {None, ""}
    }
    errors = {name: value for name, value in device.counters.items() if value}
    return {
        "rank": rank,
        "uuid": device.uuid,
        "throttled_by": device.throttled_by,
        "states": device.states,
        "counters": errors,
    } | known


def event_evidence(rank: int, told: Sequence[tuple[Note, DeviceEvent]]) -> Evidence:
    """Return the events of one rank's device as evidence."""
    said = "; ".join(f"{event_text(event)} (step {note.step})" for note, event in told[-6:])
    numbers = [event.xid for _, event in told if event.kind == "xid"]
    return Evidence(
        kind="device_events",
        summary=f"of rank {rank}'s device was reported: {said}{_assumed(is_assumed=is_assumed(None, told))}",
        values={"rank": rank, "xids": numbers, "uuid": told[-1][1].uuid},
    )
