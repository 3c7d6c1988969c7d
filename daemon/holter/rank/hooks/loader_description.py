"""What a data loader says of itself: data set, samplers, into how many parts they cut it, and how many batches there will be.

Nothing is iterated, and no length is asked of a sampler that would have to run to know it: that could draw random numbers.
"""

import builtins
import contextlib
import sys
from collections.abc import Sized
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any

from torch.utils.data import IterableDataset

MAX_DEPTH = 8
TRUSTED = frozenset({"torch", "accelerate", "transformers", "builtins"})
"""Where the samplers come from whose length is known to be cheap and to change nothing."""
SHARDS = ("num_replicas", "num_processes", "num_shards")
"""How samplers call the number of parts that they cut the data into."""
HARMLESS = frozenset({"len", "int", "min", "max", "sum", "abs", "round", "super"})


@dataclass(frozen=True)
class Description:
    """The fields of `records.Feed` that hold for a whole pass."""

    dataset: str
    dataset_size: int
    num_batches: int
    batch_size: int
    sampler: str
    is_shuffling: bool
    sampler_epoch: int
    num_shards: int


def describe(loader: Any, wrapper: Any) -> Description:
    """Of a loader, and of the framework's object that iterates it, if there is one."""
    dataset, shards = loader.dataset, [wrapper] if _is_dispatching(wrapper) else []
    while type(dataset).__name__ == "IterableDatasetShard":
        shards.append(dataset)
        dataset = dataset.dataset
    is_iterable = isinstance(dataset, IterableDataset)
    samplers = [] if is_iterable else _chain(loader)
    num_shards = 1
    for part in (*shards, *samplers):
        num_shards *= _num_shards(part)
    epochs = [part.epoch for part in samplers if hasattr(part, "set_epoch") and isinstance(_get(part, "epoch"), int)]
    return Description(
        dataset=type(dataset).__name__,
        dataset_size=-1 if is_iterable else _length(dataset),
        num_batches=_length(samplers[0]) if samplers and all(map(_is_harmless, samplers)) else -1,
        batch_size=_batch_size(loader),
        sampler=">".join(type(part).__name__ for part in (*shards, *samplers)),
        is_shuffling=any(_is_shuffling(part) for part in samplers),
        sampler_epoch=epochs[0] if epochs else -1,
        num_shards=num_shards,
    )


def wrapper_of(loader: Any, frame: FrameType | None) -> Any:
    """Accelerate's own loader that is beginning to iterate this one, from the frames that called; None: the script does.

    Of the script's own frames nothing is read: that would keep what lies in their variables alive.
    """
    for _ in range(MAX_DEPTH):
        if frame is None:
            return None
        if frame.f_globals.get("__name__", "").startswith("accelerate."):
            caller = frame.f_locals.get("self")
            if getattr(caller, "__dict__", {}).get("base_dataloader") is loader:
                return caller
        frame = frame.f_back
    return None


def caller_frame() -> FrameType | None:
    """Of the function that called ours."""
    return sys._getframe(1).f_back  # noqa: SLF001  the only way to a frame


def _chain(loader: Any) -> list[Any]:
    """Samplers from the outermost inwards."""
    part = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    found: list[Any] = []
    while part is not None and len(found) < MAX_DEPTH:
        found.append(part)
        inner = _get(part, "batch_sampler")
        part = inner if inner is not None else _get(part, "sampler")
    return found


def _get(part: Any, name: str) -> Any:
    with contextlib.suppress(Exception):
        return getattr(part, name, None)
    return None


def _num_shards(part: Any) -> int:
    if _is_dispatching(part):
        part = _get(part, "state")
    for name in SHARDS:
        number = _get(part, name)
        if isinstance(number, int) and number > 0:
            return number
    return 1


def _is_dispatching(wrapper: Any) -> bool:
    """One rank reads for all and sends the others their parts."""
    return type(wrapper).__name__ == "DataLoaderDispatcher"


def _is_shuffling(part: Any) -> bool:
    return _get(part, "shuffle") is True or "Random" in type(part).__name__


def _batch_size(loader: Any) -> int:
    size = loader.batch_size if loader.batch_size is not None else _get(loader.batch_sampler, "batch_size")
    return size if isinstance(size, int) else -1


def _length(thing: Any) -> int:
    with contextlib.suppress(Exception):
        return len(thing) if isinstance(thing, Sized) else -1
    return -1


def _is_harmless(sampler: Any) -> bool:
    """Whether its length is arithmetic: a `__len__` that calls the sampler's own functions may run through an epoch."""
    kind = type(sampler)
    owner = next((base for base in kind.__mro__ if "__len__" in base.__dict__), kind)
    length = owner.__dict__.get("__len__")
    if owner.__module__.split(".")[0] in TRUSTED or not isinstance(length, FunctionType):
        return True
    names = [name for name in length.__code__.co_names if name != "__len__"]
    return not any(
        isinstance(getattr(kind, name, None), FunctionType) or (hasattr(builtins, name) and name not in HARMLESS)
        for name in names
    )
