"""What the model was fed: the last inputs, kept for the moment a NaN asks about them, and fingerprints of batches.

Inputs are not read on a healthy step unless it is a step of comparison: when a loss is not finite they are still there and are
looked at then. Kept detached: storage is shared, the graph is not held.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holter.records import Nonfinite
from holter_kernels import summarize

MAX_LEAVES = 64
MAX_DEPTH = 4
MASK = (1 << 64) - 1

Leaf = tuple[str, torch.Tensor]
"""Path in the batch, and the tensor there."""


@dataclass
class Inputs:
    """One call of a model: its arguments as they were, and their tensors by path."""

    model: Callable[[], torch.nn.Module | None]
    """A weak reference: what is kept for a question must not keep a model alive."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[tuple[str, torch.Tensor, int]]
    """Path, tensor, and the tensor's version when the model was called: a later one was changed in place."""
    random_state: torch.Tensor
    autocast: tuple[bool, torch.dtype]


def leaves(thing: Any, path: str, depth: int = 0) -> Iterator[Leaf]:
    """Tensors of a batch with the path a person would write: `batch['x'][0]`."""
    if isinstance(thing, torch.Tensor):
        yield path, thing.detach()
    elif depth < MAX_DEPTH and isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from leaves(value, f"{path}[{key!r}]", depth + 1)
    elif depth < MAX_DEPTH and isinstance(thing, (list, tuple)):
        for index, value in enumerate(thing):
            yield from leaves(value, f"{path}[{index}]", depth + 1)


def detached(thing: Any, depth: int = 0) -> Any:
    """The same arguments with detached tensors, so that keeping them keeps no graph."""
    if isinstance(thing, torch.Tensor):
        return thing.detach()
    if depth < MAX_DEPTH and type(thing) in (list, tuple):
        return type(thing)(detached(value, depth + 1) for value in thing)
    if depth < MAX_DEPTH and type(thing) is dict:
        return {key: detached(value, depth + 1) for key, value in thing.items()}
    return thing


def capture(model: Callable[[], torch.nn.Module | None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Remember a call of the model."""
    args, kwargs = detached(args), detached(kwargs)
    found = list(leaves(args[0], "input") if len(args) == 1 else leaves(args, "input"))
    for name, value in kwargs.items():
        found += leaves(value, name)
    return Inputs(
        model=model,
        args=args,
        kwargs=kwargs,
        leaves=[(path, t, t._version) for path, t in found[:MAX_LEAVES]],  # noqa: SLF001
        random_state=torch.random.get_rng_state(),
        autocast=(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    )


def read(tensors: list[Leaf]) -> tuple[int, list[Nonfinite]]:
    """Fingerprint of a batch, and which of its tensors are not finite; host memory only, a device is never waited for."""
    here = [(path, t) for path, t in tensors if t.device.type == "cpu" and t.layout == torch.strided]
    if not here:
        return 0, []
    table = summarize([t for _, t in here], histogram="off")
    fingerprint = 0
    bad = []
    for row, (path, tensor) in enumerate(here):
        fingerprint = (fingerprint * 31 + int(table.fingerprint[row])) & MASK
        nans, infs = int(table.nans[row]), int(table.pos_infs[row] + table.neg_infs[row])
        if nans or infs:
            bad.append(Nonfinite(where="input", name=path, nans=nans, infs=infs, numel=tensor.numel()))
    return fingerprint, bad
