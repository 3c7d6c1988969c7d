"""Was the batch to blame? Asked when the optimizer is given a gradient that is not finite; the weights are still untouched then.

The batch of the step is still held. If it was finite, it is replayed to find the module that made the NaN. The batch of every step is signed.
On a healthy step of comparison its statistics are taken (range, mean, whether constant, whether finite), and tensors that are never finite,
such as a mask of -inf, are learnt. Small tensors are read by torch, which takes microseconds; large ones by the fused pass, which reads memory once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from holter.rank.context import Context
from holter.rank.hooks.data import FetchedBatch
from holter.rank.readings import batches, nan_origin
from holter.rank.readings.batches import Inputs, Leaf
from holter.records import Nonfinite
from holter_kernels import summarize

MAX_REPLAYS = 3
"""A NaN has one origin; a run that goes on with it need not be replayed at every step."""
MAX_CALLS = 32
"""Calls of a step that are signed: a model may be called once for each element of a sequence."""
MAX_LEAVES = 8
"""Tensors of a batch whose statistics travel."""
SMALL = 1 << 16
SAMPLED_INTEGERS = 1 << 20
"""Of a larger tensor of integers every n-th is asked."""
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


class BatchBlameProbe:
    """Looks at batches when there is a reason to."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._num_replays = 0
        self._healthy_steps: dict[str, int] = {}
        """Tensors of a batch that were not finite on steps that were."""
        self._signature = 0
        """Of inputs that no backward pass has claimed yet."""
        self._num_calls = 0
        self._num_samples = [0, 0]
        """Of this step: by the models' inputs, by the loaders."""
        self._leaves: list[batches.Leaf] = []
        """The last loader's batch."""

    def see_call(self) -> None:
        """A model is called in training: its inputs are there."""
        self._num_calls += 1
        if self._num_calls > MAX_CALLS:
            return
        tensors = [tensor for _, tensor in _tensors(self._context.inputs.last)]
        self._signature = batches.fold(self._signature, batches.sign(tensors))
        self._num_samples[0] += next((t.shape[0] for t in tensors if t.dim()), 0)

    def begin_backward(self, fetched: list[FetchedBatch]) -> None:
        """What came since the last backward pass belongs to this step; `fetched` is what its loaders gave."""
        for batch in fetched:
            self._signature = batches.fold(self._signature, batch.signature)
            self._num_samples[1] += batch.num_samples
        if fetched:
            self._leaves = fetched[-1].leaves
        self._claim()

    def investigate(self) -> None:
        """The step is not finite: look for the fault in its batch, and if that is sound, for the module that made it."""
        context = self._context
        inputs = context.inputs.suspect or context.inputs.last
        bad = batches.read(_tensors(inputs))
        if all(entry.name in self._healthy_steps for entry in bad):
            # Labels go past the model.
            seen = {_place(tensor) for _, tensor in _tensors(inputs)}
            bad += batches.read([leaf for leaf in self._leaves if _place(leaf[1]) not in seen])
        for entry in bad:
            context.log.now.suspects.add(
                Nonfinite(
                    where="input",
                    name=entry.name,
                    nans=entry.nans,
                    infs=entry.infs,
                    numel=entry.numel,
                    healthy_steps=self._healthy_steps.get(entry.name, 0),
                )
            )
        is_sound = all(entry.name in self._healthy_steps for entry in bad)
        if is_sound and self._num_replays < MAX_REPLAYS:
            self._num_replays += 1
            self._replay(inputs)

    def observe(self, *, is_check: bool) -> None:
        """A step is about to be applied: its batch is complete."""
        self._claim()
        if is_check and not self._context.log.now.suspects.tensors:
            self._survey()
        self._leaves, self._num_calls, self._num_samples = [], 0, [0, 0]

    def _survey(self) -> None:
        """The step is healthy: take the statistics of its batch."""
        inputs, numbers = _tensors(self._context.inputs.last), self._context.log.now.numbers
        told = (self._leaves or inputs)[:MAX_LEAVES]
        found = {entry.path: entry for entry in survey(told)}
        for entry in found.values():
            numbers.update(entry.numbers())
        called, fetched = self._num_samples
        if called or fetched:
            # Loaders may be a batch ahead; but a model that is called twice for one loss sees its samples twice.
            is_one_call_each = self._num_calls == self._context.log.micro_step
            numbers["batch.num_samples"] = float(called if called and (is_one_call_each or not fetched) else fetched)
        # The loader's tensors are often the very inputs: no memory is read twice.
        paths = {_place(tensor): path for path, tensor in told}
        others = [(path, t) for path, t in inputs if t.is_floating_point() and _place(t) not in paths]
        odd = [entry.path for entry in survey(others) if entry.nans or entry.infs]
        for path, tensor in inputs:
            same = found.get(paths.get(_place(tensor), ""))
            if path in odd or (same is not None and (same.nans or same.infs)):
                self._healthy_steps[path] = self._healthy_steps.get(path, 0) + 1
        for path in {path for path, entry in found.items() if entry.nans or entry.infs} - {path for path, _ in inputs}:
            self._healthy_steps[path] = self._healthy_steps.get(path, 0) + 1

    def _claim(self) -> None:
        now = self._context.log.now
        now.batch, self._signature = batches.fold(now.batch, self._signature), 0

    def _replay(self, inputs: Inputs | None) -> None:
        context = self._context
        module = inputs.model() if inputs is not None else None
        model = next((model for model in context.models if model.inner is module), None)
        with context.guard.paused():
            found = nan_origin.find(inputs, model.prefix if model else "")
        context.writer.say(context.log.step, found)


def _tensors(inputs: Inputs | None) -> list[batches.Leaf]:
    return [(path, tensor) for path, tensor, _ in inputs.leaves] if inputs else []


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size, torch.dtype]:
    is_here = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return tensor.data_ptr() if is_here else id(tensor), tensor.shape, tensor.dtype


@dataclass(frozen=True)
class Survey:
    """One tensor of a batch; range and mean are over what is finite."""

    path: str
    numel: int
    low: float
    high: float
    mean: float
    nans: int = 0
    infs: int = 0

    def numbers(self) -> Iterator[tuple[str, float]]:
        """By the names of `records.NUMBERS`."""
        if math.isfinite(self.low):
            yield f"batch.{self.path}.min", self.low
            yield f"batch.{self.path}.max", self.high
            yield f"batch.{self.path}.mean", self.mean
            yield f"batch.{self.path}.absmax", max(abs(self.low), abs(self.high))
            is_constant = self.numel > 1 and self.low == self.high and not self.nans and not self.infs
            yield f"batch.{self.path}.is_constant", float(is_constant)


def survey(leaves: list[Leaf]) -> list[Survey]:
    """Statistics of these tensors; what lies on a device, or is neither float nor integer, is left out."""
    found, large = [], []
    for path, tensor in leaves:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
            continue
        if tensor.dtype in _INTEGERS:
            found.append(_integers(path, tensor))
        elif tensor.is_floating_point():
            quick = _floats(path, tensor) if tensor.numel() <= SMALL else None
            if quick is not None:
                found.append(quick)
            else:
                large.append((path, tensor))
    return found + (_fused(large) if large else [])


def _integers(path: str, tensor: torch.Tensor) -> Survey:
    if tensor.numel() > SAMPLED_INTEGERS and tensor.is_contiguous():
        tensor = tensor.view(-1)[:: -(-tensor.numel() // SAMPLED_INTEGERS) | 1]
    low, high = tensor.aminmax()
    return Survey(path, tensor.numel(), float(low), float(high), float(tensor.sum()) / tensor.numel())


def _floats(path: str, tensor: torch.Tensor) -> Survey | None:
    """None: something is not finite, and is to be counted."""
    low, high = map(float, tensor.float().aminmax())
    if not math.isfinite(low) or not math.isfinite(high):
        return None
    return Survey(path, tensor.numel(), low, high, float(tensor.mean(dtype=torch.float64)))


def _fused(leaves: list[Leaf]) -> list[Survey]:
    table = summarize([tensor for _, tensor in leaves], histogram="off")
    found = []
    for row, (path, tensor) in enumerate(leaves):
        nans, infs = int(table.nans[row]), int(table.pos_infs[row] + table.neg_infs[row])
        num_finite = tensor.numel() - nans - infs
        low, high = (float(table.min[row]), float(table.max[row])) if num_finite else (math.nan, math.nan)
        found.append(Survey(path, tensor.numel(), low, high, float(table.sum[row]) / max(num_finite, 1), nans, infs))
    return found
