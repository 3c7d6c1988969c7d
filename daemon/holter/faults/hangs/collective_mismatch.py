"""Collective mismatch: ranks of one group do not call the same.

What it detects
    Ranks whose call with the same number in the same group is another operation, or the same one with other sizes or another dtype. It is
    found while the job runs (each rank tells digests of runs of 64 calls; where two differ, the recorders are read), when it hangs, and
    when a rank died of it: the dead rank's last calls are kept by its sidecar. A rank that left out a whole round of equal calls shows
    only in its number of calls; that counts if replicas part in the same step.

Why it matters
    Collectives match by number alone. A mismatch hangs the job, aborts a process whose peers then blame the network, or does not fail at
    all: float32 against int32 in one all_reduce gives garbage on every rank, and the loss goes on.

False positives
    What may differ between ranks is not compared: splits of all_to_all, sizes of gather, scatter and messages between two ranks, calls of
    groups to which a rank does not belong. Copies of two recorders made at different moments differ in their length only; sizes that vary
    from step to step, alike on all ranks, are equal at each number. A rank that has not entered a call yet is left to `stalled_rank`.

What to do
    Look at the named call in the script, on the named ranks: a branch on the rank, a short last batch, a value that is an int here and a
    float there. If the job still runs, stop it: numbers that went through this call are wrong on all ranks.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from holter.faults.shared.collectives import analysed, call_sites, group_name, last_calls
from holter.faults.shared.mismatched_calls import (
    KINDS,
    Mismatch,
    began_ns,
    calls_at,
    earliest,
    of_counts,
    one_sided,
    step_of,
    uncounted,
)
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import cap, listed, ranks_text
from holter.faults.window import PartedBlock, Window
from holter.flight import BLOCK_CALLS, Analysis, is_over
from holter.records import Call, Collective, Evidence, ExamRequest, Finding, Flight, Severity

CRASH_S = 3.0
"""Seconds for which the peers of a crashed rank may still be there to be examined."""
MAX_MORE = 3
"""Number of further deviations that get a line of evidence of their own."""
SHOWN_OF_A_SIDE = 2
"""Number of ranks on each side whose last calls are shown."""
DEFAULT_GROUP = "default_pg"
"""The group of all ranks."""
TWO_SIDES = 2


@dataclass(frozen=True)
class CollectiveMismatch:
    """Judges whether the ranks of a group make the same calls."""

    name: ClassVar[str] = "collective_mismatch"

    together_s: float = threshold(60.0, above=0)
    """Seconds: recorders that were read further apart than this are not compared."""
    memory_s: float = threshold(180.0, above=0)
    """Seconds after the last examination for which its recorders are still compared."""
    max_examined: int = threshold(64, at_least=2)  # One rank has nobody to differ from.
    """Number of ranks whose recorders are asked for when digests differ."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding, the earliest mismatch, and requests to examine ranks whose digests differ."""
        flights = self._flights(window)
        found = _found(window, flights) or one_sided(window, flights)
        first = _first_of_each_group(window.calls.parted)
        for parted in [] if found else first:
            # A recorder forgets old calls: the copies that were read when the digests differed still have them.
            flights = _read_for(window, parted) or flights
            found = _found(window, flights)
            if found is not None:
                break
        if found is not None:
            yield _finding(window, found, flights)
        elif counted := list(self._counted(window, flights)):
            yield from counted
            return
        else:
            yield from self._ask_peers(window)
        for parted in first:
            if found is not None and parted.group == found.group:
                continue
            asked = self._to_examine(window, parted)
            if any(not _is_answered(window, rank, parted.at_ns) for rank in asked):
                told = tuple(sorted(rank for ranks in parted.digests.values() for rank in ranks))
                step = window.steps[-1].step if window.steps else 0
                summary = f"{_block_text(parted)}; their recorders are being read."
                yield _question(ExamRequest(parted.at_ns, "quick", asked), summary, told, (step, step))
            elif found is None and _is_lost(parted, read := _read_for(window, parted)):
                yield _lost(window, parted, read)
                return

    def _flights(self, window: Window) -> dict[int, Flight]:
        """Return each rank's newest copy, if it was made at about the same time as the newest of all."""
        newest: dict[int, tuple[int, Flight]] = {}
        for rank, seen in window.processes.exams.items():
            copies = [(one.exam.flight.taken_ns, one.at_ns, one.exam.flight) for one in seen if one.exam.flight]
            if copies:
                _, at_ns, flight = max(copies, key=lambda copy: copy[:2])
                newest[rank] = (at_ns, flight)
        last_ns = max((at_ns for at_ns, _ in newest.values()), default=0)
        if window.now_ns - last_ns > self.memory_s * 1e9:
            return {}
        return {rank: flight for rank, (at_ns, flight) in newest.items() if last_ns - at_ns <= self.together_s * 1e9}

    def _to_examine(self, window: Window, parted: PartedBlock) -> tuple[int, ...]:
        """Return the ranks to examine: all of a small job, otherwise some of each digest, the rarest first."""
        gone = {end.rank for end in window.processes.exits}
        alive = self._alive(window)
        if len(alive) <= self.max_examined:
            return alive
        sides = sorted(([rank for rank in ranks if rank not in gone] for ranks in parted.digests.values()), key=len)
        turns = itertools.chain.from_iterable(itertools.zip_longest(*sides))
        return tuple(sorted([rank for rank in turns if rank is not None][: self.max_examined]))

    def _counted(self, window: Window, flights: Mapping[int, Flight]) -> Iterator[Finding]:
        """Yield what the counts of calls show, after the recorders were read for it."""
        counted = uncounted(window)
        if counted is None:
            return
        step = counted[-1].step
        view = window.step(step)
        asked_ns = view.first_seen_ns if view is not None else 0
        asked = self._alive(window)[: self.max_examined]
        if any(not _is_answered(window, rank, asked_ns) for rank in asked):
            summary = f"Ranks have not made as many calls by the end of step {step}; their recorders are being read."
            newest = max([step, *(view.step for view in window.steps[-1:])])
            yield _question(ExamRequest(asked_ns, "quick", asked), summary, asked, (step, newest))
        else:
            yield _finding(window, of_counts(*counted, flights), flights)

    def _ask_peers(self, window: Window) -> Iterator[Finding]:
        """Request the recorders of a crashing rank's peers.

        The rank is kept alive for a moment, in which its peers still hold what they called.
        """
        heard = {
            rank: seen.at_ns
            for rank, exams in window.processes.exams.items()
            for seen in exams
            if seen.exam.reason == "last_breath" and window.now_ns - seen.at_ns < CRASH_S * 1e9
        }
        asked_ns = max(heard.values(), default=0)
        peers = tuple(rank for rank in self._alive(window) if rank not in heard)[: self.max_examined]
        if heard and any(not _is_answered(window, rank, asked_ns) for rank in peers):
            step = max((exams[-1].step for exams in window.processes.exams.values()), default=0)
            summary = "A rank crashes; the recorders of its peers are being read."
            yield _question(ExamRequest(asked_ns, "quick", peers), summary, peers, (step, step), "info")

    @staticmethod
    def _alive(window: Window) -> tuple[int, ...]:
        return tuple(sorted(window.attached - {end.rank for end in window.processes.exits}))


def _found(window: Window, flights: Mapping[int, Flight]) -> Mismatch | None:
    return earliest(window, analysed(flights, window.world_size), flights) if flights else None


def _with_lines(window: Window, calls: Mapping[int, Call]) -> dict[int, Call]:
    """Return each rank's call with the script's lines, from any copy that has them.

    A rank that is about to end is not asked for them.
    """
    found = dict(calls)
    for rank, one in calls.items():
        copies = (seen.exam.flight.calls for seen in window.processes.exams.get(rank, ()) if seen.exam.flight)
        found[rank] = next((call for copy in copies for call in copy if call.lines and call.record == one.record), one)
    return found


def _read_for(window: Window, parted: PartedBlock) -> dict[int, Flight]:
    """Return the copies that were read because of these digests."""
    return {
        rank: seen.exam.flight
        for rank, exams in window.processes.exams.items()
        for seen in exams
        if seen.exam.flight is not None and seen.exam.asked_ns == parted.at_ns
    }


def _first_of_each_group(parted: Sequence[PartedBlock]) -> list[PartedBlock]:
    first: dict[str, PartedBlock] = {}
    for one in parted:
        first.setdefault(one.group, one)
    return list(first.values())


def _is_answered(window: Window, rank: int, asked_ns: int) -> bool:
    newest = max((seen.exam.asked_ns for seen in window.processes.exams.get(rank, ())), default=0)
    return newest >= asked_ns or window.processes.unexamined.get(rank, 0) >= asked_ns


def _question(
    request: ExamRequest, summary: str, ranks: tuple[int, ...], steps: tuple[int, int], severity: Severity = "critical"
) -> Finding:
    """Make a finding with a request; `steps` is (since when, when it was noticed)."""
    return Finding(
        detector=CollectiveMismatch.name,
        severity=severity,
        first_step=steps[0],
        detected_step=steps[1],
        ranks=ranks,
        summary=summary,
        needs=(request,),
    )


def _finding(window: Window, seen: Mismatch, flights: Mapping[int, Flight]) -> Finding:
    analysis = analysed(flights, window.world_size) if flights else None
    step = _first_step(window, flights, seen)
    facts = _facts(window, seen.everyone, has_passed=seen.has_passed) | {
        "is_order": seen.kind in {"order", "extra"},
        "is_missing": seen.kind == "missing",
        "is_shape": seen.kind == "shape",
        "is_dtype": seen.kind == "dtype",
        "is_kind_known": True,
        "is_perhaps_missing": seen.alternative == "missing",
        "is_perhaps_order": seen.alternative == "order",
        "is_culprit_clear": seen.is_clear,
        "is_seen_on_both_sides": seen.is_seen_on_both_sides,
    }
    digests = [_block_evidence(parted) for parted in window.calls.parted if parted.group == seen.group]
    return Finding(
        detector=CollectiveMismatch.name,
        severity="critical",
        first_step=step,
        detected_step=max([step, *(view.step for view in window.steps[-1:]), *_exam_steps(window, seen.everyone)]),
        ranks=seen.ranks,
        summary=_summary(seen, is_running=facts["is_running"]),
        facts=facts,
        evidence=(*_evidence(window, seen, analysis, flights), *digests[:1]),
        collective=Collective(
            group=group_name(seen.group, seen.description), sequence=seen.sequence, operation=seen.operation
        ),
    )


def _lost(window: Window, parted: PartedBlock, flights: Mapping[int, Flight]) -> Finding:
    """Make a finding for calls that certainly did not match but cannot be read any more."""
    rarest, *others = sorted(parted.digests.values(), key=len)
    told = tuple(sorted(rank for ranks in (rarest, *others) for rank in ranks))
    is_clear = len(others) == 1 and len(rarest) < len(others[0])
    later = [view.step for view in window.steps if view.first_seen_ns >= parted.at_ns]
    step = min(later[:1] + _exam_steps(window, told), default=0)
    name = next((g.description for flight in flights.values() for g in flight.groups if g.name == parted.group), "")
    group = group_name(parted.group, name)
    facts = _facts(window, told, has_passed=True) | {
        "is_order": None,
        "is_missing": None,
        "is_shape": None,
        "is_dtype": None,
        "is_kind_known": False,
        "is_perhaps_missing": None,
        "is_perhaps_order": None,
        "is_culprit_clear": is_clear,
        "is_seen_on_both_sides": None,
    }
    return Finding(
        detector=CollectiveMismatch.name,
        severity="warning",
        first_step=step,
        detected_step=step,
        ranks=rarest if is_clear else told,
        summary=f"{_block_text(parted, group)}; the recorders had gone past them when they were read.",
        facts=facts,
        evidence=(_block_evidence(parted, group),),
        collective=Collective(group=group, sequence=parted.block * BLOCK_CALLS, operation="unknown"),
    )


def _facts(window: Window, ranks: Sequence[int], *, has_passed: bool) -> dict[str, Any]:
    is_dead = any(end.exited.exit_code != 0 for end in window.processes.exits)
    is_hanging = any(rank in window.processes.delays for rank in ranks)
    return {"is_dead": is_dead, "is_hanging": is_hanging, "is_running": has_passed and not (is_dead or is_hanging)}


def _exam_steps(window: Window, ranks: Sequence[int]) -> list[int]:
    return [window.processes.exams[rank][-1].step for rank in ranks if window.processes.exams.get(rank)]


def _first_step(window: Window, flights: Mapping[int, Flight], seen: Mismatch) -> int:
    """Return the step at which the ranks stand if they are still in the call, or else the step of the call.

    If in doubt it is rather too early than too late.
    """
    if seen.step is not None:
        return seen.step
    found = _exam_steps(window, seen.everyone)
    if seen.has_passed:
        found += _steps_of_call(window, flights, seen)
    return min(found, default=-1)


def _steps_of_call(window: Window, flights: Mapping[int, Flight], seen: Mismatch) -> list[int]:
    """Return the step of the call, from the counts of calls, or from timed calls, or from when steps were reported."""
    step = step_of(window.calls.counts.get(seen.group, ()), seen.sequence)
    if step is not None:
        return [step]
    timed = [
        (one.sequence, entry.step) for entry in window.calls.arrivals for one in entry.latest if one.group == seen.group
    ]
    before = [step for sequence, step in timed if sequence <= seen.sequence]
    if before and len(before) < len(timed):
        return before[-1:]
    place = (seen.group, seen.sequence)
    called_ns = began_ns(flights, {place}).get(place, 0)
    return [view.step for view in window.steps if view.first_seen_ns >= called_ns > 0]


def _summary(seen: Mismatch, *, is_running: bool) -> str:
    """Return one sentence, and a second one if the job goes on."""
    if seen.step is not None:
        text = f"{ranks_text(seen.ranks)} {seen.why}"
    elif not seen.is_seen_on_both_sides:
        text = f"{ranks_text(seen.ranks)} called {next(iter(seen.sides))} as {seen.place}; {seen.why}"
    elif seen.is_clear:
        mine = [text for text, ranks in seen.sides.items() if set(ranks) & set(seen.ranks)]
        others = [text for text in seen.sides if text not in mine]
        theirs = ranks_text(rank for text in others for rank in seen.sides[text])
        text = f"{ranks_text(seen.ranks)} called {listed(mine)} where {theirs} called {listed(others)}, as {seen.place}"
    else:
        called = listed(f"{ranks_text(ranks)} called {text}" for text, ranks in seen.sides.items())
        text = f"{called}, as {seen.place}; nothing tells which of them is right"
    text = cap(text)
    return f"{text}. Nothing failed: the job goes on, with wrong numbers." if is_running else f"{text}."


def _evidence(
    window: Window, seen: Mismatch, analysis: Analysis | None, flights: Mapping[int, Flight]
) -> Iterator[Evidence]:
    """Yield the call, why these ranks are blamed, up to where all matched, what else differs, and both sides' last calls."""
    calls = calls_at(flights, seen.group, seen.sequence)
    said = listed(f"{text} on {ranks_text(ranks)}" for text, ranks in seen.sides.items())
    yield Evidence(
        kind="collective",
        summary=f"{seen.place}: {said}",
        values={
            "group": group_name(seen.group, seen.description),
            "sequence": seen.sequence,
            "sides": [_side(text, ranks, calls) for text, ranks in seen.sides.items()],
        },
    )
    yield from call_sites(_with_lines(window, calls))
    if seen.why:
        right = [text for text, ranks in seen.sides.items() if not set(ranks) & set(seen.ranks)]
        what = f"{listed(right)} was to be called there: " if seen.is_clear and right and seen.step is None else ""
        yield Evidence(kind="majority", summary=f"{what}{seen.why}", values={"is_clear": seen.is_clear})
    if analysis is not None:
        yield from _around(seen, analysis)
    for ranks in seen.sides.values():
        for rank in ranks[:SHOWN_OF_A_SIDE]:
            if rank in flights:
                yield last_calls(rank, flights[rank], until=calls.get(rank))


def _side(text: str, ranks: tuple[int, ...], calls: Mapping[int, Call]) -> dict[str, Any]:
    call = next((calls[rank] for rank in ranks if rank in calls), None)
    exact = {"sizes": [list(size) for size in call.sizes], "dtypes": list(call.dtypes)} if call else {}
    return {"signature": text, "ranks": list(ranks), **exact}


def _around(seen: Mismatch, analysis: Analysis) -> Iterator[Evidence]:
    matched = analysis.matched.get(seen.group, -1)
    if 0 <= matched < seen.sequence:
        text = f"up to number {matched} of this group all ranks called the same, as far as the recorders reach back"
        yield Evidence(kind="collective", summary=text, values={"matched": matched})
    known = (seen.group, seen.sequence)
    more = [one for one in analysis.deviations if one.kind in KINDS and (one.group, one.sequence) != known]
    for one in more[:MAX_MORE]:
        name = group_name(one.group, one.description)
        text = f"also number {one.sequence} of group {name}: {one.seen} on {ranks_text(one.ranks)} instead of {one.expected}"
        values = {"group": name, "sequence": one.sequence, "ranks": list(one.ranks)}
        yield Evidence(kind="collective", summary=text, values=values)
    if len(more) > MAX_MORE:
        num_more = len(more) - MAX_MORE
        yield Evidence(kind="collective", summary=f"{num_more} more calls differ", values={"num_more": num_more})


def _is_lost(parted: PartedBlock, flights: Mapping[int, Flight]) -> bool:
    """Whether the digests are certainly of one group, but the calls behind them are no longer in the recorders."""
    told = {rank for ranks in parted.digests.values() for rank in ranks}
    groups = [group for flight in flights.values() for group in flight.groups if group.name == parted.group]
    members = {group.ranks for group in groups if group.ranks}
    is_one = any(group.description == DEFAULT_GROUP for group in groups) or (
        len(members) == 1 and told <= set(next(iter(members)))
    )
    run = range(parted.block * BLOCK_CALLS, (parted.block + 1) * BLOCK_CALLS)
    whole = {rank for rank, flight in flights.items() if _holds(flight, parted.group, run)}
    is_refuted = sum(bool(whole & set(ranks)) for ranks in parted.digests.values()) >= TWO_SIDES
    is_read = sum(not flights.keys().isdisjoint(ranks) for ranks in parted.digests.values()) >= TWO_SIDES
    return is_one and is_read and not is_refuted


def _holds(flight: Flight, group: str, run: range) -> bool:
    """Whether a recorder reaches from the run's beginning to after its end.

    Only calls that are over count, because the others are kept longer.
    """
    held = [call.sequence for call in flight.calls if call.group == group and not call.is_p2p and is_over(call)]
    return bool(held) and min(held) <= max(run.start, 1) and max(held) >= run.stop


def _block_text(parted: PartedBlock, group: str = "") -> str:
    """Describe the run: `Ranks 0 and 1 did not all call the same among the calls 448 to 511 of group 0`."""
    first = parted.block * BLOCK_CALLS
    told = sorted(rank for ranks in parted.digests.values() for rank in ranks)
    return cap(
        f"{ranks_text(told)} did not all call the same among the calls {first} to {first + BLOCK_CALLS - 1} of group {group or parted.group}"
    )


def _block_evidence(parted: PartedBlock, group: str = "") -> Evidence:
    """Return which ranks' digests differ."""
    first = parted.block * BLOCK_CALLS
    sides = " against ".join(ranks_text(ranks) for ranks in parted.digests.values())
    summary = (
        f"digests of the calls {first} to {first + BLOCK_CALLS - 1} of group {group or parted.group} differ: {sides}"
    )
    return Evidence(
        kind="digest", summary=summary, values={"sides": [list(ranks) for ranks in parted.digests.values()]}
    )
