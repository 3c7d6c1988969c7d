"""One register for each step, which keeps the first word that is written: ranks that wait before the same step never decide differently.

A rank offers what it wants, `commit` with the whole order or `abort`, and obeys what it finds there. Because the order is part of the word, a
rank whose own sidecar is gone learns from it where to save. The register is in the job's own rendezvous store, and is reached through a
connection of our own, with a short deadline.
"""

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from holter.records import Order
from holter.threads import without_signals

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Order)
CALL_S = 5.0
"""Seconds that one question may take; a store whose host is gone would make us wait for its own timeout of half an hour."""
T = TypeVar("T")


class CommitRegister(Protocol):
    """Decides what held ranks do. It is called in the main thread of a held rank, so no call may take long."""

    def offer(self, step: int, order: Order) -> Order:
        """Offer a word for this step; return the one that is kept, which is ours if there was none. May raise any exception if that cannot be known."""

    def look(self, step: int) -> Order | None:
        """Return the word that is kept for this step; None if there is none yet."""


class LocalRegister:
    """The register of a rank that has no peers."""

    def __init__(self) -> None:
        self._words: dict[int, Order] = {}

    def offer(self, step: int, order: Order) -> Order:
        """See `CommitRegister`."""
        return self._words.setdefault(step, order)

    def look(self, step: int) -> Order | None:
        """See `CommitRegister`."""
        return self._words.get(step)


class StoreRegister:
    """A register in a store of torch's, of which only `compare_set`, `check` and `get` are called. Raises TimeoutError if nobody answers."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def offer(self, step: int, order: Order) -> Order:
        """See `CommitRegister`."""
        offered = _ENCODER.encode(order).decode()
        return _within(lambda: _DECODER.decode(self._store.compare_set(self._key(step), "", offered)))

    def look(self, step: int) -> Order | None:
        """See `CommitRegister`."""
        key, store = self._key(step), self._store
        return _within(lambda: _DECODER.decode(store.get(key)) if store.check([key]) else None)

    def _key(self, step: int) -> str:
        return f"{self._prefix}/step-{step}"


def reach(life: int) -> CommitRegister:
    """Return the register of this job; `life` is another number after each restart of the job. May raise any exception."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return LocalRegister()
    store = c10d._get_default_store()  # noqa: SLF001
    # We need our own connection: another thread may be blocked in a question on the job's.
    return StoreRegister(_within(store.clone), f"holter/halt/{life}")


def _within(call: Callable[[], T]) -> T:
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001  the caller's thread raises it
            errors.append(error)

    asking = threading.Thread(target=run, name="holter-register", daemon=True)
    with without_signals():
        asking.start()
    asking.join(CALL_S)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {CALL_S:.0f} s")
    return results[0]
