"""What the detectors of devices share: ranks with the same trouble become one finding, and each says what to do with its host."""

from collections.abc import Iterable, Iterator

import msgspec

from holter.faults.shared.wording import ranks_text
from holter.faults.window import Window
from holter.records import Device, Evidence, Finding

MAX_SHOWN = 4
"""Number of ranks whose evidence is kept."""


def joined(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield one finding per severity, the gravest first and unknown errors last, but only one per step."""
    groups: dict[tuple[bool, bool], list[Finding]] = {(True, False): [], (False, False): [], (False, True): []}
    for finding in findings:
        groups[finding.severity == "critical", finding.facts.get("is_unclear") is True].append(finding)
    steps: set[int] = set()
    for alike in groups.values():
        if alike and min(one.first_step for one in alike) not in steps:
            steps.add(min(one.first_step for one in alike))
            yield _one_of(alike)


def _one_of(alike: list[Finding]) -> Finding:
    first, *others = sorted(alike, key=lambda one: (one.first_step, one.ranks))
    if not others:
        return first
    ranks = tuple(sorted({rank for one in alike for rank in one.ranks}))
    also = [rank for rank in ranks if rank not in first.ranks]
    facts = {
        name: True if any(one.facts.get(name) is True for one in others) else value
        for name, value in first.facts.items()
    }
    return msgspec.structs.replace(
        first,
        detected_step=max(one.detected_step for one in alike),
        ranks=ranks,
        summary=f"{first.summary} The like is true of {ranks_text(also)}." if also else first.summary,
        facts=facts,
        evidence=tuple(proof for one in (first, *others)[:MAX_SHOWN] for proof in one.evidence),
    )


def advice(window: Window, rank: int, device: Device | None, said: tuple[str, str], *, is_needed: bool) -> Evidence:
    """Return what to do with the host, and which field of dcgm-exporter shows the same; `said` is (field, its value)."""
    field, value = said
    host = window.processes.hosts.get(rank, "") or "its host"
    uuid = device.uuid if device is not None else ""
    whether = "drain it now" if is_needed else "it need not be drained at once"
    where = f"dcgm-exporter's {field} says the same ({value})"
    if device is not None and uuid.startswith(("GPU-", "MIG-")):
        where = f"`nvidia-smi -q -i {device.parent or uuid}` there and {where}"
    return Evidence(
        kind="device_advice",
        summary=f"{host}{f', {uuid}' if uuid else ''}: {whether}; {where}",
        values={"rank": rank, "host": host, "uuid": uuid, "drain": is_needed, "dcgm_field": field},
    )
