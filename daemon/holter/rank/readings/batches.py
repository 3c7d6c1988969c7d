"""Inputs of a model's last call, kept in case a NaN appears; signatures and statistics of batches.

At a healthy step only a few thousand elements are read, for the signature; everything is read only at a step of comparison. When a loss is not
finite, the inputs are still there and are read then. They are kept detached: the storage is shared, the graph is not held. Statistics of small
tensors are computed by torch, which takes microseconds; those of large ones by the fused pass, which reads memory once.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from holter.rank import accelerator
from holter.rank.readings.loss_lines import Place, caller
from holter.records import Nonfinite
from holter_kernels import summarize
from holter_kernels.cpu import fingerprint_memory
from holter_kernels.layout import FORMATS

_samples: Any
try:
    from holter.rank import _samples
except ImportError:
    # There was no compiler.
    _samples = None

MAX_LEAVES = 64
MAX_DEPTH = 4
MAX_SIGNED = 8
"""Number of tensors of a batch that its signature covers."""
SIGNED_BYTES = 1 << 14
"""Bytes read of each tensor, in `NUM_RUNS` runs spread over all of it: the start of a padded sequence, or the margin of an image, is the same in all."""
NUM_RUNS = 8
MASK = (1 << 64) - 1
SCALARS = (int, float, str, bytes, type(None))
SMALL = 1 << 16
SAMPLED_INTEGERS = 1 << 20
"""Of an integer tensor with more elements than this, only every n-th is read."""
_SURVEYED = {torch.float32: 0, torch.float64: 1, torch.int64: 2, torch.int32: 3}
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})

HOST = torch.device("cpu")

Leaf = tuple[str, torch.Tensor]
"""A path in the batch, and the tensor at that path."""


@dataclass
class Inputs:
    """One call of a model: its arguments as they were, and their tensors with paths."""

    model: Callable[[], torch.nn.Module | None]
    """A weak reference to the model: inputs kept in case of a NaN must not keep a model alive."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Leaf]
    """The tensors of the arguments, by path."""
    leaves: list[tuple[str, torch.Tensor, int]]
    """The same tensors with their versions when the model was called: a higher version now means that the tensor was changed in place."""
    random_state: torch.Tensor
    autocast: tuple[bool, torch.dtype]
    """Whether autocast was enabled on the tensors' device, and its dtype."""
    device: torch.device
    """Device of the first tensor that is not in host memory; the host if there is none."""
    device_state: torch.Tensor | None
    """State of that device's random generator; None if the device is the host, or cannot be asked now."""
    called: Place | None = None
    """Where the script called the model."""


def leaves(thing: Any, path: str, depth: int = 0) -> Iterator[Leaf]:
    """Yield the tensors of a batch, each with the path that a person would write: `batch['x'][0]`."""
    if isinstance(thing, torch.Tensor):
        yield path, thing.detach() if thing.requires_grad else thing
    elif depth < MAX_DEPTH and isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from leaves(value, f"{path}[{key!r}]", depth + 1)
    elif depth < MAX_DEPTH and isinstance(thing, (list, tuple)) and not _is_text(thing):
        for index, value in enumerate(thing[:MAX_LEAVES]):
            yield from leaves(value, f"{path}[{index}]", depth + 1)


def _is_text(thing: list[Any] | tuple[Any, ...]) -> bool:
    """Whether this is a long list of words or numbers, which need not be searched for tensors."""
    return len(thing) > MAX_SIGNED and isinstance(thing[0], SCALARS) and isinstance(thing[-1], SCALARS)


def detached(thing: Any, depth: int = 0) -> Any:
    """Return the same arguments with their tensors detached, so that keeping them does not keep the graph."""
    if isinstance(thing, torch.Tensor):
        return thing.detach()
    if depth < MAX_DEPTH and type(thing) in (list, tuple):
        return type(thing)([detached(value, depth + 1) for value in thing])
    if depth < MAX_DEPTH and type(thing) is dict:
        return {key: detached(value, depth + 1) for key, value in thing.items()}
    return thing


def pipeline_stage() -> tuple[int, bool] | None:
    """Return the stage of torch's pipelining that is calling its model now: its number, and whether it is the first; None outside of a stage.

    The first stage is fed by the script; it receives nothing from another.
    """
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    frame = sys._getframe() if stages is not None else None  # noqa: SLF001
    while frame is not None:
        if frame.f_globals is vars(stages):
            stage = frame.f_locals.get("self")
            if isinstance(index := getattr(stage, "stage_index", None), int):
                return index, bool(getattr(stage, "is_first", index == 0))
        frame = frame.f_back
    return None


def capture(model: Callable[[], torch.nn.Module | None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Record a call of the model: its inputs, and the random state and autocast settings it is called with."""
    if len(args) == 1 and isinstance(args[0], torch.Tensor):
        args = (args[0].detach(),)
        found: list[Leaf] = [("input", args[0])]
    else:
        args = detached(args)
        found = list(leaves(args[0], "input") if len(args) == 1 else leaves(args, "input"))
    if kwargs:
        kwargs = detached(kwargs)
        for name, value in kwargs.items():
            found += leaves(value, name)
    device = HOST
    for _, tensor in found:
        if not tensor.is_cpu and not tensor.is_meta:
            device = tensor.device
            break
    generator = None if device is HOST else accelerator.generator_of(device)
    del found[MAX_LEAVES:]
    return Inputs(
        model=model,
        args=args,
        kwargs=kwargs,
        tensors=found,
        leaves=[(path, t, t._version) for path, t in found],  # noqa: SLF001
        random_state=torch.default_generator.get_state(),
        autocast=(torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)),
        device=device,
        device_state=None if generator is None else generator.get_state(),
        called=caller(),
    )


def tensors_of(call: Inputs | None) -> list[Leaf]:
    """Return the tensors that a model was given, with their paths; empty without a call."""
    return call.tensors if call else []


def on_device(call: Inputs) -> list[tuple[str, torch.Tensor, int]]:
    """Return the call's floating-point tensors on a device, which may hold NaN; a batch of token numbers has none."""
    return [leaf for leaf in call.leaves if leaf[1].device.type != "cpu" and _is_float(leaf[1])]


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel() > 0


def fold(signature: int, other: int) -> int:
    """Combine two signatures into one that depends on their order; an `other` of 0 changes nothing."""
    return (signature * 0x9E3779B97F4A7C15 + other) & MASK if other else signature


def sign(tensors: list[torch.Tensor]) -> int:
    """Return a cheap signature, the same for equal batches on every rank; 0 if no tensor in host memory has two elements."""
    signature = 0
    for tensor in tensors[:MAX_SIGNED]:
        if tensor.numel() < 2 or not _is_here(tensor):  # noqa: PLR2004
            continue
        mark = _mark(tensor if tensor.is_contiguous() else corner(tensor).contiguous())
        for extent in tensor.shape:
            mark = (mark * 31 + extent) & MASK
        signature = fold(signature, mark or 1)
    return signature


def _is_here(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype in FORMATS
    )


def _mark(tensor: torch.Tensor) -> int:
    """Fingerprint a contiguous tensor, a large one by runs; it reads the tensor's own memory and copies nothing."""
    numel, size, address, fmt = tensor.numel(), tensor.element_size(), tensor.data_ptr(), FORMATS[tensor.dtype]
    if not _has_memory(tensor):
        return 0
    if numel * size <= SIGNED_BYTES:
        return int(fingerprint_memory(fmt, address, numel, 0))
    length = SIGNED_BYTES // size // NUM_RUNS
    places = [run * (numel - length) // (NUM_RUNS - 1) for run in range(NUM_RUNS)]
    return int(sum([fingerprint_memory(fmt, address + place * size, length, place) for place in places])) & MASK


def _has_memory(tensor: torch.Tensor) -> bool:
    return bool(tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.element_size())


def corner(tensor: torch.Tensor) -> torch.Tensor:
    """Return a part of at most `SIGNED_BYTES`: making the whole tensor contiguous would copy it."""
    while tensor.nbytes > SIGNED_BYTES:
        first = tensor.shape[0]
        tensor = tensor[0] if first == 1 else tensor[: max(1, first * SIGNED_BYTES // tensor.nbytes)]
    return tensor


class Survey(NamedTuple):
    """Statistics of one tensor of a batch; range, mean and spread are over its finite values."""

    path: str
    numel: int
    low: float
    high: float
    mean: float
    nans: int = 0
    infs: int = 0
    spread: float = math.nan

    def numbers(self) -> dict[str, float]:
        """Return the statistics by the names of `records.NUMBERS`; empty if no value is finite."""
        path, numel, low, high, mean, nans, infs, spread = self
        if not math.isfinite(low):
            return {}
        is_constant = numel > 1 and low == high and not nans and not infs
        values = (low, high, mean, max(abs(low), abs(high)), float(is_constant), spread)
        # The spread comes last, and is left out if it is not known.
        return dict(zip(_names(path), values if math.isfinite(spread) else values[:-1], strict=False))


@functools.lru_cache
def _names(path: str) -> tuple[str, ...]:
    return tuple(f"batch.{path}.{name}" for name in ("min", "max", "mean", "absmax", "is_constant", "spread"))


def survey(leaves: list[Leaf]) -> list[Survey]:
    """Return statistics of these tensors, except those on a device and those that are neither float nor integer."""
    found, large = [], []
    for path, tensor in leaves:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
            continue
        if (at_once := _at_once(path, tensor)) is not None:
            found.append(at_once)
        elif tensor.dtype in _INTEGERS:
            found.append(_integers(path, tensor))
        elif tensor.is_floating_point():
            quick = _floats(path, tensor) if tensor.numel() <= SMALL else None
            if quick is not None:
                found.append(quick)
            else:
                large.append((path, tensor))
    return found + (_fused(large) if large else [])


def _at_once(path: str, tensor: torch.Tensor) -> Survey | None:
    """Survey a small contiguous tensor with one native call; None if it is not one, or holds something that is not finite."""
    kind = _SURVEYED.get(tensor.dtype)
    if _samples is None or kind is None or tensor.numel() > SMALL or not _is_here(tensor) or not tensor.is_contiguous():
        return None
    if not _has_memory(tensor):
        return None
    found = _samples.survey(tensor.data_ptr(), tensor.numel(), kind)
    if found is None:
        return None
    low, high, mean, spread = found
    return Survey(path, tensor.numel(), low, high, mean, spread=spread)


def _integers(path: str, tensor: torch.Tensor) -> Survey:
    if tensor.numel() > SAMPLED_INTEGERS and tensor.is_contiguous():
        tensor = tensor.view(-1)[:: -(-tensor.numel() // SAMPLED_INTEGERS) | 1]
    low, high = tensor.aminmax()
    few = tensor.reshape(-1)[:: -(-tensor.numel() // SMALL) | 1] if tensor.numel() > SMALL else tensor
    spread, mean = torch.std_mean(few.float(), correction=0)
    return Survey(path, tensor.numel(), float(low), float(high), float(mean), spread=float(spread))


def _floats(path: str, tensor: torch.Tensor) -> Survey | None:
    """Survey with torch; None if something is not finite and must be counted, which the fused pass does."""
    values = tensor if tensor.dtype is torch.float64 else tensor.float()
    low, high = map(float, values.aminmax())
    if not math.isfinite(low) or not math.isfinite(high):
        return None
    spread, mean = torch.std_mean(values, correction=0)
    return Survey(path, tensor.numel(), low, high, float(mean), spread=float(spread))


def _fused(leaves: list[Leaf]) -> list[Survey]:
    table = summarize([tensor for _, tensor in leaves], histogram="off")
    found = []
    for row, (path, tensor) in enumerate(leaves):
        nans, infs = int(table.nans[row]), int(table.pos_infs[row] + table.neg_infs[row])
        num_finite = tensor.numel() - nans - infs
        low, high = (float(table.min[row]), float(table.max[row])) if num_finite else (math.nan, math.nan)
        mean = float(table.sum[row]) / max(num_finite, 1)
        square = float(table.square_sum[row]) / max(num_finite, 1)
        spread = math.sqrt(max(square - mean * mean, 0.0)) if num_finite else math.nan
        found.append(Survey(path, tensor.numel(), low, high, mean, nans, infs, spread))
    return found


def read(tensors: list[Leaf]) -> list[Nonfinite]:
    """Return the tensors of a batch that are not finite; only those in host memory, for a device is never waited for."""
    here = [(path, t) for path, t in tensors if t.device.type == "cpu" and t.layout == torch.strided]
    return [
        Nonfinite(where="input", name=found.path, nans=found.nans, infs=found.infs, numel=found.numel)
        for found in (_fused(here) if here else ())
        if found.nans or found.infs
    ]
