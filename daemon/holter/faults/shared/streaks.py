"""Finds what ranks reported several times in a row: one odd observation is chance, three are a state.

The notes of one rank are compared with each other. If many ranks take turns in reporting, no single rank reports often
enough; then those steps count at which every rank that reported showed it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from holter.faults.window import Note, Window
from holter.records import Rare

T = TypeVar("T", bound=Rare)
NoteWithBody = tuple[Note, T]


@dataclass(frozen=True)
class Streak(Generic[T]):
    """The earliest notes in a row that show one thing."""

    ranks: tuple[int, ...]
    """The ranks that show it so often in a row, or one time less."""
    notes: tuple[NoteWithBody[T], ...]
    """As many notes as were asked for, ascending: of the rank that had them first, or of all ranks that reported."""

    @property
    def first_step(self) -> int:
        """The step of the first note."""
        return self.notes[0][0].step

    @property
    def last(self) -> NoteWithBody[T]:
        """The note that completed the streak."""
        return self.notes[-1]


def find_streak(
    window: Window, kind: type[T], is_bad: Callable[[T], bool], *, at_least: int, min_steps: int = 0
) -> Streak[T] | None:
    """Return the earliest streak of at least so many notes over so many steps; None if there is none."""
    said = list(window.notes_of(kind))
    by_rank: dict[int, list[NoteWithBody[T]]] = {}
    for one in said:
        by_rank.setdefault(one[0].rank, []).append(one)
    runs = {rank: _longest(notes, is_bad) for rank, notes in by_rank.items()}
    complete = [found for rank in sorted(runs) if (found := _first_enough(runs[rank], at_least, min_steps)) is not None]
    if complete:
        first = min(complete, key=lambda notes: notes[-1][0].step)
        ranks = tuple(sorted(rank for rank, run in runs.items() if len(run) >= at_least - 1))
        return Streak(ranks, tuple(first))
    return _in_turns(said, is_bad, at_least, min_steps) if len(by_rank) > 1 else None


def _longest(notes: Iterable[NoteWithBody[T]], is_bad: Callable[[T], bool]) -> list[NoteWithBody[T]]:
    longest: list[NoteWithBody[T]] = []
    run: list[NoteWithBody[T]] = []
    for one in notes:
        if not is_bad(one[1]):
            run = []
            continue
        run.append(one)
        if len(run) > len(longest):
            longest = run
    return longest


def _first_enough(run: list[NoteWithBody[T]], at_least: int, min_steps: int) -> list[NoteWithBody[T]] | None:
    """Return the shortest beginning of a run that is long enough in notes and in steps."""
    for end in range(at_least, len(run) + 1):
        if run[end - 1][0].step - run[0][0].step >= min_steps:
            return run[:end]
    return None


def _in_turns(
    said: list[NoteWithBody[T]], is_bad: Callable[[T], bool], at_least: int, min_steps: int
) -> Streak[T] | None:
    by_step: dict[int, list[NoteWithBody[T]]] = {}
    for one in said:
        by_step.setdefault(one[0].step, []).append(one)
    run: list[NoteWithBody[T]] = []
    num_steps = 0
    for step in sorted(by_step):
        if not all(is_bad(body) for _, body in by_step[step]):
            run, num_steps = [], 0
            continue
        run, num_steps = run + by_step[step], num_steps + 1
        if num_steps >= at_least and step - run[0][0].step >= min_steps:
            return Streak(tuple(sorted({note.rank for note, _ in run})), tuple(run))
    return None
