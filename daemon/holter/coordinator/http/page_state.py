"""The content of the page: a few small integers for each rank, and the changes from one picture to the next.

    columns   {"state": [1, 1, 3, ..], "phase": [2, 2, -1, ..], ..}    one entry for each rank, so that 16,000 ranks stay cheap
    changed   {"phase": {"at": [1], "to": [3]}}                        few ranks
              {"phase": [2, 3, -1, ..]}                                many

A number is rounded to what can be seen: a step time that changes in its third digit changes nothing. `PageState` makes
the pictures, and keeps what is too expensive to make anew each time.
"""

import contextlib
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from holter.clock import rfc3339
from holter.coordinator.http.status import about, halt, headline
from holter.coordinator.http.timeline import Happening, Timeline
from holter.coordinator.judge import cause_of
from holter.coordinator.roster import Member, Roster
from holter.coordinator.run import Run
from holter.diagnosis import report
from holter.faults.hangs.endings import kind_of
from holter.faults.window import RankExit, Spread, StepArrivals, StepNumbers
from holter.halting.vault.store import FOLDER, SEALED, Sealed, Vault
from holter.records import Diagnosis
from holter.records.goodput import Goodput, in_words
from holter.redaction import without_secrets

STATES = ("absent", "running", "ended", "died", "gone", "silent")
"""Names of the numbers in the column `state`."""
COLUMNS = ("state", "blame", "phase", "behind", "lag", "pace", "since", "host")
"""The columns. `blame` 1: an open warning names the rank, 2: a critical incident does. `behind`: steps behind the
foremost rank. `lag`, `pace`: milliseconds. `since`: when it last moved, in seconds since the epoch; 0: a moment ago.
`host`: index into the list of hosts. -1: not known."""
SERIES = ("loss", "gradient_norm", "seconds")
LAG = "lag"
MAX_RANKS = 65_536
"""Largest number of ranks that are shown; the job's own number is shown beside."""
MAX_ROWS = 400
"""Largest number of rows of one series in a picture: neighbours are joined, and their extremes stay."""
MOVING_NS = 5 * 10**9
"""Nanoseconds for which a rank counts as moving after it moved."""
SPARSE = 3
"""Cost of sending one changed rank, in entries of a whole column."""
Columns = dict[str, list[int]]
Row = list[Any]
"""[step, mean, low, high, rank of the low, rank of the high, how many were not finite]"""
ABOUT = ("run_id", "run_dir", "coordinator", "started_at", "world_size", "action", "findings", "blind", "warnings")
"""Fields of `/api/v1/status` that the page shows."""
MAX_LINES = 16
"""Largest number of findings, and of sentences on blindness, that are sent; the rest are counted."""
MAX_COMMAND = 400
"""Largest number of characters shown of the command."""
MAX_NAMED = 64
"""Largest number of ranks in a card."""
MAX_CARDS, MAX_CHECKPOINTS = 100, 64
LOOK_NS = 3 * 10**9
"""Nanoseconds between two looks at what is expensive to look at: the disk, and all ranks."""
CALLED_OFF_NS = 10 * 60 * 10**9
"""Nanoseconds for which it is shown that a halt was called off and the run went on."""
BLAME = {"info": 0, "warning": 1, "critical": 2}


@dataclass(frozen=True)
class Picture:
    """Everything that is shown, at one moment."""

    now_ms: int
    facts: Mapping[str, Any]
    """Facts by name, each of which is sent completely whenever it changes."""
    columns: Columns
    numbers: tuple[StepNumbers, ...]
    arrivals: tuple[StepArrivals, ...]
    happenings: tuple[Happening, ...]

    def whole(self) -> dict[str, Any]:
        """Return everything, for a reader who has seen nothing yet."""
        return {
            "now": self.now_ms,
            **self.facts,
            "columns": self.columns,
            "series": self.joined_series(),
            "timeline": self.happenings,
        }

    def since(self, before: "Picture") -> dict[str, Any]:
        """Return what changed since an earlier picture; empty if nothing but the time changed."""
        found = {name: fact for name, fact in self.facts.items() if fact != before.facts.get(name)}
        if columns := _changed(before.columns, self.columns):
            found["columns"] = columns
        found |= self._series_since(before)
        last = before.happenings[-1].number if before.happenings else 0
        if fresh := [one for one in self.happenings if one.number > last]:
            found["happened"] = fresh
        return {"now": self.now_ms, **found} if found else {}

    def joined_series(self) -> dict[str, list[Row]]:
        """Return the series as they are drawn."""
        return {name: joined(rows) for name, rows in self._series().items()}

    def _series_since(self, before: "Picture") -> dict[str, Any]:
        if self.numbers is before.numbers and self.arrivals is before.arrivals:
            return {}
        if _last(self.numbers) < _last(before.numbers) or _last(self.arrivals) < _last(before.arrivals):
            # Ranks started again at an earlier step: what was drawn for later ones is no longer true.
            return {"series": self.joined_series()}
        rows = self._series(_last(before.numbers), _last(before.arrivals))
        return {"more": more} if (more := {name: joined(new) for name, new in rows.items() if new}) else {}

    def _series(self, after: int = -1, after_arrival: int = -1) -> dict[str, list[Row]]:
        fresh = _after(self.numbers, after)
        found = {
            name: [_row(entry.step, entry.numbers[name]) for entry in fresh if name in entry.numbers] for name in SERIES
        }
        return found | {LAG: [_lag_row(one) for one in _after(self.arrivals, after_arrival)]}


def rank_columns(roster: Roster, blamed: Mapping[int, int], now_ns: int) -> tuple[Columns, list[str]]:
    """Return the columns of every rank of the job, and the names of the hosts."""
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
    """Reduce rows to at most `limit`.

    Neighbours are joined into their last step, the mean of their means, and their extremes with the ranks that had
    them.
    """
    if len(rows) <= limit:
        return list(rows)
    width = math.ceil(len(rows) / limit)
    return [_join(rows[begin : begin + width]) for begin in range(0, len(rows), width)]


def rounded(value: float) -> int:
    """Round to a whole number with two significant digits; -1 if it is negative or not finite."""
    if not math.isfinite(value) or value < 0:
        return -1
    if value < 100:  # noqa: PLR2004 - two digits
        return round(value)
    unit = int(10 ** (len(str(int(value))) - 2))
    return round(value / unit) * unit


class PageState:
    """Makes the pictures of one run for all readers."""

    def __init__(self, run: Run, now_ns: Callable[[], int], *, record: Mapping[str, Any] | None = None) -> None:
        self.timeline = Timeline()
        self._run = run
        self.now_ns = now_ns
        self.other: Mapping[str, Any] = {}
        """Name and series of a run that this one is compared with."""
        self._record = record
        """For a run that is over: when it ended, and by which halt; None if it is live."""
        self._cards: dict[str, tuple[Diagnosis, dict[str, Any]]] = {}
        self._sealed: tuple[Sealed, ...] = ()
        self._seen: tuple[tuple[str, int], ...] = ()
        """Names and times of the sealed checkpoints that were read."""
        self._looked_ns = 0
        self._halt: tuple[Mapping[str, Any] | None, int] = (None, 0)
        """What was last said of a halt, and since when."""

    def look(self) -> None:
        """Add what is new to the timeline; called after each judgement."""
        run, now_ns = self._run, self.now_ns()
        self.timeline.look_at_findings(run.judging.findings, now_ns)
        self.timeline.look_at_incidents(run.incidents.all())
        self.timeline.look_at_saves(run.checkpoints.all(), self._sealed, now_ns)
        if now_ns - self._looked_ns > LOOK_NS:
            self._looked_ns = now_ns
            self._look_at_halt(halt(run), now_ns)
            run.disk.submit(self.read_vault)

    def paint(self) -> Picture:
        """Return the run as of now."""
        run, now_ns = self._run, self.now_ns()
        diagnoses = run.incidents.all()
        columns, hosts = rank_columns(run.roster, _blamed(diagnoses), now_ns)
        return Picture(
            now_ms=now_ns // 10**6,
            facts={
                "about": self._about(now_ns),
                "goodput": shown_goodput(run.intake.wall_time.goodput(now_ns)),
                "hosts": hosts,
                "incidents": [self._card(one) for one in diagnoses[-MAX_CARDS:]],
                "checkpoints": self._checkpoints(),
                "other": self.other,
            },
            columns=columns,
            numbers=run.assembly.series(),
            arrivals=run.assembly.arrivals(),
            happenings=self.timeline.all(),
        )

    def read_vault(self) -> None:
        """Read the sealed checkpoints. It runs in the disk's thread: manifests name every tensor, and a file server may hang."""
        folder = self._run.settings.run_dir / FOLDER
        with contextlib.suppress(OSError):
            found = (path for path in folder.iterdir() if SEALED.fullmatch(path.name))
            seen = tuple(sorted((path.name, path.stat().st_mtime_ns) for path in found))
            if seen != self._seen:
                self._sealed, self._seen = tuple(Vault(self._run.settings.run_dir).all()), seen

    def _about(self, now_ns: int) -> dict[str, Any]:
        known = about(self._run, now_ns)
        shown = {name: known[name] for name in ABOUT if name in known}
        shown["halt"] = self._look_at_halt(known["halt"], now_ns)
        for name in ("findings", "blind"):
            if (more := len(shown[name]) - MAX_LINES) > 0:
                shown[name] = shown[name][:MAX_LINES]
                shown[f"{name}_left_out"] = more
        front = (
            member.progress.step for member in self._run.roster.members.values() if member.progress.step is not None
        )
        command = self._run.intake.introductions.record().command
        shown["command"] = " ".join(without_secrets(command))[:MAX_COMMAND]
        shown |= {"step": max(front, default=None), "num_ranks": len(self._run.roster.members), "is_live": True}
        return shown if self._record is None else shown | {"is_live": False} | dict(self._record)

    def _look_at_halt(self, told: Mapping[str, Any] | None, now_ns: int) -> Mapping[str, Any] | None:
        """Return the halt as the page shows it, with the time since when it is so; None if it is no longer news."""
        self.timeline.look_at_halt(told, now_ns)
        if told != self._halt[0]:
            self._halt = told, now_ns
        since_ns = self._halt[1]
        if told is None or (told["outcome"] == "called_off" and now_ns - since_ns > CALLED_OFF_NS):
            return None
        return {**told, "since": rfc3339(since_ns)}

    def _card(self, diagnosis: Diagnosis) -> dict[str, Any]:
        """Return an incident in a few lines; the same object as long as the diagnosis is the same."""
        known = self._cards.get(diagnosis.id)
        if known is None or known[0] is not diagnosis:
            known = self._cards[diagnosis.id] = (diagnosis, _card(diagnosis))
        return known[1]

    def _checkpoints(self) -> list[dict[str, Any]]:
        """Return the checkpoints, newest first."""
        book, run_dir = self._run.checkpoints, self._run.settings.run_dir
        own = [
            {
                "step": save.step,
                "path": save.path,
                "by": save.framework or "script",
                "at": save.saved_at,
                "verdict": save.verdict,
                "why": save.why,
                "incident": save.incident,
                "is_gone": book.is_gone(save),
            }
            for save in book.all()
        ]
        found = sorted(
            (*own, *(_sealed_entry(one, run_dir) for one in self._sealed)), key=lambda one: (one["at"], one["step"])
        )
        return found[: -MAX_CHECKPOINTS - 1 : -1]


def shown_goodput(found: Goodput) -> dict[str, Any]:
    """Return goodput in thousandths, so that a picture changes only when something visible does."""
    shares = {name: round(1000 * s / found.wall_s) for name, s in found.parts.items()} if found.wall_s > 0 else {}
    return {
        "words": in_words(found),
        "parts": {name: share for name, share in shares.items() if share},
        "num_lives": len(found.lives),
    }


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
    """Return the entries of later steps; the steps ascend."""
    return list(entries[bisect_right(entries, step, key=lambda entry: entry.step) :])


def _row(step: int, spread: Spread) -> Row:
    numbers = map(_short, (spread.mean, spread.low, spread.high))
    return [step, *numbers, spread.low_rank, spread.high_rank, spread.num_nonfinite]


def _lag_row(arrivals: StepArrivals) -> Row:
    """Return the usual lag, and the rank that came last."""
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


def _blamed(diagnoses: list[Diagnosis]) -> dict[int, int]:
    """Return for each rank the worst severity of an open incident whose leading cause names it."""
    found: dict[int, int] = {}
    for diagnosis in diagnoses:
        if diagnosis.closed_at is None and diagnosis.causes:
            for rank in diagnosis.causes[0].ranks:
                found[rank] = max(found.get(rank, 0), BLAME[diagnosis.severity])
    return found


def _card(diagnosis: Diagnosis) -> dict[str, Any]:
    leading = diagnosis.causes[0] if diagnosis.causes else None
    return headline(diagnosis) | {
        "line": report.headline(diagnosis) if leading else cause_of(diagnosis),
        "confidence": leading.confidence if leading else 0.0,
        "ranks": list(leading.ranks[:MAX_NAMED]) if leading else [],
        "do": leading.fix.do if leading else "",
        "directive": diagnosis.action.directive,
        # A reader that has the whole of it open fetches it again when this changes.
        "size": len(msgspec.json.encode(diagnosis)),
    }


def _sealed_entry(sealed: Sealed, run_dir: Path) -> dict[str, Any]:
    state = sealed.state
    return {
        "step": sealed.manifest.step,
        "path": str(state.relative_to(run_dir) if state.is_relative_to(run_dir) else state),
        "by": "halt",
        "at": sealed.manifest.sealed_at,
        "verdict": sealed.verdict,
        "why": sealed.why,
        "incident": "",
        "is_gone": False,
    }
