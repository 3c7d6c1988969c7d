"""The run as the page draws it: of every rank a few small whole numbers, and of two pictures what changed. Pure.

    columns   {"state": [1, 1, 3, ..], "phase": [2, 2, -1, ..], ..}    one entry a rank, so that 16,000 ranks stay cheap
    changed   {"phase": {"at": [1], "to": [3]}}                        few ranks
              {"phase": [2, 3, -1, ..]}                                many

A number is rounded to what can be seen: a step time that changes in its third digit changes nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holter.coordinator.http.timeline import Happening
from holter.coordinator.roster import Member, Roster
from holter.faults.hangs.endings import kind_of
from holter.faults.window import RankExit, Spread, StepArrivals, StepNumbers

STATES = ("absent", "running", "ended", "died", "gone", "silent")
"""What the numbers of the column `state` mean."""
COLUMNS = ("state", "blame", "phase", "behind", "lag", "pace", "since", "host")
"""`blame` 1: an open warning names the rank, 2: a critical incident does. `behind`: steps behind the foremost. `lag`, `pace`: milliseconds.
`since`: when it last moved, in seconds since the epoch; 0: a moment ago. `host`: a place in the list of hosts. -1: not known."""
SERIES = ("loss", "gradient_norm", "seconds")
LAG = "lag"
MAX_RANKS = 65_536
"""Shown; a job says itself how many it has."""
MAX_ROWS = 400
"""Of one series in a picture: neighbours are joined, and their extremes stay."""
MOVING_NS = 5 * 10**9
"""Who moved within this time moves."""
SPARSE = 3
"""A changed rank costs so many times what it costs in a list of all."""

Columns = dict[str, list[int]]
Row = list[Any]
"""[step, mean, low, high, rank of the low, rank of the high, how many were not finite]"""


@dataclass(frozen=True)
class Picture:
    """Everything that is shown, at one moment."""

    now_ms: int
    facts: Mapping[str, Any]
    """Name -> what is sent whole whenever it changes."""
    columns: Columns
    numbers: tuple[StepNumbers, ...]
    arrivals: tuple[StepArrivals, ...]
    happenings: tuple[Happening, ...]

    def whole(self) -> dict[str, Any]:
        """For who sees it first."""
        return {
            "now": self.now_ms,
            **self.facts,
            "columns": self.columns,
            "series": {name: joined(rows) for name, rows in self._series().items()},
            "timeline": self.happenings,
        }

    def since(self, before: "Picture") -> dict[str, Any]:
        """For who saw the one before; empty if nothing but the time changed."""
        found = {name: fact for name, fact in self.facts.items() if fact != before.facts.get(name)}
        if columns := _changed(before.columns, self.columns):
            found["columns"] = columns
        found |= self._series_since(before)
        last = before.happenings[-1].number if before.happenings else 0
        if fresh := [one for one in self.happenings if one.number > last]:
            found["happened"] = fresh
        return {"now": self.now_ms, **found} if found else {}

    def _series_since(self, before: "Picture") -> dict[str, Any]:
        if self.numbers is before.numbers and self.arrivals is before.arrivals:
            return {}
        if _last(self.numbers) < _last(before.numbers) or _last(self.arrivals) < _last(before.arrivals):
            # Ranks began again at an earlier step: what was drawn did not happen.
            return {"series": {name: joined(rows) for name, rows in self._series().items()}}
        rows = self._series(_last(before.numbers), _last(before.arrivals))
        return {"more": more} if (more := {name: joined(new) for name, new in rows.items() if new}) else {}

    def _series(self, after: int = -1, after_arrival: int = -1) -> dict[str, list[Row]]:
        fresh = _after(self.numbers, after)
        found = {
            name: [_row(entry.step, entry.numbers[name]) for entry in fresh if name in entry.numbers] for name in SERIES
        }
        return found | {LAG: [_lag_row(one) for one in _after(self.arrivals, after_arrival)]}


def columns(roster: Roster, blamed: Mapping[int, int], now_ns: int) -> tuple[Columns, list[str]]:
    """Of every rank of the job, and the names of the hosts."""
    members = roster.members
    num = min(max(roster.world_size, max(members, default=-1) + 1), MAX_RANKS)
    front = max((member.progress.step for member in members.values() if member.progress.step is not None), default=0)
    made: Columns = {name: [-1] * num for name in COLUMNS}
    made["state"] = [0] * num
    made["blame"] = [blamed.get(rank, 0) for rank in range(num)]
    made["since"] = [0] * num
    hosts: dict[str, int] = {}
    for rank in sorted(members):
        if rank < num:
            _enter(made, rank, members[rank], front, now_ns)
            made["host"][rank] = hosts.setdefault(members[rank].hello.host, len(hosts))
    return made, list(hosts)


def joined(rows: Sequence[Row], limit: int = MAX_ROWS) -> list[Row]:
    """At most so many: of neighbours the last step, the mean of their means, and their extremes with the ranks that had them."""
    if len(rows) <= limit:
        return list(rows)
    width = math.ceil(len(rows) / limit)
    return [_join(rows[begin : begin + width]) for begin in range(0, len(rows), width)]


def rounded(value: float) -> int:
    """A whole number with two digits that tell."""
    if not math.isfinite(value) or value < 0:
        return -1
    if value < 100:  # noqa: PLR2004 - two digits
        return round(value)
    unit = int(10 ** (len(str(int(value))) - 2))
    return round(value / unit) * unit


def _enter(made: Columns, rank: int, member: Member, front: int, now_ns: int) -> None:
    made["state"][rank] = _state(member)
    if member.progress.phase is not None:
        made["phase"][rank] = int(member.progress.phase)
    if member.progress.step is not None:
        made["behind"][rank] = front - member.progress.step
    if member.numbers.lag_s is not None:
        made["lag"][rank] = rounded(member.numbers.lag_s * 1e3)
    if member.numbers.step_s is not None:
        made["pace"][rank] = rounded(member.numbers.step_s * 1e3)
    moved_ns = member.progress.moved_ns
    if moved_ns is not None and now_ns - moved_ns > MOVING_NS:
        made["since"][rank] = moved_ns // 10**9


def _state(member: Member) -> int:
    if member.exited is not None:
        is_ordinary = kind_of(RankExit(member.hello.rank, 0, member.exited)) == "ordinary"
        return STATES.index("ended" if is_ordinary else "died")
    state = member.state
    return STATES.index("running" if state == "connected" else state)


def _changed(before: Columns, after: Columns) -> dict[str, Any]:
    return {
        name: _difference(before.get(name, []), column)
        for name, column in after.items()
        if column != before.get(name, [])
    }


def _difference(before: list[int], after: list[int]) -> Any:
    if len(before) != len(after):
        return after
    at = [place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    return after if len(at) * SPARSE >= len(after) else {"at": at, "to": [after[place] for place in at]}


def _last(entries: Sequence[StepNumbers] | Sequence[StepArrivals]) -> int:
    return entries[-1].step if entries else -1


def _after(entries: Sequence[Any], step: int) -> list[Any]:
    """Those of later steps; they ascend."""
    fresh = []
    for entry in reversed(entries):
        if entry.step <= step:
            break
        fresh.append(entry)
    return fresh[::-1]


def _row(step: int, spread: Spread) -> Row:
    return [
        step,
        _short(spread.mean),
        _short(spread.low),
        _short(spread.high),
        spread.low_rank,
        spread.high_rank,
        spread.num_nonfinite,
    ]


def _lag_row(arrivals: StepArrivals) -> Row:
    """What is usual, and who came last."""
    usual_s, latest = arrivals.usual_s or arrivals.spread_s, arrivals.latest[:1]
    late_s, rank = (latest[0].lag_s, latest[0].rank) if latest else (usual_s, -1)
    return [arrivals.step, _short(usual_s), 0.0, _short(max(late_s, 0.0)), -1, rank, 0]


def _join(rows: Sequence[Row]) -> Row:
    means = [row[1] for row in rows if row[1] is not None]
    low = min((row for row in rows if row[2] is not None), key=lambda row: row[2], default=rows[-1])
    high = max((row for row in rows if row[3] is not None), key=lambda row: row[3], default=rows[-1])
    mean = _short(math.fsum(means) / len(means)) if means else None
    return [rows[-1][0], mean, low[2], high[3], low[4], high[5], sum(row[6] for row in rows)]


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
