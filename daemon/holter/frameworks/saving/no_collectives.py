"""Lets each rank call a framework's own save function alone, while main threads are blocked, without meeting other ranks.

    barrier                       returns at once: there is no need to wait for all ranks before writing an own file
    all_reduce, all_gather …      SaveError: the answer of the others is not known

This holds only in the thread that saves: a blocked main thread, which may yet go on, has the functions as they were.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from holter.errors import SaveError

BARRIERS = ("barrier", "monitored_barrier")
TALK = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send", "recv", "isend", "irecv", "batch_isend_irecv",
)  # fmt: skip


@contextmanager
def no_collectives() -> Iterator[None]:
    """Disable the functions of torch.distributed that talk to other ranks, in this thread."""
    here = threading.get_ident()
    before = {name: getattr(dist, name) for name in (*BARRIERS, *TALK)}
    for name, original in before.items():
        setattr(dist, name, _apart(name, original, here))
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(dist, name, original)


def _apart(name: str, original: Callable[..., Any], thread: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        if name in BARRIERS:
            return None
        raise SaveError(f"its save calls {name}, and ranks are blocked")

    return call
