"""Device errors: a driver reported a fault of a device itself, or the device is gone.

What it detects
    An Xid that says the device failed (79: it fell off the bus; 119 and 120: its system processor does not answer; 61, 62, 109 and
    their like); a device that its driver calls lost, or that it wants reset; a machine check of the host. An Xid that holter does
    not know is told too, as a question.

Why it matters
    The rank hangs in the driver, or dies with an error that names any line of the script; its peers wait or lose their connections.
    Their logs show everything but the cause, and a restart on the same host meets it again.

False positives
    Xids 13, 31, 43, 45 and their like say that a program did something wrong: they are no fault of the device and are only listed
    with the rank's end. What was reported before the run began is not seen.

What to do
    Drain the host, reset the device, and give it to the vendor's diagnosis before it comes back.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.devices.together import advice, joined
from holter.faults.shared import device_notes
from holter.faults.shared.wording import cap
from holter.faults.window import Note, Window
from holter.records import Device, DeviceEvent, Finding

GONE = ("lost", "reset_required")
FIELD = "DCGM_FI_DEV_XID_ERRORS"


@dataclass(frozen=True)
class Failed:
    """One rank whose device or host failed."""

    rank: int
    step: int
    what: str
    is_grave: bool
    device: Device | None
    told: tuple[tuple[Note, DeviceEvent], ...]


@dataclass(frozen=True)
class DeviceErrors:
    """Judges what drivers and kernels report."""

    name: ClassVar[str] = "device_errors"

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield one finding for the ranks whose devices failed, and a warning for errors whose meaning is unknown."""
        devices, events = device_notes.newest(window), device_notes.events(window)
        known = (
            _failed(rank, devices.get(rank), events.get(rank, [])) for rank in sorted(devices.keys() | events.keys())
        )
        yield from joined(_finding(window, failed) for failed in known if failed is not None)


def _failed(rank: int, newest: tuple[Note, Device] | None, events: list[tuple[Note, DeviceEvent]]) -> Failed | None:
    device = newest[1] if newest else None
    told = [(note, event) for note, event in events if _kind(event) in {"device", "unknown"}]
    gone = [state for state in GONE if device is not None and state in device.states]
    if not told and not gone:
        return None
    ours = [(note, event) for note, event in told if _kind(event) == "device"]
    lead = min((note.step for note, _ in ours or told), default=newest[0].step if newest else 0)
    what = (
        device_notes.event_text((ours or told)[0][1])
        if told
        else f"its driver says that it is {gone[0].replace('_', ' ')}"
    )
    return Failed(rank, lead, what, bool(ours or gone), device, tuple(told))


def _kind(event: DeviceEvent) -> str:
    if event.kind != "xid":
        return "device" if event.kind == "machine" else "memory"
    return device_notes.xid(event.xid).kind


def _finding(window: Window, failed: Failed) -> Finding:
    rank, device = failed.rank, failed.device
    numbers = [event.xid for _, event in failed.told if event.kind == "xid"]
    is_gone = device is not None and bool(set(GONE) & set(device.states))
    # Drivers ask for a reset after another fault, which is reported too; and a machine check may pass.
    is_severe = is_gone or any(device_notes.xid(number).is_grave for number in numbers)
    is_host = not numbers and not is_gone and all(not event.uuid for _, event in failed.told)
    where = device_notes.place(window, rank, None if is_host else device)
    return Finding(
        detector=DeviceErrors.name,
        # Its consequences make it critical: a halt now would wait for a rank that is about to hang.
        severity="warning",
        first_step=failed.step,
        detected_step=max((note.step for note, _ in failed.told), default=failed.step),
        ranks=(rank,),
        summary=f"{cap(where)}, on which rank {rank} {'runs' if is_host else 'computes'}, reported a fault: {failed.what}.",
        facts={
            "is_device_failed": failed.is_grave,
            "is_unclear": not failed.is_grave,
            "is_device_assumed": device_notes.is_assumed(device, failed.told),
            "is_device_well": False if failed.is_grave else None,
        },
        evidence=(
            *([device_notes.event_evidence(rank, failed.told)] if failed.told else []),
            *(proof for proof in device_notes.evidence_of(window, rank) if proof.kind == "device"),
            advice(window, rank, device, (FIELD, str(numbers[0]) if numbers else failed.what), is_needed=is_severe),
        ),
    )
