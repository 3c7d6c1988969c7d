"""Where the wall time of a run went: how much of it made progress, and what the rest was spent on. `goodput.json` in the run directory.

    start   compile   progress   checkpoint   progress   hung   held   end  |  down  |  start   redone   progress   end
    └────────────────────────── a life ──────────────────────────────────┘          └────────── the next life ───────┘

Every second is in one part, so that the parts are the wall time. What is not known to be lost is progress.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

GOODPUT = "goodput.json"
"""Name of the file in the run directory."""
PARTS = {
    "progress": "steps that count: what is not known to have been lost",
    "start": "until every rank began its first step: processes, models, data sets",
    "compile": "what the first three steps took beyond the usual: compilers, caches, the first contact of the ranks",
    "data": "waiting for the data loader, on the rank that waited longest",
    "stragglers": "waiting for the rank that came last to collectives",
    "checkpoint": "saving, on the rank that took longest",
    "evaluation": "evaluating, on the rank that took longest",
    "held": "standing in a halt, the save included",
    "hung": "a rank stood still for longer than it may, or was dead, and the others waited",
    "redone": "steps that an earlier life had completed already",
    "end": "from the last step to the end of the last rank",
    "down": "between two lives",
}
"""The parts that the wall time is split into, each with a description for people."""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a run: from its start to a restart, or to the end."""

    started_ns: int
    """Start of the life, in nanoseconds since the epoch."""
    until_ns: int
    """End of the life, or the moment up to which it has been analysed, in nanoseconds since the epoch."""
    base_step: int = 0
    """Optimizer steps that the run had completed before this life began."""
    steps: int = 0
    """Optimizer steps that this life completed itself."""
    parts: dict[str, float] = {}
    """Seconds spent in each part; they add up to the time from `started_ns` to `until_ns`."""

    @property
    def wall_s(self) -> float:
        """Length of the life in seconds."""
        return (self.until_ns - self.started_ns) / 1e9


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Where the wall time of a whole run went, over all its lives."""

    schema: int = 1
    wall_s: float
    """Seconds from the start of the first life to the end of the last."""
    ratio: float | None
    """Share of the wall time that made progress, 0 to 1; None if no time has passed yet."""
    parts: dict[str, float]
    """Seconds spent in each part; every part of `PARTS` is present."""
    lives: list[Life]


def goodput(lives: Sequence[Life]) -> Goodput:
    """Add up the lives of a run, given oldest first; the gaps between them count as `down`."""
    parts = {name: sum(life.parts.get(name, 0.0) for life in lives) for name in PARTS}
    pauses = (later.started_ns - before.until_ns for before, later in pairwise(lives))
    parts["down"] += sum(max(0, pause) for pause in pauses) / 1e9
    wall_s = sum(parts.values())
    ratio = parts["progress"] / wall_s if wall_s > 0 else None
    return Goodput(wall_s=wall_s, ratio=ratio, parts=parts, lives=list(lives))


def in_words(found: Goodput, num_named: int = 3) -> str:
    """Describe it in a line: `81 % of 2 h 10 min made progress (data 9 %, checkpoint 4 %)`. Empty if no time passed."""
    if found.ratio is None:
        return ""
    lost = sorted(((s, name) for name, s in found.parts.items() if name != "progress"), reverse=True)
    named = [f"{name} {_percent(s / found.wall_s)}" for s, name in lost[:num_named] if s / found.wall_s >= SMALLEST]
    return f"{_percent(found.ratio)} of {_duration(found.wall_s)} made progress" + (
        f" ({', '.join(named)})" if named else ""
    )


SMALLEST = 0.005
"""Parts that take less than this share of the wall time are not mentioned in words."""
_HOUR_S, _MINUTE_S = 3600, 60


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole >= _HOUR_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
    return f"{whole // _MINUTE_S} min {whole % _MINUTE_S} s" if whole >= _MINUTE_S else f"{whole} s"
