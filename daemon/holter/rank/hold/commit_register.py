"""One register a step, in which the first word stands: ranks that wait before the same step never part, whoever else dies.

A rank offers what it wants, `commit` with the order in full or `abort`, and obeys what it finds there. The order travels in the word: a rank whose
own sidecar is gone learns from it where to save.
"""

from typing import Any, Protocol

import msgspec

from holter.records import Order

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Order)


class CommitRegister(Protocol):
    """Asked in the main thread of a rank that stands; no call may take long."""

    def offer(self, step: int, order: Order) -> Order:
        """The word that stands before this step: this one, if there was none. Raises anything where it cannot be known."""

    def look(self, step: int) -> Order | None:
        """The word that stands; None: there is none yet."""


class LocalRegister:
    """Of a rank that has no peers."""

    def __init__(self) -> None:
        self._words: dict[int, Order] = {}

    def offer(self, step: int, order: Order) -> Order:
        """As `Cell` says."""
        return self._words.setdefault(step, order)

    def look(self, step: int) -> Order | None:
        """As `Cell` says."""
        return self._words.get(step)


class StoreRegister:
    """In a store of torch's: `compare_set`, `check` and `get` are all that is called."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def offer(self, step: int, order: Order) -> Order:
        """As `Cell` says."""
        return _DECODER.decode(self._store.compare_set(self._key(step), "", _ENCODER.encode(order).decode()))

    def look(self, step: int) -> Order | None:
        """As `Cell` says."""
        key = self._key(step)
        return _DECODER.decode(self._store.get(key)) if self._store.check([key]) else None

    def _key(self, step: int) -> str:
        return f"{self._prefix}/step-{step}"
