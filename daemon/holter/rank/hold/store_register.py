"""The cell in the job's own rendezvous store, asked through a connection of its own and never for long."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from holter.rank.hold.commit_register import CommitRegister, LocalRegister, StoreRegister
from holter.records import Order
from holter.threads import without_signals

CALL_S = 5.0
"""For one question; a store whose host is gone may let one wait for its own half an hour."""

T = TypeVar("T")


def reach(life: int) -> CommitRegister:
    """The cell of this job; `life` tells the lives of a job that is restarted apart. Raises anything."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return LocalRegister()
    store = c10d._get_default_store()  # noqa: SLF001
    # A connection of its own: another thread may be blocked in a question on the job's.
    return _Bounded(_within(lambda: StoreRegister(store.clone(), f"holter/halt/{life}")))


class _Bounded:
    def __init__(self, cell: CommitRegister) -> None:
        self._cell = cell

    def offer(self, step: int, order: Order) -> Order:
        """As `Cell` says; TimeoutError where nobody answers."""
        return _within(lambda: self._cell.offer(step, order))

    def look(self, step: int) -> Order | None:
        """As `Cell` says; TimeoutError where nobody answers."""
        return _within(lambda: self._cell.look(step))


def _within(call: Callable[[], T]) -> T:
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001  it is raised where it was asked for
            errors.append(error)

    asking = threading.Thread(target=run, name="holter-cell", daemon=True)
    with without_signals():
        asking.start()
    asking.join(CALL_S)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {CALL_S:.0f} s")
    return results[0]
