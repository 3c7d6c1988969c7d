"""Notices weights that change in place between two calls within one autocast region: the casts that autocast caches do not change with them.

    with torch.autocast(...):
        policy = model(x)          the region keeps a bfloat16 copy of each weight
        swap_in(reference)         the weights change, the copies do not
        reference = model(x)       computed with the old copies: its result equals the first, bit for bit

A region ends where its cache is cleared, which torch itself does at the outermost exit; a script that clears the cache after a swap is correct.
Nothing is sampled until a region has called a model twice; from then on the first 64 steps are sampled, and later the steps of comparison.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holter.rank import accelerator
from holter.rank.context import Context
from holter.rank.readings.samples import is_plain_moment, is_readable, local, spread, strided
from holter.records import Swapped
from holter_kernels import root, summarize

MAX_TENSORS = 64
NUM_ELEMENTS = 64
MAX_DEPTH = 4
MAX_LEAVES = 16
MAX_BYTES = 64 << 20
"""Arguments and results that are larger than this in total are not fingerprinted."""
EVERY_STEP_UNTIL = 64


@dataclass
class _Call:
    region: int
    num_calls: int = 1
    weights: torch.Tensor | None = None
    """A sample of the parameters at the region's first call; None if none was taken."""
    inputs: int = 0
    outputs: int = 0
    distance: float = 0.0
    """Relative distance of the weights at the present call from those at the first one; 0 if they are equal."""
    is_input_equal: bool = False


class RegionProbe:
    """Compares the calls of a model within one autocast region."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._region = 0
        self._is_wanted = False
        self._num_times = 0
        self._calls: weakref.WeakKeyDictionary[torch.nn.Module, _Call] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Patch torch so that we notice when a region ends."""
        self._context.patches.replace("clear_autocast_cache", self._around_clear, torch)

    def _around_clear(self, original: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(original)
        def clear_autocast_cache() -> None:
            original()
            self._region += 1

        return clear_autocast_cache

    def begin(self, module: torch.nn.Module, arguments: Any) -> None:
        """Note that a model is called: sample it at the region's first call, compare it at later ones."""
        if not _is_cached() or not is_plain_moment():
            return
        call = self._calls.get(module)
        is_first = call is None or call.region != self._region
        if is_first:
            call = self._calls[module] = _Call(self._region)
            if self._is_looked_at():
                call.weights, call.inputs = _sample(module), _fingerprint(arguments)
            return
        assert call is not None
        call.num_calls += 1
        self._is_wanted = True
        call.distance = _distance(call.weights, _sample(module)) if call.weights is not None else 0.0
        if call.distance:
            call.is_input_equal = bool(call.inputs) and call.inputs == _fingerprint(arguments)

    def end(self, module: torch.nn.Module, output: Any) -> None:
        """Note that the call has returned; report if the weights changed since the region's first call, the 1st, 2nd, 4th, 8th… time."""
        call = self._calls.get(module)
        if call is None or call.weights is None or call.region != self._region:
            return
        if call.num_calls == 1:
            call.outputs = _fingerprint(output)
        elif call.distance:
            self._num_times += 1
            if self._num_times & (self._num_times - 1) == 0:
                swapped = Swapped(
                    distance=call.distance,
                    is_input_equal=call.is_input_equal,
                    is_output_equal=bool(call.outputs) and call.outputs == _fingerprint(output),
                    num_times=self._num_times,
                )
                self._context.writer.say(self._context.log.step, swapped)
            call.distance = 0.0

    def _is_looked_at(self) -> bool:
        step = self._context.log.step
        return self._is_wanted and (step < EVERY_STEP_UNTIL or self._context.schedule.plan.is_check(step))


def _is_cached() -> bool:
    return torch.is_autocast_cache_enabled() and accelerator.is_autocast_on()


def _sample(module: torch.nn.Module) -> torch.Tensor | None:
    """Return a sample of the parameters in host memory, None if there are none.

    Values are compared, not version counters: a write through `.data` does not count the version up.
    """
    held = [tensor for p in module.parameters() if (tensor := local(p)).is_cpu and is_readable(tensor)]
    chosen = [held[index] for index in spread(len(held), MAX_TENSORS)]
    return torch.cat([strided(tensor, NUM_ELEMENTS).double() for tensor in chosen]) if chosen else None


def _distance(before: torch.Tensor, now: torch.Tensor | None) -> float:
    """Return the relative distance between two samples; 0 if nothing changed or they cannot be compared."""
    if now is None or now.shape != before.shape or torch.equal(before, now):
        return 0.0
    return float((now - before).norm()) / max(float(before.norm()), 1e-30)


def _fingerprint(thing: Any) -> int:
    """Return a fingerprint of all tensors in arguments or results; 0 if none is in host memory, or if there are too many or too large ones."""
    found: list[torch.Tensor] = []
    _collect(thing, found)
    here = [t for t in found if t.is_cpu and t.layout is torch.strided and t.numel()]
    if not here or len(here) > MAX_LEAVES or sum(t.nbytes for t in here) > MAX_BYTES:
        return 0
    return int(root(summarize(here, histogram="off").fingerprint))


def _collect(thing: Any, found: list[torch.Tensor], depth: int = 0) -> None:
    if isinstance(thing, torch.Tensor):
        found.append(thing.detach())
    elif depth < MAX_DEPTH:
        parts = thing.values() if isinstance(thing, Mapping) else thing if isinstance(thing, (list, tuple)) else ()
        for part in parts:
            _collect(part, found, depth + 1)
