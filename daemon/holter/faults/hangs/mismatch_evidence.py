"""A mismatch in a sentence, and what proves it: the call, why these ranks, what else differs, and both sides' last calls."""

from collections.abc import Iterator, Mapping
from typing import Any

from holter.faults.shared.collectives import group_name, last_calls
from holter.faults.shared.mismatched_calls import KINDS, Mismatch, calls_at
from holter.faults.shared.wording import listed, ranks_text
from holter.flight import Analysis
from holter.records import Call, Evidence, Flight

MAX_MORE = 3
"""Further deviations with a line of evidence of their own."""
SHOWN_OF_A_SIDE = 2
"""Ranks of each side whose last calls are shown."""


def summary(seen: Mismatch, *, is_running: bool) -> str:
    """One sentence; a second one if the job goes on."""
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
    text = text[:1].upper() + text[1:]
    return f"{text}. Nothing failed: the job goes on, with wrong numbers." if is_running else f"{text}."


def evidence(seen: Mismatch, analysis: Analysis | None, flights: Mapping[int, Flight]) -> Iterator[Evidence]:
    """The call, why these ranks, up to where all went well, what else differs, and both sides' last calls."""
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
