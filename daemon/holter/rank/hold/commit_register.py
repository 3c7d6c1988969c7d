"""One register a step, in which the first word stands: ranks that wait before the same step never part, whoever else dies.

A rank offers what it wants, `commit` with the order in full or `abort`, and obeys what it finds there. The order is part of the word: a rank
whose own sidecar is gone learns from it where to save. The register is in the job's own rendezvous store, asked through a connection of its
own and never for long.
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
"""How long one question may take; a store whose host is gone would make us wait for its own half an hour."""
T = TypeVar("T")


class CommitRegister(Protocol):
    """Asked in the main thread of a rank that stands; no call may take long."""

    def offer(self, step: int, order: Order) -> Order:
        """Offer a word for this step; returns the one that stands, which is ours if there was none. Raises anything where that cannot be known."""

    def look(self, step: int) -> Order | None:
        """The word that stands; None: there is none yet."""


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
    """In a store of torch's: `compare_set`, `check` and `get` are all that is called. TimeoutError where nobody answers."""

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
    """The register of this job; `life` tells the lives of a job that is restarted apart. Raises anything."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return LocalRegister()
    store = c10d._get_default_store()  # noqa: SLF001
    # A connection of its own: another thread may be blocked in a question on the job's.
    return StoreRegister(_within(store.clone), f"holter/halt/{life}")


def _within(call: Callable[[], T]) -> T:
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001  it is raised where it was asked for
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
