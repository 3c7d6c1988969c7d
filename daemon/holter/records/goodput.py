"""Where the wall time of a run went: how much of it made progress, and what the rest was spent on. `goodput.json` in the run directory.

    start   compile   progress   checkpoint   progress   hung   held   end  |  down  |  start   redone   progress   end
    └────────────────────────── a life ──────────────────────────────────┘          └────────── the next life ───────┘

Every second is in one part, so that the parts are the wall time. What is not known to be lost is progress.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

GOODPUT = "goodput.json"
"""In the run directory."""
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
"""Each part, and what is in it."""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a run: from its start to a restart, or to the end."""

    started_ns: int
    """Since the epoch."""
    until_ns: int
    """Its end, or how far it was looked at."""
    base_step: int = 0
    """Optimizer steps that were completed before it."""
    steps: int = 0
    """That it completed itself."""
    parts: dict[str, float] = {}
    """Part -> seconds; together from `started_ns` to `until_ns`."""

    @property
    def wall_s(self) -> float:
        """How long it has lasted."""
        return (self.until_ns - self.started_ns) / 1e9


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """All lives together."""

    schema: int = 1
    wall_s: float
    """From the start of the first life to the end of the last."""
    ratio: float | None
    """Share of it that made progress; None: nothing has happened yet."""
    parts: dict[str, float]
    """Part -> seconds, every part."""
    lives: list[Life]


def goodput(lives: Sequence[Life]) -> Goodput:
    """Over all lives, oldest first."""
    parts = {name: sum(life.parts.get(name, 0.0) for life in lives) for name in PARTS}
    pauses = (later.started_ns - before.until_ns for before, later in pairwise(lives))
    parts["down"] += sum(max(0, pause) for pause in pauses) / 1e9
    wall_s = sum(parts.values())
    ratio = parts["progress"] / wall_s if wall_s > 0 else None
    return Goodput(wall_s=wall_s, ratio=ratio, parts=parts, lives=list(lives))


def in_words(found: Goodput, num_named: int = 3) -> str:
    """`81 % of 2 h 10 min made progress (data 9 %, checkpoint 4 %, start 3 %)`; empty: nothing has happened yet."""
    if found.ratio is None:
        return ""
    lost = sorted(((s, name) for name, s in found.parts.items() if name != "progress"), reverse=True)
    named = [f"{name} {_percent(s / found.wall_s)}" for s, name in lost[:num_named] if s / found.wall_s >= SMALLEST]
    return f"{_percent(found.ratio)} of {_duration(found.wall_s)} made progress" + (
        f" ({', '.join(named)})" if named else ""
    )


SMALLEST = 0.005
"""Share below which a part is not named."""
_HOUR_S, _MINUTE_S = 3600, 60


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole >= _HOUR_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
    return f"{whole // _MINUTE_S} min {whole % _MINUTE_S} s" if whole >= _MINUTE_S else f"{whole} s"
