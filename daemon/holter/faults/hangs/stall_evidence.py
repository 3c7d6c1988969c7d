"""What proves a standstill: stacks, collectives, the culprits' processes, why their time is up, and who waits."""

import math
from collections.abc import Iterator

from holter.faults.hangs import stacks
from holter.faults.hangs.confirming import Due
from holter.faults.hangs.culprits import Blame, flights
from holter.faults.hangs.stall_facts import Culprit
from holter.faults.hangs.stall_words import waited
from holter.faults.hangs.standstill import Standstill
from holter.faults.shared import collectives
from holter.faults.shared.wording import ranks_text
from holter.records import Evidence

MAX_CULPRITS = 4
"""Whose processes are described."""
MAX_STACKS = 64
"""Ranks whose stacks are merged."""
MAX_LISTED = 32
"""Victims that are listed; all are counted."""


def evidence(scene: Standstill, blamed: Blame, found: Due) -> Iterator[Evidence]:
    """Stacks, collectives, the culprits' processes, why their time is up, and who waits."""
    shown = (*blamed.culprits, *blamed.victims)[:MAX_STACKS]
    exams = {rank: scene.looks[rank].stacked for rank in shown if rank in scene.looks}
    if (tree := stacks.evidence(exams)) is not None:
        yield tree
    if blamed.analysis is not None:
        inside = set(blamed.wait.entered) if blamed.wait else set()
        victims = [rank for rank in blamed.victims if rank in inside] or blamed.victims
        ranks = (*blamed.culprits[:MAX_CULPRITS], *victims[:1])
        yield from collectives.evidence(blamed.analysis, ranks, flights(scene, ranks))
    if blamed.deviation is not None:
        yield Evidence(kind="deviation", summary=blamed.deviation.why, values={"kind": blamed.deviation.kind})
    for rank in blamed.culprits[:MAX_CULPRITS]:
        yield from _process(Culprit(scene, blamed, rank))
    yield Evidence(kind="deadline", summary=f"{ranks_text(blamed.culprits[:1])}: {found.why}")
    if blamed.victims:
        yield _victims(scene, blamed, found.ready_ns)


def _process(culprit: Culprit) -> Iterator[Evidence]:
    process, rank = culprit.process, culprit.rank
    host = culprit.scene.window.processes.hosts.get(rank, "")
    if process is None or culprit.look is None:
        why = "its sidecar did not answer" if culprit.look is None else "its process could not be looked at"
        yield Evidence(kind="process_state", summary=f"rank {rank}: {why}", values={"rank": rank, "host": host})
        return
    said = [process.state + (f" for {process.stopped_s:.1f} s" if process.stopped_s else "")]
    if not math.isnan(process.cpu_share):
        said.append(f"{process.cpu_share:.2f} of a core")
    if process.wait_channel:
        said.append(f"sleeps in {process.wait_channel}")
    if culprit.is_lock_free is not None:
        said.append("the interpreter answers" if culprit.is_lock_free else "the interpreter does not answer")
    pressed = [f"{name} {share:.0%}" for name, share in sorted(process.pressure.items()) if share >= 0.1]  # noqa: PLR2004
    if pressed:
        said.append(f"tasks of the host wait for {', '.join(pressed)}")
    if not culprit.has_stack and culprit.look.exam.stack_error:
        said.append(f"no stack: {culprit.look.exam.stack_error}")
    values = {
        "rank": rank,
        "host": host,
        "state": process.state,
        "stopped_s": process.stopped_s,
        "cpu_s": process.cpu_s,
        "cpu_share": None if math.isnan(process.cpu_share) else process.cpu_share,
        "wait_channel": process.wait_channel,
        "pressure": dict(process.pressure),
        "is_lock_free": culprit.is_lock_free,
    }
    yield Evidence(kind="process_state", summary=f"rank {rank}: {', '.join(said)}", values=values)


def _victims(scene: Standstill, blamed: Blame, at_ns: int) -> Evidence:
    victims = blamed.victims
    return Evidence(
        kind="victims",
        summary=f"{ranks_text(victims)} {waited(scene, victims, at_ns)} and {'is' if len(victims) == 1 else 'are'} not to blame",
        values={"count": len(victims), "ranks": list(victims[:MAX_LISTED])},
    )
