"""Keeps what ranks report rarely (`Rare`) as it was reported, a bounded number of each kind. Pure.

    Vitals, Inspection, Skipped, Swapped, Modes, Hoard,
    Overlap, Labels, Routing, GradientScales, Loaded, StageTimes,
    Device, DeviceEvent, Rollout                          the newest
    ScriptWarning                                         of each text the first few ranks that were shown it
    Feed                                                  of each rank and loader: the first beginning and end,
                                                          the latest beginning, the latest two ends

Notes are ordered by step, rank and the rank's own order, which no interleaving changes.
"""

import heapq
from collections import deque
from collections.abc import Iterator

import msgspec

from holter.faults.window import Note
from holter.records import (
    Device,
    DeviceEvent,
    Feed,
    GradientScales,
    Hoard,
    Inspection,
    Labels,
    Loaded,
    Modes,
    Overlap,
    Rare,
    Rollout,
    Routing,
    ScriptWarning,
    Skipped,
    StageTimes,
    Swapped,
    Vitals,
)

NEWEST: dict[type[Rare], int] = {
    Vitals: 2048,
    Inspection: 128,
    Skipped: 1024,
    Swapped: 256,
    Modes: 1024,
    Hoard: 256,
    Rollout: 1024,
    Routing: 4096,
    GradientScales: 64,
    Loaded: 4096,
    StageTimes: 4096,
    Overlap: 1024,
    Labels: 4096,
    Device: 4096,
    DeviceEvent: 4096,
}
"""Largest number of notes kept of each kind."""
MAX_TEXTS, MAX_TELLERS = 256, 8
"""Largest number of different warnings, and of ranks kept of each."""
MAX_FEEDS = 65_536
"""Largest number of loaders kept of all ranks together."""
MIN_LOADERS, MAX_LOADERS = 2, 16
"""Number of loaders kept of one rank, depending on the number of ranks. One that trained is dropped last."""

MAX_RECENT = 64
"""Number of a rank's notes by which repetitions are recognised: after a broken connection, the last seconds are sent
again."""

NotePlace = tuple[int, int, int]
"""(step, rank, number of the note among those of the rank)."""
PlacedNote = tuple[NotePlace, Note]


class RareNotes:
    """All notes of a run that are kept."""

    def __init__(self) -> None:
        self._num_said: dict[int, int] = {}
        self._recent: dict[int, deque[int]] = {}
        """For each rank, hashes of its newest notes."""
        self._tellers: set[int] = set()
        """Ranks that reported something other than Feed."""
        self._newest: dict[type[Rare], list[PlacedNote]] = {kind: [] for kind in NEWEST}
        """Notes of each kind as heaps, the oldest first."""
        self._warnings: dict[tuple[str, str, str], list[PlacedNote]] = {}
        self._feeds: dict[int, dict[int, _Loader]] = {}
        """Rank -> loader -> its notes; the loader heard of last comes last."""
        self._notes: tuple[Note, ...] | None = ()

    def add(self, note: Note, said_ns: int) -> None:
        """Take in a note that was reported at this moment of the rank's clock; repetitions are ignored."""
        recent = self._recent.setdefault(note.rank, deque(maxlen=MAX_RECENT))
        mark = hash((note.step, said_ns, msgspec.msgpack.encode(note.body)))
        if mark in recent:
            return
        recent.append(mark)
        self._notes = None
        number = self._num_said[note.rank] = self._num_said.get(note.rank, 0) + 1
        placed = ((note.step, note.rank, number), note)
        if not isinstance(note.body, Feed):
            self._tellers.add(note.rank)
        match note.body:
            case Feed() as feed:
                self._add_feed(placed, feed)
            case ScriptWarning() as warning:
                self._add_warning(placed, warning)
            case _:
                heap, limit = self._newest[type(note.body)], NEWEST[type(note.body)]
                (heapq.heappush if len(heap) < limit else heapq.heappushpop)(heap, placed)

    def take_back(self, rank: int, step: int) -> None:
        """Discard a rank's notes of this step and later ones and its loaders, because it has started again."""
        self._notes = None
        self._feeds.pop(rank, None)
        self._recent.pop(rank, None)
        if rank not in self._tellers:
            return
        self._tellers.discard(rank)
        for heap in (*self._newest.values(), *self._warnings.values()):
            heap[:] = [placed for placed in heap if placed[1].rank != rank or placed[1].step < step]
            heapq.heapify(heap)

    def notes(self) -> tuple[Note, ...]:
        """Return all notes that are kept; the same object as long as nothing changed."""
        if self._notes is None:
            self._notes = tuple(note for _, note in sorted(self._all(), key=lambda placed: placed[0]))
        return self._notes

    def newest_vitals(self) -> list[Vitals]:
        """Return the vitals of the last step at which any rank sent some."""
        told = [note for _, note in self._newest[Vitals]]
        newest = max((note.step for note in told), default=0)
        return [note.body for note in told if note.step == newest and isinstance(note.body, Vitals)]

    def _all(self) -> Iterator[PlacedNote]:
        for heap in (*self._newest.values(), *self._warnings.values()):
            yield from heap
        for loaders in self._feeds.values():
            for loader in loaders.values():
                yield from loader.notes()

    def _add_warning(self, placed: PlacedNote, warning: ScriptWarning) -> None:
        key = (warning.text, warning.where, warning.module)
        if key not in self._warnings and len(self._warnings) >= MAX_TEXTS:
            return
        tellers = self._warnings.setdefault(key, [])
        tellers.append(placed)
        tellers.sort(key=lambda one: one[0])
        del tellers[MAX_TELLERS:]

    def _add_feed(self, placed: PlacedNote, feed: Feed) -> None:
        loaders = self._feeds.setdefault(placed[1].rank, {})
        loader = loaders.pop(feed.loader, None) or _Loader()
        loaders[feed.loader] = loader
        loader.add(placed, feed)
        room = max(MIN_LOADERS, min(MAX_LOADERS, MAX_FEEDS // len(self._feeds)))
        while len(loaders) > room:
            idle = (number for number, known in loaders.items() if not known.is_training)
            del loaders[next(idle, next(iter(loaders)))]


class _Loader:
    """The kept notes on one loader of one rank."""

    __slots__ = ("ends", "first", "first_end", "is_training", "latest")

    def __init__(self) -> None:
        self.first: PlacedNote | None = None
        self.first_end: PlacedNote | None = None
        self.latest: PlacedNote | None = None
        self.ends: list[PlacedNote] = []
        self.is_training = False

    def add(self, placed: PlacedNote, feed: Feed) -> None:
        self.is_training = self.is_training or feed.is_training
        if feed.is_end and self.first_end is None:
            self.first_end = placed
        elif feed.is_end:
            self.ends = [*self.ends[-1:], placed]
        elif self.first is None:
            self.first = placed
        else:
            self.latest = placed

    def notes(self) -> Iterator[PlacedNote]:
        yield from (placed for placed in (self.first, self.first_end, self.latest) if placed is not None)
        yield from self.ends
