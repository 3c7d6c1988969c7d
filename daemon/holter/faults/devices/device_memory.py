"""Device memory: a device met errors in its memory that could not be corrected, or has rows to set aside and has not.

What it detects
    The count of uncorrectable ECC errors grew, or is not zero since the driver was loaded; Xid 48, 64, 94, 95, 140; a row that
    waits to be remapped or could not be; pages that wait to be retired; memory of the host that the kernel calls uncorrectable. Xid
    63 (a row was set aside) and 92 (many corrected errors) are warnings.

Why it matters
    What lay there is lost. A contained error ends the program that read it, another may end all programs on the device; a row that
    waits is met again until the device is reset.

False positives
    Errors that were corrected, rows that were remapped long ago, and counts of the device's whole life are no news and are not
    told.

What to do
    Reset the device when the job is off it, so that rows are remapped; if remapping failed, have it replaced.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.devices.together import advice, joined
from holter.faults.shared import device_notes
from holter.faults.shared.wording import cap, listed
from holter.faults.window import Note, Window
from holter.records import Device, DeviceEvent, Finding

FIELDS = {
    "ecc_uncorrected": "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
    "row_remap_pending": "DCGM_FI_DEV_ROW_REMAP_PENDING",
    "row_remap_failed": "DCGM_FI_DEV_ROW_REMAP_FAILURE",
    "page_retirement_pending": "DCGM_FI_DEV_RETIRED_PENDING",
    "xid": "DCGM_FI_DEV_XID_ERRORS",
}
"""Counter or state -> the field of dcgm-exporter with the same value."""
STATES = {
    "row_remap_failed": "a bad row could not be remapped",
    "row_remap_pending": "a bad row waits to be remapped at the next reset",
    "page_retirement_pending": "bad pages wait to be retired at the next reset",
}


@dataclass(frozen=True)
class Symptom:
    """One thing that is wrong with the memory."""

    field: str
    text: str
    step: int
    is_grave: bool


@dataclass(frozen=True)
class DeviceMemory:
    """Judges errors of devices' memory."""

    name: ClassVar[str] = "device_memory"

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield one finding per severity, for the ranks whose device has such errors."""
        yield from joined(self._each(window))

    def _each(self, window: Window) -> Iterator[Finding]:
        devices, events = device_notes.newest(window), device_notes.events(window)
        for rank in sorted(devices.keys() | events.keys()):
            known, told = devices.get(rank), [pair for pair in events.get(rank, []) if _is_memory(pair[1])]
            symptoms = [*_reported(told), *(_read(*known) if known else ())]
            if symptoms:
                yield _finding(window, rank, known[1] if known else None, told, symptoms)


def _is_memory(event: DeviceEvent) -> bool:
    return event.kind == "memory" or (event.kind == "xid" and device_notes.xid(event.xid).kind == "memory")


def _reported(told: list[tuple[Note, DeviceEvent]]) -> Iterator[Symptom]:
    for note, event in told:
        is_grave = event.kind == "memory" or device_notes.xid(event.xid).is_grave
        yield Symptom("xid", device_notes.event_text(event), note.step, is_grave)


def _read(note: Note, device: Device) -> Iterator[Symptom]:
    grown, count = device.grown.get("ecc_uncorrected", 0), device.counters.get("ecc_uncorrected", 0)
    lasting = device.grown.get("ecc_uncorrected_lifetime", 0)
    if grown or lasting:
        text = f"{max(grown, lasting)} errors that could not be corrected came during this run"
        yield Symptom("ecc_uncorrected", text, note.step, True)
    elif count:
        text = f"{count} errors that could not be corrected came before this run, since its driver was loaded"
        yield Symptom("ecc_uncorrected", text, note.step, False)
    for state, text in STATES.items():
        if state in device.states:
            yield Symptom(state, text, note.step, False)


def _finding(
    window: Window, rank: int, device: Device | None, told: list[tuple[Note, DeviceEvent]], symptoms: list[Symptom]
) -> Finding:
    is_grave = any(one.is_grave for one in symptoms)
    is_host = all(not event.uuid for _, event in told) and bool(told) and len(symptoms) == len(told)
    where = device_notes.place(window, rank, None if is_host else device)
    use = "runs" if is_host else "computes"
    lead = next((one for one in symptoms if one.is_grave), symptoms[0])
    return Finding(
        detector=DeviceMemory.name,
        severity="critical" if is_grave else "warning",
        first_step=min(one.step for one in symptoms),
        detected_step=max(one.step for one in symptoms),
        ranks=(rank,),
        summary=f"{cap(where)}, on which rank {rank} {use}, has bad memory: {listed(dict.fromkeys(one.text for one in symptoms))}.",
        facts={
            "is_memory_bad": True,
            "is_old": not any(one.is_grave for one in symptoms),
            "is_device_assumed": device_notes.is_assumed(device, told),
            "is_corrected": False,
        },
        evidence=(
            *([device_notes.event_evidence(rank, told)] if told else []),
            *(proof for proof in device_notes.evidence_of(window, rank) if proof.kind == "device"),
            advice(
                window,
                rank,
                device,
                (FIELDS[lead.field], lead.text),
                is_needed=is_grave or (device is not None and "row_remap_failed" in device.states),
            ),
        ),
    )
