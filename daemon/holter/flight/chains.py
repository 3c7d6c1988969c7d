"""Follows waits to their end: a rank that others wait for and that itself waits is a victim of what it waits for.

    tensor parallel group:  ranks 0,1 wait for 2,3      data parallel group:  ranks 2,3 wait for 7      the end is rank 7

Ranks that wait for each other in a circle will wait for ever, whoever else they wait for.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holter.flight.waits import Standing


@dataclass(frozen=True)
class Circle:
    """Ranks that wait for each other, and the standings in which they do."""

    ranks: tuple[int, ...]
    standings: tuple[Standing, ...]


def ends(standings: Sequence[Standing], excused: Collection[int]) -> set[int]:
    """Ranks that are awaited and wait for nobody; not those for whom only ranks wait that took a wrong way themselves."""
    waiting = {rank for standing in standings for rank in standing.waiting}
    awaited = {
        rank
        for standing in standings
        if any(waiter not in excused for waiter in standing.waiting)
        for rank in standing.awaited
    }
    return awaited - waiting


def is_led(start: int, end: int, standings: Sequence[Standing]) -> bool:
    """Whether one rank waits for another, directly or through others."""
    seen = {start}
    todo = list(standings)
    while True:
        passed = [standing for standing in todo if not seen.isdisjoint(standing.waiting)]
        if not passed or end in seen:
            return end in seen
        todo = [standing for standing in todo if seen.isdisjoint(standing.waiting)]
        seen.update(rank for standing in passed for rank in standing.awaited)


def circles(standings: Sequence[Standing]) -> list[Circle]:
    """A wait is a node between those who wait and those who are awaited: this costs what the standings hold, not pairs of ranks."""
    edges: dict[int, list[int]] = defaultdict(list)
    for index, standing in enumerate(standings):
        edges[~index] = list(standing.awaited)
        for rank in standing.waiting:
            edges[rank].append(~index)
    for rank in {rank for standing in standings for rank in standing.awaited}:
        edges.setdefault(rank, [])
    found = []
    for nodes in _strong_parts(edges):
        ranks = tuple(sorted(node for node in nodes if node >= 0))
        if len(ranks) > 1:
            found.append(Circle(ranks, tuple(standings[~node] for node in sorted(nodes, reverse=True) if node < 0)))
    return found


def _strong_parts(edges: dict[int, list[int]]) -> list[list[int]]:
    """Nodes that can reach each other (Tarjan, without recursion: a chain may be as long as the job has ranks)."""
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    parts: list[list[int]] = []
    for root, first in edges.items():
        path = [] if root in order else [(root, iter(first))]
        while path:
            node, ahead = path[-1]
            if node not in order:
                order[node] = lowest[node] = len(order)
                stack.append(node)
                on_stack.add(node)
            for to in ahead:
                if to not in order:
                    path.append((to, iter(edges[to])))
                    break
                if to in on_stack:
                    lowest[node] = min(lowest[node], order[to])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[node])
                if lowest[node] == order[node]:
                    cut = stack.index(node) if stack[-1] != node else len(stack) - 1
                    parts.append(stack[cut:])
                    on_stack.difference_update(stack[cut:])
                    del stack[cut:]
    return parts
