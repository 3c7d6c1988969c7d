"""Finds one call at which ranks of a group do not match: who called what, by their recorders and by their counts at the ends of steps.

number 40 of group default_pg     all_reduce float32 [100]   ranks 0, 2, 3
                                  all_reduce float32 [200]   rank 1
"""

import dataclasses
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from holter.faults.shared.collectives import descriptions, group_name
from holter.faults.shared.parting import find_parting
from holter.faults.shared.wording import listed, ranks_text
from holter.faults.window import CallCounts, Window
from holter.flight import Analysis, Deviation, is_over, signature
from holter.records import Call, Flight

MIN_STEPS = 3
"""Number of steps in which the counts must have agreed, and then differed: a call at the border of two steps may count
for either."""

LOOK_BACK = 16
"""Number of steps looked at before the first that differs: if ranks always counted differently, each step is a first."""
KINDS = ("order", "shape", "dtype")
"""Kinds of deviation that are a mismatch wherever they are seen."""
MESSAGES = ("send", "recv")
REPEATS = 3
"""Times that a pattern of calls must have been seen before a call counts as leaving it."""
MIN_HISTORY = 8
"""Number of calls that must follow the pattern."""
AVERAGED = ("gradients_reduced", "gradients", "parameters_before", "parameters_after")
"""Classes of tensors that differ if a reduction was left out."""
CallPlace = tuple[str, int]
"""(group, sequence number)"""


@dataclass(frozen=True)
class Behind:
    """Ranks that have called fewer collectives than their peers since some step."""

    step: int
    by: int
    """Number of calls that they are behind."""
    num_steps: int
    """Number of steps for which this was seen."""
    last: int
    """Number of their last call before."""


def step_of(counts: Sequence[CallCounts], sequence: int) -> int | None:
    """Return the step in which most ranks made this call, or the first step that has not ended; None if that is unknown."""
    before: int | None = None
    for pace in counts:
        most = max(pace.lasts, key=lambda last: len(pace.lasts[last]))
        if most >= sequence:
            return pace.step if before is not None else None
        before = pace.step
    return before + 1 if before is not None else None


def behind(
    counts: Sequence[CallCounts], ranks: Collection[int], others: Collection[int], num_steps: int = MIN_STEPS
) -> Behind | None:
    """Return how far these ranks, unlike the others, have been behind since some step.

    It must have been the same number of calls for at least `num_steps`; None otherwise.
    """
    counted = list(_counted(counts, frozenset(ranks), frozenset(others)))
    num_behind = next(
        (back for back, (_, mine, theirs) in enumerate(reversed(counted)) if mine >= theirs), len(counted)
    )
    num_equal = len(counted) - num_behind
    by = {theirs - mine for _, mine, theirs in counted[num_equal:]}
    is_equal = all(mine == theirs for _, mine, theirs in counted[max(0, num_equal - MIN_STEPS) : num_equal])
    if num_behind < num_steps or num_equal < MIN_STEPS or len(by) != 1 or not is_equal:
        return None
    step, last, _ = counted[num_equal - 1]
    # Ranks that called nothing in a step have no count for it.
    first = next(pace.step for pace in counts if pace.step > step and _of(pace, frozenset(others)) is not None)
    return Behind(first, by.pop(), num_behind, last)


def are_counted(counts: Mapping[str, Sequence[CallCounts]], ranks: Collection[int], step: int) -> bool:
    """Whether everything that `left_out` needs to judge this step is there.

    It needs the counts of these ranks at the ends of the next steps.
    """
    for told in counts.values():
        newest = {rank: pace.step for pace in told for some in pace.lasts.values() for rank in some}
        if any(newest[rank] < step + MIN_STEPS - 1 for rank in ranks if rank in newest):
            return False
    return True


def left_out(counts: Sequence[CallCounts]) -> tuple[tuple[int, ...], tuple[int, ...], Behind] | None:
    """Return (ranks, others, how far) if ranks made too few calls in one step, while the others made as many as before.

    Only the steps right after it are looked at: somebody may stop the job because of it, and ranks that are held count
    differently.
    """
    for index, pace in enumerate(counts):
        if len(pace.lasts) < 2:  # noqa: PLR2004 - all agree
            continue
        ranks = pace.lasts[min(pace.lasts)]
        others = tuple(sorted(rank for told in pace.lasts.values() for rank in told if rank not in ranks))
        around = counts[max(0, index - LOOK_BACK) : index + MIN_STEPS]
        found = behind(around, ranks, others, num_steps=MIN_STEPS - 1)
        if found is not None and _is_as_ever(counts, others, found.step):
            return ranks, others, found
    return None


def _is_as_ever(counts: Sequence[CallCounts], ranks: Sequence[int], step: int) -> bool:
    """Whether these ranks made as many calls in this step as in the one before; if not, it was they who called too often."""
    told = [(pace.step, last) for pace in counts if (last := _of(pace, frozenset(ranks))) is not None]
    at = next(index for index, (then, _) in enumerate(told) if then == step)
    (_, earlier), (_, before), (_, now) = told[at - 2 : at + 1]
    return now - before == before - earlier


def _counted(
    counts: Sequence[CallCounts], ranks: frozenset[int], others: frozenset[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield (step, their last number, the others') for steps in which both are known and agree among themselves."""
    for pace in counts:
        mine, theirs = _of(pace, ranks), _of(pace, others)
        if mine is not None and theirs is not None:
            yield pace.step, mine, theirs


def _of(pace: CallCounts, ranks: frozenset[int]) -> int | None:
    said = [last for last, told in pace.lasts.items() if not ranks.isdisjoint(told)]
    return said[0] if len(said) == 1 else None


@dataclass(frozen=True)
class Mismatch:
    """A call that ranks of one group made differently."""

    group: str
    description: str
    sequence: int
    operation: str
    kind: str
    """`order`, `shape` or `dtype`; `missing` or `extra` if nobody waits, because everything after it is shifted by one."""
    sides: Mapping[str, tuple[int, ...]]
    """Signature of the call -> ranks that made it, the larger side first; only one side if nothing is known of the other."""
    ranks: tuple[int, ...]
    """The ranks that deviated; all ranks if that is unknown."""
    is_clear: bool
    why: str
    alternative: str | None = None
    """Another kind that fits nearly as well."""
    step: int | None = None
    """The step in which it was made, if its number alone does not show that."""
    has_passed: bool = False
    """Whether some rank has left the call, so that the job did not stop there."""

    @property
    def place(self) -> str:
        """Name the call: `number 40 of group default_pg`."""
        return f"number {self.sequence} of group {group_name(self.group, self.description)}"

    @property
    def everyone(self) -> tuple[int, ...]:
        """Every rank that takes part in it."""
        return tuple(sorted({rank for ranks in self.sides.values() for rank in ranks} | set(self.ranks)))

    @property
    def is_seen_on_both_sides(self) -> bool:
        """Whether recorders show both sides of it."""
        return len(self.sides) > 1


def earliest(window: Window, analysis: Analysis | None, flights: Mapping[int, Flight]) -> Mismatch | None:
    """Return the mismatch that was called first, of those that the recorders show."""
    found = [one for one in analysis.deviations if _is_mismatch(window, one, flights)] if analysis else []
    if not found:
        return None
    when = began_ns(flights, {(one.group, one.sequence) for one in found})
    first = min(found, key=lambda one: (when.get((one.group, one.sequence), 0), one.group, one.sequence))
    seen = Mismatch(
        group=first.group,
        description=first.description,
        sequence=first.sequence,
        operation=first.operation,
        kind=first.kind,
        sides=_sides(flights, first) or _standing(flights, first),
        ranks=first.ranks,
        is_clear=first.is_clear,
        why=first.why,
        alternative=first.alternative,
        has_passed=any(is_over(call) for call in calls_at(flights, first.group, first.sequence).values()),
    )
    return _since_when(window, seen, first.others)


def _since_when(window: Window, seen: Mismatch, others: Sequence[int]) -> Mismatch:
    """Find the step in which a call was left out, from the counts.

    If all calls are alike, the recorders show a missing one only when the others come to an end.
    """
    if seen.kind != "order" or not seen.is_clear:
        return seen
    counts = window.calls.counts.get(seen.group, ())
    found = behind(counts, seen.ranks, others) or _left_out_by(counts, seen.ranks)
    if found is None:
        return seen
    calls = "one call" if found.by == 1 else f"{found.by} calls"
    said = [text for text, ranks in seen.sides.items() if set(ranks) & set(others)]
    why = (
        f"left out {calls} of group {group_name(seen.group, seen.description)} in step {found.step}: up to then all had called as many by "
        f"the end of each step, and in the {found.num_steps} steps that were seen since they were {found.by} apart, until {listed(said)} met nobody"
    )
    return dataclasses.replace(seen, kind="missing", why=why, step=found.step, alternative=None)


def uncounted(window: Window) -> tuple[str, tuple[int, ...], tuple[int, ...], Behind] | None:
    """Return (group, ranks, others, how far) if ranks left out a whole round of calls; None otherwise.

    What these rounds average must differ since. Each call then meets the others' next, of the same size, and nothing fails.
    That ranks count calls for different steps proves nothing by itself, but replicas that begin to differ in that step do.
    """
    partings = [parting for name in AVERAGED if (parting := find_parting(window, name))]
    for group, counts in window.calls.counts.items() if partings else ():
        found = left_out(counts)
        if found is None:
            continue
        ranks, others, lost = found
        if _stepped_without_pass(window, ranks, lost.step):
            continue
        if any(parting.step >= lost.step and {*ranks, *others} <= set(parting.ranks) for parting in partings):
            return group, ranks, others, lost
    return None


def _stepped_without_pass(window: Window, ranks: Collection[int], step: int) -> bool:
    """Whether one of these ranks made that step, or one beside it, without a backward pass.

    Then it took one step too many, and left out no call. A call at the border of two steps may count for either.
    """
    passes = dict(window.values("micro_steps"))
    around = (passes[each] for each in (step - 1, step, step + 1) if each in passes)
    return any(one.low == 0 and one.low_rank in ranks for one in around)


def of_counts(
    group: str, ranks: tuple[int, ...], others: tuple[int, ...], found: Behind, flights: Mapping[int, Flight]
) -> Mismatch:
    """Make a mismatch from the counts, with what the recorders still hold of the call."""
    sequence = found.last + 1
    known = {rank: flight for rank, flight in flights.items() if rank in others}
    held = calls_at(known, group, sequence)
    operations = {call.operation for flight in known.values() for call in flight.calls if call.group == group}
    call = next(iter(held.values()), None)
    common = operations.pop() if len(operations) == 1 else "unknown"
    description = next((text for flight in flights.values() if (text := descriptions(flight).get(group))), "")
    name = group_name(group, description)
    calls = "one call" if found.by == 1 else f"{found.by} calls"
    why = (
        f"left out {calls} of group {name} in step {found.step}: up to then all had called as many by the end of each step, since then "
        f"they are {found.by} apart, so that what was called in one step meets what was called in another, and replicas part"
    )
    return Mismatch(
        group=group,
        description=description,
        sequence=sequence,
        operation=call.operation if call else common,
        kind="missing",
        sides={
            f"{signature(call) if call else common}, made in step {found.step}": others,
            "the same number, made in a later step": ranks,
        },
        ranks=ranks,
        is_clear=True,
        why=why,
        step=found.step,
        has_passed=True,
    )


def _left_out_by(counts: Sequence[CallCounts], ranks: Sequence[int]) -> Behind | None:
    found = left_out(counts)
    return found[2] if found is not None and set(found[0]) == set(ranks) else None


def _is_mismatch(window: Window, one: Deviation, flights: Mapping[int, Flight]) -> bool:
    """Whether the deviation is proven, and for this detector: a rank that left out a call while all stand still is a stall."""
    concerned = {*one.ranks, *one.others}
    members = {group.ranks for flight in flights.values() for group in flight.groups if group.name == one.group}
    # Different groups of the same name must not be compared.
    if len(members - {()}) > 1 and not any(concerned <= set(ranks) for ranks in members):
        return False
    if one.kind == "order" and not one.is_clear and not _is_final(window, concerned):
        return False
    late = [window.processes.delays[rank].overdue.tier for rank in concerned if rank in window.processes.delays]
    if one.kind not in KINDS:
        return not late and bool(_sides(flights, one))
    # Ranks in a cycle have not met at one number, so they must be known to stay there.
    return bool(_sides(flights, one)) or (len(late) == len(concerned) and set(late) == {"overdue"})


def _is_final(window: Window, ranks: Collection[int]) -> bool:
    """Whether a rank is overdue or has failed: two ranks that called in different orders do not resolve that."""
    is_overdue = any(
        rank in window.processes.delays and window.processes.delays[rank].overdue.tier == "overdue" for rank in ranks
    )
    return is_overdue or any(end.exited.exit_code != 0 for end in window.processes.exits)


def began_ns(flights: Mapping[int, Flight], places: Collection[CallPlace]) -> dict[CallPlace, int]:
    """Return when the first rank entered each of these calls."""
    found: dict[CallPlace, int] = {}
    for flight in flights.values():
        for call in flight.calls:
            place = (call.group, call.sequence)
            if not call.is_p2p and place in places:
                found[place] = min(call.created_ns, found.get(place, call.created_ns))
    return found


def calls_at(flights: Mapping[int, Flight], group: str, sequence: int, *, is_p2p: bool = False) -> dict[int, Call]:
    """Return each rank's call of this number."""
    return {
        rank: call
        for rank, flight in sorted(flights.items())
        for call in flight.calls
        if (call.group, call.sequence, call.is_p2p) == (group, sequence, is_p2p)
    }


def _sides(flights: Mapping[int, Flight], one: Deviation) -> dict[str, tuple[int, ...]]:
    """Return who called what at that number; empty if they did not differ there."""
    if one.operation.startswith(MESSAGES):
        ends = calls_at(flights, one.group, one.sequence, is_p2p=True)
        senders = tuple(rank for rank in one.ranks if rank in ends and ends[rank].operation.startswith("send"))
        return {one.expected: senders, one.seen: tuple(rank for rank in one.ranks if rank not in senders)}
    concerned = {*one.ranks, *one.others}
    calls = calls_at(flights, one.group, one.sequence)
    sides = _by_text({rank: signature(call) for rank, call in calls.items() if rank in concerned})
    if len(sides) == 1 and one.others and concerned <= calls.keys() and one.expected != one.seen:
        # Calls that are made together have one number: the last of them agree, the others do not.
        return {one.expected: one.others, one.seen: one.ranks}
    return sides if len(sides) > 1 else {}


def _standing(flights: Mapping[int, Flight], one: Deviation) -> dict[str, tuple[int, ...]]:
    """Return in which call each rank of a cycle waits."""
    texts: dict[int, str] = {}
    for rank in sorted({*one.ranks, *one.others} & flights.keys()):
        call = next((call for call in flights[rank].calls if not is_over(call)), None)
        if call is not None:
            name = group_name(call.group, descriptions(flights[rank]).get(call.group, ""))
            texts[rank] = f"{signature(call)} of group {name}"
    return _by_text(texts) or {one.seen: one.ranks}


def _by_text(texts: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """Group the ranks by text, the larger group first."""
    sides: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        sides.setdefault(text, []).append(rank)
    return {text: tuple(ranks) for text, ranks in sorted(sides.items(), key=lambda side: (-len(side[1]), side[1]))}


def one_sided(window: Window, flights: Mapping[int, Flight]) -> Mismatch | None:
    """Return the mismatch that one side alone shows.

    A rank has aborted, and some rank is in a call that breaks its own pattern, while no other rank's copy is new enough to
    contain it.
    """
    aborted = {
        end.rank
        for end in window.processes.exits
        if signal.SIGABRT in {end.exited.signal, -(end.exited.exit_code or 0)}
    }
    for rank, flight in sorted(flights.items()) if aborted else ():
        call = next((call for call in flight.calls if not is_over(call) and not call.is_p2p), None)
        if call is None or len(calls_at(flights, call.group, call.sequence)) > 1:
            continue
        habit = _habit([one for one in flight.calls if one.group == call.group and not one.is_p2p], call)
        kind = _kind(habit, call) if habit is not None else None
        if habit is not None and kind is not None:
            lost = "it aborted there" if rank in aborted else f"{ranks_text(aborted)} aborted"
            return Mismatch(
                group=call.group,
                description=descriptions(flight).get(call.group, ""),
                sequence=call.sequence,
                operation=call.operation,
                kind=kind,
                sides={signature(call): (rank,)},
                ranks=(rank,),
                is_clear=False,
                why=f"at this place it had always called {signature(habit)}; {lost}, and no peer's record of this call is left",
            )
    return None


def _habit(calls: Sequence[Call], last: Call) -> Call | None:
    """Return the call that a rank's own pattern leads one to expect in place of this one; None if there is no pattern."""
    before = [call for call in calls if call.sequence < last.sequence]
    texts = [signature(call) for call in before]
    for period in range(1, len(before) // REPEATS + 1):
        num_equal = max((REPEATS - 1) * period, MIN_HISTORY - period)
        recent = range(len(texts) - num_equal, len(texts))
        if all(index >= period and texts[index] == texts[index - period] for index in recent):
            return before[-period]
    return None


def _kind(habit: Call, call: Call) -> str | None:
    """Return how a call differs from the expected one; None for another operation, which may be another part of the script."""
    if habit.operation != call.operation or signature(habit) == signature(call):
        return None
    return "dtype" if habit.dtypes != call.dtypes else "shape"
