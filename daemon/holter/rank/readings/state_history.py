"""What the training state was like while it trained: how large each tensor was, and its fingerprint after the last step that was read.

    weights, frozen ones too      all models' parameters, and what optimizers hold besides (master weights, partitions)
    the optimizers' state         each kind (exp_avg, exp_avg_sq …) by itself
    buffers                       such as statistics of a normalisation

It is read with the vitals, in turn, as many bytes at a time as the trained weights have. A halt compares what it is about to save with this history:
a weight of 1e4 where no weight was ever beyond 0.3 is finite, but training did not make it.

A tensor's usual size is the largest that it has reached by degrees. A jump is not taken in, or one look at a damaged weight would make its size
usual.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from holter.rank.models import Model, Models
from holter.rank.readings.samples import is_readable, local
from holter_kernels import summarize

LEAST_BYTES = 16 << 20
"""Bytes that are read at one vital step, if the trained weights have fewer."""
WEIGHTS, BUFFERS = "weights", "buffers"
JUMPS = {WEIGHTS: 100.0, BUFFERS: 1e6}
"""How much a tensor may grow between two looks, as a multiple of its usual size or the largest usual size of its kind."""
MOMENT_JUMP, SQUARE_JUMP = 1e3, 1e6
"""The same for an optimizer's moments: gradients may well grow a thousandfold, and their squares then a millionfold."""
SQUARES = ("sq", "square", "sum")
NUM_STILL = 3
"""Number of readings in a row without a change, after which a change is not the script's habit."""


class StateTensor(NamedTuple):
    """One tensor of the state. It is held weakly, like everything that belongs to the script."""

    name: str
    kind: str
    tensor: "weakref.ref[Any]"
    is_frozen: bool
    num_bytes: int


@dataclass
class _Known:
    entry: StateTensor
    usual: float
    """The largest magnitude that the tensor has reached by degrees."""
    step: int
    """The step after which it was last read."""
    fingerprint: int = 0
    num_still: int = 0
    """Number of readings in a row in which it had not moved."""


class StateHistory:
    """The history of one rank's training state."""

    def __init__(self) -> None:
        self.touched: set[str] = set()
        """Names of parameters that were seen to move between two steps: the script itself writes to them."""
        self._disturbed: dict[str, list[int]] = {}
        """Steps at which each frozen tensor was found moved; -1 stands for a tensor that had moved before: this is the script's habit."""
        self._known: dict[int, _Known] = {}
        self._usual: dict[str, float] = {}
        """The largest usual size of each kind."""
        self._place = 0
        self._state: tuple[Any, ...] = ()
        self._entries: list[StateTensor] = []
        self._num_trained_bytes = 0

    def see_disturbed(self, name: str, step: int, num_still: int) -> None:
        """Note that a frozen tensor, not a copy of a live one, was found moved after `num_still` readings without a change."""
        self._disturbed.setdefault(name, []).append(step if num_still >= NUM_STILL else -1)

    def choose(self, models: Models, optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[StateTensor, Any]]:
        """Choose the tensors to read now: as many bytes as the trained weights have, beginning where the last reading ended."""
        every = self._alive(models, optimizers)
        if not every:
            return []
        room, start = max(self._num_trained_bytes, LEAST_BYTES), self._place % len(every)
        chosen: list[tuple[StateTensor, Any]] = []
        for entry, tensor in every[start:] + every[:start]:
            room -= entry.num_bytes
            if room < 0 and chosen:
                break
            chosen.append((entry, tensor))
        self._place = (start + len(chosen)) % len(every)
        return chosen

    def _alive(self, models: Models, optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[StateTensor, Any]]:
        """Return all tensors of the state. They are looked for again only when models or optimizers have changed: it takes milliseconds."""
        state = models.generation, *((id(optimizer), len(optimizer.state)) for optimizer in optimizers)
        found = [(entry, entry.tensor()) for entry in self._entries]
        if state != self._state or any(tensor is None for _, tensor in found):
            self._state, self._entries = state, list(_entries(models, optimizers))
            found = [(entry, entry.tensor()) for entry in self._entries]
            trained = (entry for entry in self._entries if entry.kind == WEIGHTS and not entry.is_frozen)
            self._num_trained_bytes = sum(entry.num_bytes for entry in trained)
        return found

    def learn(self, step: int, chosen: Sequence[StateTensor], table: Any) -> None:
        """Take in sizes and fingerprints of these tensors, which were read after `step`."""
        for row, entry in enumerate(chosen):
            tensor, size = entry.tensor(), float(table.absmax[row])
            if tensor is None or not table.numel[row]:
                continue
            known = self._known.get(id(tensor))
            if known is None or known.entry.tensor() is not tensor:
                known = self._known[id(tensor)] = _Known(entry, size, step)
                self._usual.setdefault(entry.kind, size)
            if size <= self._limit(known):
                known.usual = max(known.usual, size)
                self._usual[entry.kind] = max(self._usual[entry.kind], size)
            now = int(table.fingerprint[row])
            known.num_still = known.num_still + 1 if now == known.fingerprint else 0
            known.fingerprint, known.step, known.entry = now, step, entry
        # Forget the tensors that are gone.
        if len(self._known) > 2 * len(chosen) + 4096:
            self._known = {key: known for key, known in self._known.items() if known.entry.tensor() is not None}

    def unread(self, models: Models, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
        """Return the names of weights and of optimizers' state tensors that have not been read yet."""
        return [
            entry.name
            for entry, tensor in self._alive(models, optimizers)
            if tensor is not None and entry.kind != BUFFERS and id(tensor) not in self._known
        ]

    def judge(self, completed: int, *, is_live: bool = True) -> dict[str, str]:
        """Return what is odd about the state after `completed` steps, one sentence per tensor; `is_live`: it is what the last step left."""
        held = [(known, tensor) for known in list(self._known.values()) if (tensor := known.entry.tensor()) is not None]
        held = [(known, tensor) for known, tensor in held if is_readable(local(tensor))]
        if not held:
            return {}
        # Read the same tensors as before, not their local parts: a shard's fingerprint depends on its place in the whole.
        table, found = summarize([tensor for _, tensor in held], histogram="off"), {}
        for row, (known, _) in enumerate(held):
            entry, size = known.entry, float(table.absmax[row])
            if size > self._limit(known):
                found[entry.name] = (
                    f"holds values of up to {size:.3g}, where until now it was {known.usual:.3g} at most"
                )
            elif (steps := self._disturbed.get(entry.name)) and entry.is_frozen and -1 not in steps:
                found[entry.name] = f"is frozen, and was changed by step {steps[0]}"
            elif is_live and int(table.fingerprint[row]) != known.fingerprint and self._must_be_same(known, completed):
                since = f"step {known.step}" if entry.is_frozen else "the last step ended"
                found[entry.name] = f"has changed since {since}, and no step has done that"
        return found

    def _must_be_same(self, known: _Known, completed: int) -> bool:
        """Whether nothing may have changed a tensor since it was last read."""
        entry, is_last = known.entry, known.step == completed - 1 and known.entry.kind == WEIGHTS
        return entry.name not in self.touched and (known.num_still >= NUM_STILL if entry.is_frozen else is_last)

    def _limit(self, known: _Known) -> float:
        kind = known.entry.kind
        jump = JUMPS.get(kind, SQUARE_JUMP if any(part in kind for part in SQUARES) else MOMENT_JUMP)
        return jump * max(known.usual, self._usual[kind])


def _entries(models: Models, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[StateTensor]:
    """Yield all weights, buffers and optimizer states of which this rank holds elements."""
    names: dict[int, str] = {}
    for model in models.all():
        for name, parameter in model.parameters:
            # ZeRO-3 keeps this rank's part of the parameter in an attribute.
            held = getattr(parameter, "ds_tensor", parameter)
            if id(held) not in names and is_readable(local(held)):
                names[id(parameter)] = names[id(held)] = name
                yield _entry(name, WEIGHTS, held, is_frozen=not parameter.requires_grad)
        yield from _buffers(model)
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                name = names.get(id(parameter), f"master weights of group {number}")
                if id(parameter) not in names and is_readable(local(parameter)):
                    yield _entry(name, WEIGHTS, parameter)
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and value.dim() and is_readable(local(value)):
                        yield _entry(f"optimizer: {name}.{key}", str(key), value)


def _buffers(model: Model) -> Iterator[StateTensor]:
    """Yield the buffers of a model that this rank can read."""
    for name, buffer in model.buffers:
        if is_readable(local(buffer)):
            yield _entry(name, BUFFERS, buffer)


def _entry(name: str, kind: str, tensor: Any, *, is_frozen: bool = False) -> StateTensor:
    part = local(tensor)
    return StateTensor(name, kind, weakref.ref(tensor), is_frozen, int(part.numel() * part.element_size()))
