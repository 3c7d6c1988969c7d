"""A nested state as it was: plain values copied at once, tensors taken out, to be copied elsewhere and perhaps later.

{"step": 3, "exp_avg": tensor}   ──take──▶   {"step": 3, "exp_avg": Slot(0)}   and   [tensor]
put(live, image, copies)         ──▶         copies go into the memory of the live tensors; what is gone is made anew
"""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from holter.errors import RewindError
from holter.rank.readings.samples import local

_DICTS = (dict, OrderedDict)


@dataclass(frozen=True)
class Slot:
    """Where a tensor stood."""

    index: int
    device: torch.device
    is_placed: bool
    """A DTensor: only its owner can make another."""


def take(state: Any, tensors: list[torch.Tensor], apart: Sequence[Any] = ()) -> Any:
    """The image of a state; its tensors are appended to `tensors`. What is in `apart` is named, not copied."""
    if isinstance(state, torch.Tensor):
        tensors.append(state)
        return Slot(len(tensors) - 1, state.device, hasattr(state, "placements"))
    if type(state) in _DICTS:
        return {key: take(value, tensors, apart) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(take(value, tensors, apart) for value in state)
    # A scheduler's state may hold methods of its own: a deep copy of them would take the optimizer along.
    return copy.deepcopy(state, {id(each): each for each in apart})


def put(live: Any, image: Any, copies: Sequence[torch.Tensor]) -> Any:
    """What an image shows, in place of `live`, and in its memory where it fits. Plain values are handed over: an image serves once."""
    if isinstance(image, Slot):
        return _put_tensor(live, image, copies[image.index])
    if type(image) is dict:
        into = live if type(live) in _DICTS else {}
        for key in into.keys() - image.keys():
            del into[key]
        for key, value in image.items():
            into[key] = put(into.get(key), value, copies)
        return into
    if type(image) in (list, tuple):
        olds = live if type(live) is type(image) else ()
        return type(image)(
            put(old, value, copies) for old, value in zip_longest(olds[: len(image)], image, fillvalue=None)
        )
    return image


def _put_tensor(live: Any, slot: Slot, kept: torch.Tensor) -> torch.Tensor:
    if isinstance(live, torch.Tensor):
        held = local(live)
        if (held.shape, held.dtype) == (kept.shape, kept.dtype):
            held.copy_(kept)
            return live
    if slot.is_placed:
        raise RewindError("a sharded tensor that was copied does not exist any more")
    return kept.to(slot.device, copy=True)
