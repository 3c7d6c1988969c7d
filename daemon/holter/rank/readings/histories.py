"""Fingerprints of tensors against those they had: which moved, and when.

after the last step read  |  before this step  |  after this step
a                        b                    c           a != b: moved between steps;  b != c: moved in this one
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAX_NAMES = 32
MANY = 16
"""Elements that do not all come back by chance."""


@dataclass
class _Known:
    parameter: "weakref.ref[Any]"
    first: int
    last: int
    last_step: int
    before: int = 0
    """Before the last step read."""
    num_still: int = 0
    """Readings in a row, before this one, in which it had not moved."""


@dataclass
class Moves:
    """Places in the list that was read."""

    in_step: list[int] = field(default_factory=list)
    between: list[int] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)
    """Moved in the last step read, and before this one again what it was before that one: the step was undone."""
    since_first: list[int] = field(default_factory=list)
    """Ever changed since it was first read."""
    still: list[int] = field(default_factory=list)
    """For each of the list: for how many readings it had not moved before this one."""


class FingerprintHistory:
    """What each tensor last was."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def compare(self, step: int, parameters: Sequence[Any], before: Any, after: Any, *, is_adjacent: bool) -> Moves:
        """Take in two fingerprints of each, 0 where it was not read.

        With `is_adjacent`, only what was read after the very step before can have moved between steps.
        """
        moves = Moves()
        for place, parameter in enumerate(parameters):
            was, now = int(before[place]), int(after[place])
            known = self._known.get(id(parameter))
            if known is None or known.parameter() is not parameter:
                known = self._known[id(parameter)] = _Known(weakref.ref(parameter), was, was, step - 1)
            moves.still.append(known.num_still)
            if not was or not now:
                continue
            is_comparable = known.last_step == step - 1 or not is_adjacent
            has_moved_between = is_comparable and bool(known.last) and known.last != was
            if was != now:
                moves.in_step.append(place)
            if has_moved_between:
                moves.between.append(place)
            if was == known.before != known.last and (has_moved_between or parameter.numel() >= MANY):
                moves.restored.append(place)
            if known.first not in (0, now):
                moves.since_first.append(place)
            known.num_still = 0 if was != now or has_moved_between else known.num_still + 1
            known.last, known.last_step, known.first = now, step, known.first or was
            known.before = was
        if len(self._known) > 2 * len(parameters) + 1024:
            self._known = {key: known for key, known in self._known.items() if known.parameter() is not None}
        return moves

    def moved_since(self, step: int, parameters: Sequence[Any], now: Any) -> list[int]:
        """Places of those that are not what the step before left; a reading between two steps."""
        moved = []
        for place, parameter in enumerate(parameters):
            known = self._known.get(id(parameter))
            if known is None or known.parameter() is not parameter or known.last_step != step - 1:
                continue
            if known.last and int(now[place]) and known.last != int(now[place]):
                moved.append(place)
        return moved


def prints(table: Any) -> Any:
    """Fingerprints of a reading; 0 where a tensor had lost its memory."""
    return np.where(table.numel > 0, table.fingerprint, 0)
