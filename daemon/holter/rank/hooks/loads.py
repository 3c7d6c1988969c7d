"""Finds out which weights the script loads into a model, and from which files it has read them.

    state = torch.load("stage_1.pt")       we remember where its tensors lie in memory, their names and the path
    model.load_state_dict(state["model"])  tensors at these places came from that file
    p.copy_(state[name])                   not seen: a file with the names of at least half of the model's parameters counts as loaded, too

Reported is that weights were loaded, and from where; whether they are the right ones shows in the fingerprints of the first step.
"""

import functools
import os
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from holter.rank.context import Context
from holter.rank.framework import absolute
from holter.records import Loaded

MAX_DEPTH, MAX_TENSORS, MAX_READ, MAX_FILES = 4, 64, 1024, 8
"""Levels and tensors up to which a state is searched; places in memory that are remembered; files that are reported."""
MAX_ENTRIES, MAX_LISTED = 65_536, 16
"""Entries up to which a state, and each list in it, is searched: the script may also load data, which can be long."""


class LoadProbe:
    """Follows `torch.load` and `load_state_dict`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._read: deque[tuple[int, str, StorageWeakRef]] = deque(maxlen=MAX_READ)
        """(address, file, storage) of each tensor that was read, newest first; the storage shows whether its memory is still alive."""
        self._files: dict[str, None] = {}
        self._num_elements = 0
        self._unclaimed: dict[str, tuple[frozenset[str], int]] = {}
        """File that was read, but is not yet known to be given to a model -> names of its tensors and number of their elements."""
        self._has_news = False

    def install(self) -> None:
        """Patch `torch.load` and `Module.load_state_dict`."""
        patches = self._context.patches
        patches.replace("load", self._around_load, torch, torch.serialization)
        patches.replace("load_state_dict", self._around_give, torch.nn.Module)

    def tell(self) -> None:
        """Report what was loaded since the last call; called once training has begun."""
        if self._unclaimed:
            self._claim({name for model in self._context.models for name, _ in model.parameters})
            self._unclaimed.clear()
        if self._has_news:
            self._has_news = False
            told = Loaded(files=list(self._files), num_elements=self._num_elements)
            self._context.writer.say(self._context.log.step, told)

    def _claim(self, names: set[str]) -> None:
        for path, (held, num_elements) in self._unclaimed.items() if names else ():
            if 2 * len(held & names) >= len(names):
                self._take(path, num_elements)

    def _around_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = self._context.guard.wrap(self._note_read, "any")

        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            note(args[0] if args else kwargs.get("f"), found)
            return found

        return load

    def _around_give(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = self._context.guard.wrap(self._note_given, "any")

        @functools.wraps(original)
        def load_state_dict(*args: Any, **kwargs: Any) -> Any:
            # The state dict is read before the call, because the call may empty it.
            note(args[1] if len(args) > 1 else kwargs.get("state_dict"))
            return original(*args, **kwargs)

        return load_state_dict

    def _note_read(self, source: Any, found: Any) -> None:
        path = absolute(source if isinstance(source, (str, os.PathLike)) else getattr(source, "name", ""))
        if path:
            self._read.extendleft(
                (tensor.data_ptr(), path, StorageWeakRef(tensor.untyped_storage()))
                for tensor in islice(_placed(found), MAX_TENSORS)
            )
            if len(self._unclaimed) < MAX_FILES:
                state = dict(_named(found))
                self._unclaimed[path] = frozenset(state), sum(state.values())

    def _note_given(self, state: Any) -> None:
        places = {tensor.data_ptr() for tensor in islice(_placed(state), MAX_TENSORS)}
        # Memory that was freed may have been used again.
        path = next((path for place, path, memory in self._read if place in places and not memory.expired()), "")
        self._unclaimed.pop(path, None)
        self._take(path, sum(size for _, size in _named(state)))

    def _take(self, path: str, num_elements: int) -> None:
        self._has_news = True
        self._num_elements = max(self._num_elements, num_elements)
        if path:
            self._files.pop(path, None)
            self._files[path] = None
            if len(self._files) > MAX_FILES:
                del self._files[next(iter(self._files))]


def _named(state: Any) -> Iterator[tuple[str, int]]:
    """Return (name, number of elements) of the tensors in a state."""
    entries = islice(_entries(state), MAX_ENTRIES)
    return ((str(name), part.numel()) for name, part in entries if isinstance(part, torch.Tensor))


def _entries(thing: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    # Only a dict is searched: another mapping may read a file for each of its values.
    for name, part in thing.items() if isinstance(thing, dict) and depth < MAX_DEPTH else ():
        yield name, part
        yield from _entries(part, depth + 1)


def _placed(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a state that have an address in memory."""
    for part in islice(_parts(state), MAX_ENTRIES):
        if type(part) in (torch.Tensor, torch.nn.Parameter) and part.layout is torch.strided and part.numel():
            yield part


def _parts(thing: Any, depth: int = 0) -> Iterator[Any]:
    yield thing
    if depth < MAX_DEPTH:
        is_list = isinstance(thing, (list, tuple))
        parts = islice(thing, MAX_LISTED) if is_list else thing.values() if isinstance(thing, dict) else ()
        for part in parts:
            yield from _parts(part, depth + 1)
