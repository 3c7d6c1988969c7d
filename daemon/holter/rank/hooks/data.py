"""Follows data loaders: the time spent in `iter` and `next`, and each pass over one, reported when it begins and when it ends.

Nobody says which loader the training reads: it is the one whose batch a backward pass follows. So the beginning of a loader's first pass is
reported at the first backward pass after it; for a loader that is never trained on, at the end of the pass.

    iter(loader)   next   forward   backward            next …   StopIteration
    pass begins                     begin is reported            end is reported

What a loader says about itself (data set, samplers, number of shards and batches) is read without iterating anything. A sampler that would
have to run to know its length is not asked for it: that could draw random numbers.
"""

import builtins
import contextlib
import functools
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sized
from dataclasses import dataclass, field, replace
from itertools import islice
from types import FrameType, FunctionType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from holter.rank.context import Context, in_phase
from holter.rank.readings import batches
from holter.rank.readings.batches import Leaf
from holter.rank.readings.overlap import OverlapProbe
from holter.records import Feed, Phase

MAX_LOADERS = 64
"""Number of loaders that are reported: a script may make a new one for each step."""
MAX_PASSES = 32
"""Number of a loader's passes after which only passes 64, 128, 256 ... are reported: a script may begin one for every batch."""
TOGETHER = 3
"""A loader that was not the last one read still feeds the training if it was read before this many backward passes in a row."""
MAX_DEPTH = 8
TRUSTED = frozenset({"torch", "accelerate", "transformers", "builtins"})
"""Packages whose samplers' `__len__` is known to be cheap and to change nothing."""
SHARDS = ("num_replicas", "num_processes", "num_shards")
"""Attributes in which samplers keep the number of shards that they cut the data into."""
NUM_SIGNED = 64
"""Number of indices or elements by which a data set is told apart from others."""
HARMLESS = frozenset({"len", "int", "min", "max", "sum", "abs", "round", "super"})


@dataclass(frozen=True)
class LoaderDescription:
    """The fields of `records.Feed` that stay the same for a whole pass."""

    dataset: str
    dataset_size: int
    num_batches: int
    batch_size: int
    sampler: str
    is_shuffling: bool
    sampler_epoch: int
    num_shards: int
    content: int = 0
    whole_size: int = -1


@dataclass(eq=False)
class _Loader:
    number: int
    num_passes: int = 0
    num_in_a_row: int = 0
    is_training: bool = False


@dataclass
class _Pass:
    loader: _Loader
    epoch: int
    description: LoaderDescription | None
    """None if this pass is not reported."""
    num_taken: int = 0
    num_samples: int = 0
    order: int = 0
    is_order_known: bool = True
    is_told: bool = False
    is_over: bool = False


@dataclass
class FetchedBatch:
    """One batch that was fetched from a loader."""

    origin: _Pass
    signature: int
    num_samples: int
    leaves: list[Leaf] = field(default_factory=list)
    """Its tensors, which are kept for the newest batch only."""


class DataProbe:
    """Follows every DataLoader of the process."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._num_loaders = 0
        self._loaders: weakref.WeakKeyDictionary[Any, _Loader] = weakref.WeakKeyDictionary()
        self._passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self._recent: deque[FetchedBatch] = deque(maxlen=64)
        """Batches that were fetched since the last backward pass."""
        self._before: list[_Loader] = []
        """Loaders that were read before the last backward pass."""
        self.overlap = OverlapProbe(context, self._is_same_dataset)

    def install(self) -> None:
        """Patch torch's loaders so that we notice when a pass begins and when a batch is fetched."""
        patches = self._context.patches
        patches.replace("_get_iterator", self._around_iterator, DataLoader)
        patches.replace("_reset", self._around_reset, _BaseDataLoaderIter)
        patches.replace("__next__", self._around_next, _BaseDataLoaderIter)
        # Persistent workers are made ready for another pass here, not in `_get_iterator`.
        patches.replace(
            "_reset", functools.partial(in_phase, self._context, Phase.DATA), _MultiProcessingDataLoaderIter
        )

    def trained(self) -> list[FetchedBatch]:
        """Note that a backward pass begins; return the batches of the training's loaders that were fetched for it, in order."""
        if not self._recent:
            self._before = []
            return []
        recent = list(self._recent)
        self._recent.clear()
        fetched = {batch.origin.loader.number: batch.origin for batch in recent}
        for last in fetched.values():
            last.loader.num_in_a_row = last.loader.num_in_a_row + 1 if last.loader in self._before else 1
            is_last = last is recent[-1].origin
            if not last.is_over and (is_last or last.loader.num_in_a_row >= TOGETHER):
                if not last.loader.is_training:
                    self.overlap.trains(last.loader.number)
                last.loader.is_training = True
            if last.loader.is_training:
                self._tell_beginning(last)
        self._before = [last.loader for last in fetched.values()]
        return [batch for batch in recent if batch.origin.loader.is_training]

    def under_way(self, asked: Collection[int]) -> list[tuple[Any, list[int]]]:
        """Return the loaders with these numbers, each with the seeds of its living iterators.

        If `asked` is empty, return the training's loaders whose pass is not over.
        """
        passes = list(self._passes.items())
        numbers = asked or {
            known.loader.number for _, known in passes if known.loader.is_training and not known.is_over
        }
        return [
            (loader, [getattr(iterator, "_base_seed", 0) for iterator, known in passes if known.loader is held])
            for loader, held in list(self._loaders.items())
            if held.number in numbers
        ]

    def _around_iterator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # Workers start here, which is slow even where `next` is quick.
        make = in_phase(self._context, Phase.DATA, original)
        begin, ask = self._context.guard.wrap(self._begin), self._context.guard.wrap(self._ask)

        @functools.wraps(original)
        def get_iterator(loader: Any) -> Any:
            ask(loader)
            iterator = make(loader)
            begin(iterator, loader, caller_frame())
            return iterator

        return get_iterator

    def _around_reset(self, original: Callable[..., None]) -> Callable[..., None]:
        begin, ask = self._context.guard.wrap(self._begin), self._context.guard.wrap(self._ask)

        @functools.wraps(original)
        def reset(iterator: Any, loader: Any, first_iter: bool = False, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001, FBT002
            if not first_iter:
                ask(loader)
            original(iterator, loader, first_iter, *args, **kwargs)
            if not first_iter:
                # With persistent workers the same iterator begins a new pass.
                begin(iterator, loader, caller_frame())

        return reset

    def _around_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        fetch = in_phase(self._context, Phase.DATA, original)
        ask = self._context.guard.wrap(self._ask_next)
        take, end = self._context.guard.wrap(self._take), self._context.guard.wrap(self._end)

        @functools.wraps(original)
        def following(iterator: Any) -> Any:
            ask(iterator)
            try:
                batch = fetch(iterator)
            except StopIteration:
                end(iterator)
                raise
            take(iterator, batch)
            return batch

        return following

    def _known(self, loader: Any) -> _Loader:
        known = self._loaders.get(loader)
        if known is None:
            known = self._loaders[loader] = _Loader(self._num_loaders)
            self._num_loaders += 1
        return known

    def _ask(self, loader: Any) -> None:
        """Announce that an iterator is about to be made, which draws its seed from the random state."""
        known = self._known(loader)
        self._context.undo.rewind.asking(known.number, is_beginning=True, is_training=known.is_training)

    def _ask_next(self, iterator: Any) -> None:
        here = self._passes.get(iterator)
        if here is not None:
            known = here.loader
            self._context.undo.rewind.asking(known.number, is_beginning=False, is_training=known.is_training)

    def _begin(self, iterator: Any, loader: Any, frame: Any) -> None:
        known = self._known(loader)
        epoch = known.num_passes
        known.num_passes += 1
        is_told = known.number < MAX_LOADERS and (epoch <= MAX_PASSES or epoch & (epoch - 1) == 0)
        description = describe_loader(loader, wrapper_of_loader(loader, frame)) if is_told else None
        begun = self._passes[iterator] = _Pass(known, epoch, description)
        if known.is_training:
            self._tell_beginning(begun)

    def _take(self, iterator: Any, batch: Any) -> None:
        here = self._passes.get(iterator)
        if here is None:
            return
        leaves = list(islice(batches.leaves(batch, "batch"), batches.MAX_SIGNED))
        signature = batches.sign([tensor for _, tensor in leaves])
        num_samples = next((t.shape[0] for _, t in leaves if t.dim()), 0)
        here.num_taken += 1
        here.num_samples = here.num_samples + num_samples if num_samples and here.num_samples >= 0 else -1
        here.order = batches.fold(here.order, signature)
        here.is_order_known &= signature != 0
        if self._recent:
            # Only one batch's tensors are held, however many are fetched before the next backward pass.
            self._recent[-1].leaves = []
        self._recent.append(FetchedBatch(here, signature, num_samples, leaves))
        if not here.loader.is_training:
            dataset = here.description.dataset if here.description is not None else ""
            self.overlap.fetched(here.loader.number, here.epoch, leaves, dataset)

    def _end(self, iterator: Any) -> None:
        here = self._passes.get(iterator)
        if here is not None and not here.is_over:
            here.is_over = True
            self._context.undo.rewind.ended(here.loader.number)
            self.overlap.ended(here.loader.number)
            self._tell_beginning(here)
            self._tell(here, is_end=True)

    def _is_same_dataset(self, number: int) -> bool:
        """Whether this loader reads the same data set object as one of the training's loaders."""
        loaders = list(self._loaders.items())
        own = [loader.dataset for loader, held in loaders if held.number == number]
        return any(held.is_training and loader.dataset is one for loader, held in loaders for one in own)

    def _tell_beginning(self, here: _Pass) -> None:
        if not here.is_told:
            here.is_told = True
            self._tell(here, is_end=False)

    def _tell(self, here: _Pass, *, is_end: bool) -> None:
        known = here.description
        if known is None:
            return
        feed = Feed(
            loader=here.loader.number,
            epoch=here.epoch,
            is_end=is_end,
            is_training=here.loader.is_training,
            num_taken=here.num_taken,
            num_samples=here.num_samples,
            order=here.order if is_end and here.is_order_known else 0,
            **vars(replace(known, num_batches=0) if self._is_joined() else known),
        )
        self._context.writer.say(self._context.log.step, feed)

    def _is_joined(self) -> bool:
        """Whether DDP's `join()` lets ranks run out of data at different times: then they need not have equally many batches."""
        configs = (getattr(model.ddp, "_join_config", None) for model in self._context.models)
        return any(config is not None and config.enable for config in configs)


def describe_loader(loader: Any, wrapper: Any) -> LoaderDescription:
    """Describe a loader, and the framework's wrapper that iterates it, if there is one (else None)."""
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
    return LoaderDescription(
        dataset=type(dataset).__name__,
        dataset_size=-1 if is_iterable else _length(dataset),
        num_batches=_length(samplers[0]) if samplers and all(map(_is_harmless, samplers)) else -1,
        batch_size=_batch_size(loader),
        sampler=">".join(type(part).__name__ for part in (*shards, *samplers)),
        is_shuffling=any(_is_shuffling(part) for part in samplers),
        sampler_epoch=epochs[0] if epochs else -1,
        num_shards=num_shards,
        content=_content(dataset) if num_shards > 1 else 0,
        whole_size=_length(dataset.dataset) if type(dataset) is Subset else -1,
    )


def _content(dataset: Any) -> int:
    """Return a checksum of a few indices or elements, by which the ranks' data sets are told apart; 0 if it is not known.

    None of the script's own code is called.
    """
    if type(dataset) is Subset and isinstance(dataset.indices, (list, range)):
        chosen: Any = tuple(dataset.indices[:: max(1, len(dataset.indices) // NUM_SIGNED)])
    elif type(dataset) is TensorDataset and all(type(t) is torch.Tensor and t.is_cpu for t in dataset.tensors):
        chosen = [_signed(t.detach()) for t in dataset.tensors]
    else:
        return 0
    return zlib.crc32(repr((len(dataset), chosen)).encode()) or 1


def _signed(tensor: torch.Tensor) -> list[float]:
    """Return the first element of some evenly spaced samples."""
    some = tensor[:: max(1, len(tensor) // NUM_SIGNED)]
    return some.reshape(len(some), -1)[:, :1].double().flatten().tolist() if tensor.numel() else []


def wrapper_of_loader(loader: Any, frame: FrameType | None) -> Any:
    """Return Accelerate's own loader that is about to iterate this one, found in the calling frames; None if the script iterates it itself.

    The variables of the script's own frames are not read: that would keep their values alive.
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
    """Return the frame of the function that called our caller."""
    return sys._getframe(1).f_back  # noqa: SLF001  the only way to a frame


def _chain(loader: Any) -> list[Any]:
    """Return the loader's samplers, from the outermost inwards."""
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
    """Whether this is Accelerate's dispatching loader, with which one rank reads for all and sends the others their parts."""
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
    """Whether the sampler's `__len__` only does arithmetic: one that calls the sampler's own functions may run through an epoch."""
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
