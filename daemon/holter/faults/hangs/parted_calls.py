"""A run of calls whose digests differ between ranks: whether it proves a mismatch by itself, and in words."""

from collections.abc import Mapping

from holter.faults.shared.collectives import is_over
from holter.faults.shared.wording import ranks_text
from holter.faults.window import PartedBlock
from holter.flight import BLOCK_CALLS
from holter.records import Evidence, Flight

DEFAULT_GROUP = "default_pg"
"""Everyone belongs to it."""
TWO_SIDES = 2


def is_lost(parted: PartedBlock, flights: Mapping[int, Flight]) -> bool:
    """The digests are of one group for certain, and the calls behind them are no longer to be had."""
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
    """Whether a recorder reaches from before the run, or its beginning, to after it; calls that are not over are kept for longer."""
    held = [call.sequence for call in flight.calls if call.group == group and not call.is_p2p and is_over(call)]
    return bool(held) and min(held) <= max(run.start, 1) and max(held) >= run.stop


def block_text(parted: PartedBlock, group: str = "") -> str:
    """`Ranks 0 and 1 did not all call the same among the calls 448 to 511 of group 0`."""
    first = parted.block * BLOCK_CALLS
    told = sorted(rank for ranks in parted.digests.values() for rank in ranks)
    text = f"{ranks_text(told)} did not all call the same among the calls {first} to {first + BLOCK_CALLS - 1} of group {group or parted.group}"
    return text[:1].upper() + text[1:]


def block_evidence(parted: PartedBlock, group: str = "") -> Evidence:
    """Which ranks' digests differ."""
    first = parted.block * BLOCK_CALLS
    sides = " against ".join(ranks_text(ranks) for ranks in parted.digests.values())
    summary = (
        f"digests of the calls {first} to {first + BLOCK_CALLS - 1} of group {group or parted.group} differ: {sides}"
    )
    return Evidence(
        kind="digest", summary=summary, values={"sides": [list(ranks) for ranks in parted.digests.values()]}
    )
