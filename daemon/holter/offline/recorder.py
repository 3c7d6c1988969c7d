"""Turns the rows of one file, in the order in which they were written, into runs; each run is one training with one count of steps.

A log is not always one run from its first step to its last:
    steps go back to the beginning           another run begins; the one before is judged by itself
    steps go back, but not to the beginning  the run was resumed there; its rows after that step are dropped
    steps begin again with each epoch        the count goes on from one epoch to the next
    one row at the end of each epoch         epochs are counted, not their batches or samples
    no steps at all                          epochs are counted, or else the lines themselves
    several ranks in one file                each rank's rows are followed separately
"""

import math
from itertools import pairwise
from statistics import median

from holter.offline.found import LoggedRun, Series
from holter.offline.lines import LineContext, LogRow

MAX_NAMES = 600
MAX_RANKS = 64
MAX_RUNS = 64
MAX_EPOCHS = 20_000
JITTER = 3
"""Number of steps by which rows may be late if ranks write into one file without naming themselves."""
MIN_ROWS = 4
"""Number of rows below which steps that begin again are no second run."""


class _Track:
    """The state of reading one rank's rows; a kind of row is the set of its names."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self.last: dict[frozenset[str], int] = {}
        """Kind of row -> its last step."""
        self.first: dict[frozenset[str], int] = {}
        self.num: dict[frozenset[str], int] = {}
        self.interval: dict[frozenset[str], int] = {}
        """Kind of row -> number of steps between its last two."""
        self.highest = -1
        self.offset = 0
        self.epoch: float | None = None
        self.counted = 0
        self.counts: dict[frozenset[str], int] = {}
        self.num_resumed = 0
        self.epochs: dict[int, int] = {}
        """Epoch -> its first step."""


class RowRecorder:
    """Takes the rows of one file and returns its runs."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._done: list[LoggedRun] = []
        self._tracks: dict[int, _Track] = {}
        self._counted_by: set[str] = set()
        self._first_epoch: int | None = None
        """Number that this log gives its first epoch, 0 or 1; None if unknown."""
        self._epoch_ends: dict[int, int] | None = {}
        """Step -> epoch, as long as every row is the last of its epoch, except perhaps in the newest one; otherwise None."""
        self._has_open_end = False
        self.last_step = -1
        self.num_rows = 0
        self.ranks: set[int] = set()

    def add(self, row: LogRow, line: int, context: LineContext | None = None) -> None:
        """Add one row, which was read from this line."""
        if row.rank is not None:
            self.ranks.add(row.rank)
        rank = row.rank if row.rank is not None else 0
        if rank not in self._tracks and len(self._tracks) >= MAX_RANKS:
            return
        track = self._tracks.setdefault(rank, _Track())
        kind = frozenset(row.values)
        step = self._step(track, kind, row, context)
        if step is None:
            return
        self.num_rows += 1
        self.last_step = step
        # If another run has begun, the tracks were replaced.
        track = self._tracks.setdefault(rank, _Track())
        track.highest = max(track.highest, step)
        if row.epoch is not None and len(track.epochs) < MAX_EPOCHS:
            track.epochs.setdefault(int(row.epoch), step)
        for name, value in row.values.items():
            series = track.series.get(name)
            if series is None:
                if len(track.series) >= MAX_NAMES:
                    continue
                series = track.series[name] = Series()
            series.add(step, value, line)

    def _step(self, track: _Track, kind: frozenset[str], row: LogRow, context: LineContext | None) -> int | None:
        """Return the step of this row in its run, after beginning a new run if steps begin again; None if the row is to be left out."""
        if row.step is None:
            return self._uncounted(track, kind, row, context)
        self._counted_by.add("step")
        if row.within_epoch and row.total and row.epoch is not None:
            if self._first_epoch is None:
                self._first_epoch = min(1, int(row.epoch))
            step = max(0, int(row.epoch) - self._first_epoch) * row.total + row.step
            self._note_end(step, int(row.epoch), is_end=row.step >= row.total)
        else:
            self._epoch_ends = None
            step = row.step + track.offset
        last = track.last.get(kind)
        if row.rounded_to > 1 and last is not None:
            step = _unrounded(step, row.rounded_to, last, track.interval.get(kind, 1))
        elif last is not None and step > last:
            track.interval[kind] = step - last
        if last is not None and step < last:
            step = self._went_back(track, kind, row, step, last)
            track = self._tracks.get(row.rank if row.rank is not None else 0, track)
        track.last[kind] = (
            max(step, track.last.get(kind, step)) if step >= (track.last.get(kind, step) - JITTER) else step
        )
        track.first.setdefault(kind, step)
        track.num[kind] = track.num.get(kind, 0) + 1
        if row.epoch is not None:
            track.epoch = row.epoch
        return step

    def _note_end(self, step: int, epoch: int, *, is_end: bool) -> None:
        if self._epoch_ends is None:
            return
        newest = max(self._epoch_ends.values(), default=epoch)
        if epoch < newest or (epoch > newest and self._has_open_end) or len(self._epoch_ends) >= MAX_EPOCHS:
            self._epoch_ends = None
            return
        self._epoch_ends[step] = epoch
        self._has_open_end = not is_end

    def _went_back(self, track: _Track, kind: frozenset[str], row: LogRow, step: int, last: int) -> int:
        first, num = track.first[kind], track.num[kind]
        interval = max(1, (last - first) // max(1, num - 1))
        if last - step <= max(JITTER, JITTER * interval) and last - step < (last - first) / 2:
            return step
        is_next_epoch = row.epoch is not None and track.epoch is not None and int(row.epoch) > int(track.epoch)
        if is_next_epoch and not row.within_epoch:
            track.offset = track.highest
            return int(row.step or 0) + track.offset
        if step <= first + interval and num >= MIN_ROWS:
            self._close()
            return int(row.step or 0) if not row.within_epoch else step
        if num >= MIN_ROWS:
            for other in self._tracks.values():
                for series in other.series.values():
                    series.cut(step)
                other.last = {}
                other.highest = step
            track.num_resumed += 1
        return step

    def _uncounted(self, track: _Track, kind: frozenset[str], row: LogRow, context: LineContext | None) -> int | None:
        """Return the step of a row without one: from the progress bar before it, from its epoch, or by counting."""
        if context is not None and context.bar_step is not None and not context.bar_used:
            context.bar_used = True
            self._counted_by.add("step")
            track.last[kind] = context.bar_step
            return context.bar_step
        if (
            row.epoch is not None
            and float(row.epoch).is_integer()
            and (kind not in track.last or row.epoch > track.last[kind])
        ):
            self._counted_by.add("epoch")
            track.last[kind] = int(row.epoch)
            track.first.setdefault(kind, int(row.epoch))
            track.num[kind] = track.num.get(kind, 0) + 1
            track.epoch = row.epoch
            if track.counted == 0:
                self._epoch_ends = None
                return int(row.epoch)
        if (
            row.epoch is not None
            and track.epoch is not None
            and row.epoch < track.epoch - 0.5
            and row.epoch < 1.5  # noqa: PLR2004
            and self.num_rows >= MIN_ROWS
        ):
            self._close()
            track = self._tracks.setdefault(row.rank if row.rank is not None else 0, _Track())
        if "step" in self._counted_by and track.highest >= 0:
            return self._beside(track, kind)
        self._counted_by.add("log")
        track.epoch = row.epoch if row.epoch is not None else track.epoch
        is_held_out = any("eval" in name or "val" in name for name in kind)
        if not is_held_out:
            track.counts[kind] = track.counts.get(kind, 0) + 1
            track.counted = max(track.counted, track.counts[kind])
        elif not track.counted:
            track.counts[kind] = track.counts.get(kind, 0) + 1
            return track.counts[kind]
        return track.counted

    @staticmethod
    def _beside(track: _Track, kind: frozenset[str]) -> int:
        """Return the step of a row without one, among rows that count steps.

        It is the step that these have reached, or the next one if that step has a row of this kind already.
        """
        step = track.highest if track.last.get(kind, -1) < track.highest else track.last[kind] + 1
        track.last[kind] = step
        track.first.setdefault(kind, step)
        track.num[kind] = track.num.get(kind, 0) + 1
        return step

    def _close(self) -> None:
        """Make one run of the rows that were read so far, and begin another."""
        run = self._run()
        if run is not None and len(self._done) < MAX_RUNS:
            self._done.append(run)
        self._tracks = {}
        self._counted_by = set()
        self._first_epoch = None
        self._epoch_ends, self._has_open_end = {}, False

    def _run(self) -> LoggedRun | None:
        by_rank = {
            rank: track.series
            for rank, track in sorted(self._tracks.items())
            if any(len(one) for one in track.series.values())
        }
        if not by_rank:
            return None
        if self._epoch_ends and len(set(self._epoch_ends.values())) > 1:
            ends = sorted(self._epoch_ends)
            for series in by_rank.values():
                for one in series.values():
                    one.count_by(ends, [self._epoch_ends[step] for step in ends])
            self._counted_by = {"epoch"}
        counted = "step" if "step" in self._counted_by else "epoch" if self._counted_by == {"epoch"} else "log"
        resumed = max((track.num_resumed for track in self._tracks.values()), default=0)
        per_epoch = 1.0 if counted == "epoch" else max(map(_per_epoch, self._tracks.values()), default=0.0)
        return LoggedRun(self._file, by_rank, counted, len(self._done), resumed, per_epoch)

    def runs(self) -> list[LoggedRun]:
        """Return all runs; to be called after the whole file was read."""
        last = self._run()
        return [*self._done, *([last] if last is not None else [])]


def _per_epoch(track: _Track) -> float:
    begins = sorted(track.epochs.items())
    return median([(b - a) / (n - m) for (m, a), (n, b) in pairwise(begins)] or [0.0])


def _unrounded(step: int, unit: int, last: int, interval: int) -> int:
    """Return the exact step of a rounded one: `1K` after 800 is 1,000 if logs are 200 apart, and the next `1K` is 1,200."""
    expected = last + interval
    return expected if abs(expected - step) <= unit else max(step, last + 1)


def add_values(recorder: RowRecorder, values: dict[str, object], line: int, *, step: int | None = None) -> None:
    """Add a row of a table as values by column name; values that are no numbers are left out."""
    from holter.offline import naming  # noqa: PLC0415 - the only user here

    row = LogRow({}, step=step)
    for name, value in values.items():
        known = as_number(value)
        if known is None:
            continue
        tidy = naming.tidy(str(name))
        if naming.is_step(tidy):
            if row.step is None and math.isfinite(known):
                row.step = int(known)
        elif naming.is_epoch(tidy):
            row.epoch = known if math.isfinite(known) else None
        elif tidy:
            row.values[tidy] = known
    if row.values:
        recorder.add(row, line)


def as_number(value: object) -> float | None:
    """Convert a number or a text to a float; return None if it is no number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, str):
        try:
            return float(value.strip().replace(",", "")) if len(value) < 400 and value.strip() else None  # noqa: PLR2004 - no number is longer
        except ValueError:
            return None
    return None
