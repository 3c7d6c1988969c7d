"""Disjoint groups that have one name, told apart by their members for as long as the ranks' calls are laid side by side.

    7: ranks 0,1      7: ranks 2,3        ->        7 of 0: ranks 0,1      7 of 2: ranks 2,3        ->        7, 7

Where groups of one name share a rank, a number would mean two calls of it: such names are left as they are.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

import msgspec

from holter.flight.verdicts import Analysis
from holter.records import Flight

Names = dict[str, str]
"""As they are told apart -> as the recorders have them."""


def told_apart(flights: Mapping[int, Flight]) -> tuple[Mapping[int, Flight], Names]:
    """The same flights if all names are of one group each."""
    said: dict[str, set[tuple[int, ...]]] = {}
    for flight in flights.values():
        for group in flight.groups:
            if group.ranks:
                said.setdefault(group.name, set()).add(group.ranks)
    shared = {name: groups for name, groups in said.items() if len(groups) > 1 and _are_disjoint(groups)}
    if not shared:
        return flights, {}
    names: Names = {}
    of_rank: dict[int, dict[str, str]] = {}
    for name, groups in shared.items():
        for members in groups:
            apart = f"{name} of {min(members)}"
            names[apart] = name
            for rank in members:
                of_rank.setdefault(rank, {})[name] = apart
    return {
        rank: _renamed(flight, of_rank[rank]) if rank in of_rank else flight for rank, flight in flights.items()
    }, names


def named_as_before(analysis: Analysis, names: Names) -> Analysis:
    """What was found, with the names that the recorders have."""
    if not names:
        return analysis
    matched: dict[str, int] = {}
    for group, last in analysis.matched.items():
        name = names.get(group, group)
        matched[name] = min(last, matched.get(name, last))
    return replace(
        analysis,
        matched=matched,
        waits=tuple(replace(one, group=names.get(one.group, one.group)) for one in analysis.waits),
        deviations=tuple(replace(one, group=names.get(one.group, one.group)) for one in analysis.deviations),
        blocking=analysis.blocking
        and replace(analysis.blocking, group=names.get(analysis.blocking.group, analysis.blocking.group)),
    )


def _are_disjoint(groups: set[tuple[int, ...]]) -> bool:
    return all(set(one).isdisjoint(other) for one, other in combinations(groups, 2))


def _renamed(flight: Flight, names: dict[str, str]) -> Flight:
    return Flight(
        groups=[msgspec.structs.replace(group, name=names.get(group.name, group.name)) for group in flight.groups],
        calls=[
            msgspec.structs.replace(call, group=names[call.group]) if call.group in names else call
            for call in flight.calls
        ],
        taken_ns=flight.taken_ns,
    )
