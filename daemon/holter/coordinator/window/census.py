"""Joins the parts of many ranks' censuses, and finds what changed from one census to the next. Pure.

Equal ones share one object: 16,000 replicas of a model cost as much as one, and a change that all of them make is
computed once.
"""

import bisect
import hashlib
from collections.abc import Iterator

import msgspec

from holter.faults.window import CensusChange
from holter.records import Census, TensorEntry

MAX_PARTS = 4096
"""Largest number of parts of a census that is believed."""
MAX_CHANGES = 4096
"""Largest number of changes that are remembered: the first ones, by step and rank."""

MAX_LEFT = 8
"""Number of unused censuses that may be kept, because a model that changes back is the same again."""

CensusDifference = tuple[str, str, str, str]
"""(name, what, before, after)."""


class CensusBook:
    """The census of every rank's first model, and how it changed."""

    def __init__(self) -> None:
        self.joined: dict[int, Census] = {}
        """For each rank, its first model with all parts joined."""
        self.steps: dict[int, int] = {}
        """For each rank, the step at which it reported that census."""
        self._changes: list[tuple[tuple[int, int, int], CensusChange]] = []
        """Changes with (step, rank, number among the rank's own), sorted by these."""
        self._num_changes: dict[int, int] = {}
        self._differences: tuple[Census, Census, tuple[CensusDifference, ...]] | None = None
        """The pair of censuses that was compared last, with the result."""
        self._parts: dict[int, dict[int, Census]] = {}
        self._distinct: dict[bytes, Census] = {}
        self._encoder = msgspec.msgpack.Encoder()

    def add(self, rank: int, step: int, part: Census) -> None:
        """Take in one part, reported at this step."""
        known = self.joined.get(rank)
        if step < self.steps.get(rank, step):
            return  # A sidecar that connects anew sends earlier censuses, too.
        if not 0 <= part.part < part.parts <= MAX_PARTS or (known is not None and known.model < part.model):
            return
        parts = self._parts.setdefault(rank, {})
        if any((other.model, other.parts) != (part.model, part.parts) for other in parts.values()):
            if part.model > next(iter(parts.values())).model:
                return
            parts.clear()
        parts[part.part] = part
        if len(parts) < part.parts:
            return
        joined = self.joined[rank] = self._shared([parts[number] for number in range(part.parts)])
        self.steps[rank] = step
        del self._parts[rank]
        if len(self._distinct) > 2 * len(self.joined) + MAX_LEFT:
            held = {id(one) for one in self.joined.values()}
            self._distinct = {digest: one for digest, one in self._distinct.items() if id(one) in held}
        if known is not None and known is not joined and known.model == joined.model:
            self._compare(rank, step, known, joined)

    def changes(self) -> tuple[CensusChange, ...]:
        """Return the changes of tensors, by step and rank."""
        return tuple(change for _, change in self._changes)

    def take_back(self, rank: int, step: int) -> None:
        """Forget a rank that started again: its new census is no change of the former one."""
        self.joined.pop(rank, None)
        self.steps.pop(rank, None)
        self._parts.pop(rank, None)
        self._changes = [kept for kept in self._changes if kept[1].rank != rank or kept[1].step < step]

    def _compare(self, rank: int, step: int, before: Census, after: Census) -> None:
        if self._differences is None or self._differences[0] is not before or self._differences[1] is not after:
            self._differences = (before, after, tuple(_differences(before, after)))
        for difference in self._differences[2]:
            number = self._num_changes[rank] = self._num_changes.get(rank, 0) + 1
            place = (step, rank, number)
            if len(self._changes) >= MAX_CHANGES and place > self._changes[-1][0]:
                return
            bisect.insort(self._changes, (place, CensusChange(rank, step, *difference)), key=lambda kept: kept[0])
            del self._changes[MAX_CHANGES:]

    def _shared(self, parts: list[Census]) -> Census:
        entries: list[TensorEntry] = [entry for part in parts for entry in part.entries]
        # The backward order is that of the whole model and travels with part 0.
        whole = msgspec.structs.replace(parts[0], part=0, parts=1, entries=entries)
        digest = hashlib.blake2b(self._encoder.encode(whole), digest_size=16).digest()
        return self._distinct.setdefault(digest, whole)


def _differences(before: Census, after: Census) -> Iterator[CensusDifference]:
    """Yield the changes of tensors in the order of the new census; removed tensors come last."""
    former = {entry.name: entry for entry in before.entries}
    for entry in after.entries:
        known = former.pop(entry.name, None)
        if known is None:
            yield entry.name, "new", "", entry.dtype
            continue
        for what in ("dtype", "requires_grad", "shape"):
            if getattr(known, what) != getattr(entry, what):
                yield entry.name, what, _word(getattr(known, what)), _word(getattr(entry, what))
    yield from ((name, "gone", entry.dtype, "") for name, entry in former.items())


def _word(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
