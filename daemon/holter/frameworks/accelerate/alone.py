"""A rank that saves for all: for accelerate it is the main process of a world of one, so that it writes everything and waits for nobody.

    PartialState, AcceleratorState    distributed_type NO, one process, index 0
    torch.distributed                 as it is; whoever calls a collective all the same waits until the deadline of the save

Only in a rescue: the process ends afterwards, and its main thread, blocked in a collective, reads none of this meanwhile.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

REPLICATED = frozenset(
    kind for kind in DistributedType if kind is DistributedType.NO or kind.value.startswith("MULTI_")
)
"""Every rank has all of the model: one of them can save for all."""

_ALONE = {
    "distributed_type": DistributedType.NO,
    "num_processes": 1,
    "process_index": 0,
    "local_process_index": 0,
}


@contextmanager
def alone() -> Iterator[None]:
    """Be the only process there is, for accelerate and what is built on it."""
    kinds = PartialState, AcceleratorState
    shared: list[MutableMapping[str, Any]] = [kind._shared_state for kind in kinds]  # noqa: SLF001
    before = [dict(state) for state in shared]
    for state in shared:
        state.update(_ALONE)
    try:
        yield
    finally:
        for state, was in zip(shared, before, strict=True):
            state.update(was)
