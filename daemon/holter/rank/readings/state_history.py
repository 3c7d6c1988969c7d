"""What the training state was like while it trained: how large each tensor was, and its fingerprint after the last step that was read.

    weights, frozen ones too      all models' parameters, and what optimizers hold besides (master weights, partitions)
    what optimizers remember      each kind (exp_avg, exp_avg_sq …) by itself
    buffers                       those that are saved with a model, such as statistics of a normalisation

Read with the vitals, as many bytes at a time as train, in turn. A halt holds what it is about to save against it: a weight of 1e4 that was never
beyond 0.3, and where no weight was, is finite and is not what training made.

A tensor's usual size is the largest that was seen of it, as long as it came there by degrees: what jumps is not taken in, or one look at a damaged weight
would make it usual.
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
"""Read at one vital step, if fewer bytes than that train."""
WEIGHTS, BUFFERS = "weights", "buffers"
JUMPS = {WEIGHTS: 100.0, BUFFERS: 1e6}
"""How many times its usual size, and the largest usual size of its kind, a tensor may come to between two looks."""
MOMENT_JUMP, SQUARE_JUMP = 1e3, 1e6
"""Gradients may well be a thousand times what they were; their squares are then a million times."""
SQUARES = ("sq", "square", "sum")
NUM_STILL = 3
"""Readings in a row without a change, after which one is not the script's habit."""


class StateTensor(NamedTuple):
    """One tensor of the state. It is held weakly, as everything of the script's is."""

    name: str
    kind: str
    tensor: "weakref.ref[Any]"
    is_frozen: bool
    num_bytes: int


@dataclass
class _Known:
    entry: StateTensor
    usual: float
    """The largest magnitude that it came to by degrees."""
    step: int
    """After which it was last read."""
    fingerprint: int = 0
    num_still: int = 0
    """Readings in a row in which it had not moved."""


class StateHistory:
    """One rank's."""

    def __init__(self) -> None:
        self.touched: set[str] = set()
        """Parameters that were seen to move between two steps: the script itself writes to them."""
        self._disturbed: dict[str, list[int]] = {}
        """Frozen tensor -> steps at which it was found moved; -1: it had not been still before, and so it is the script's habit."""
        self._known: dict[int, _Known] = {}
        self._usual: dict[str, float] = {}
        """Kind -> the largest usual size."""
        self._place = 0
        self._state: tuple[Any, ...] = ()
        self._entries: list[StateTensor] = []
        self._num_trained_bytes = 0

    def see_disturbed(self, name: str, step: int, num_still: int) -> None:
        """A frozen tensor that is nobody's copy was found moved, after so many readings without a change."""
        self._disturbed.setdefault(name, []).append(step if num_still >= NUM_STILL else -1)

    def choose(self, models: Models, optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[StateTensor, Any]]:
        """What is to be read now: as many bytes as train, beginning where the last reading ended."""
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
        """All there is to read; looked for again when models or optimizers have changed: naming a thousand tensors takes milliseconds."""
        state = models.generation, *((id(optimizer), len(optimizer.state)) for optimizer in optimizers)
        found = [(entry, entry.tensor()) for entry in self._entries]
        if state != self._state or any(tensor is None for _, tensor in found):
            self._state, self._entries = state, list(_entries(models, optimizers))
            found = [(entry, entry.tensor()) for entry in self._entries]
            trained = (entry for entry in self._entries if entry.kind == WEIGHTS and not entry.is_frozen)
            self._num_trained_bytes = sum(entry.num_bytes for entry in trained)
        return found

    def learn(self, step: int, chosen: Sequence[StateTensor], table: Any) -> None:
        """These were read after `step`."""
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
        # Those that are gone need not be remembered.
        if len(self._known) > 2 * len(chosen) + 4096:
            self._known = {key: known for key, known in self._known.items() if known.entry.tensor() is not None}

    def unread(self, models: Models, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
        """Weights, and what optimizers remember of them, that no reading has come to yet."""
        return [
            entry.name
            for entry, tensor in self._alive(models, optimizers)
            if tensor is not None and entry.kind != BUFFERS and id(tensor) not in self._known
        ]

    def judge(self, completed: int, *, is_live: bool = True) -> dict[str, str]:
        """What is odd about the state of so many completed steps, by tensor, a sentence each. With `is_live` it is what the last step left."""
        held = [(known, tensor) for known in list(self._known.values()) if (tensor := known.entry.tensor()) is not None]
        held = [(known, tensor) for known, tensor in held if is_readable(local(tensor))]
        if not held:
            return {}
        # As it was read before: a shard's fingerprint is that of its place in the whole.
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
        """Whether nothing may have changed it since it was last read."""
        entry, is_last = known.entry, known.step == completed - 1 and known.entry.kind == WEIGHTS
        return entry.name not in self.touched and (known.num_still >= NUM_STILL if entry.is_frozen else is_last)

    def _limit(self, known: _Known) -> float:
        kind = known.entry.kind
        jump = JUMPS.get(kind, SQUARE_JUMP if any(part in kind for part in SQUARES) else MOMENT_JUMP)
        return jump * max(known.usual, self._usual[kind])


def _entries(models: Models, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[StateTensor]:
    """Everything that trains, is frozen or is remembered, and that this rank holds elements of."""
    names: dict[int, str] = {}
    for model in models.all():
        for name, parameter in model.parameters:
            # ZeRO-3 keeps this rank's part of it elsewhere.
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
    """Saved ones: what is made anew at each start is not in a checkpoint."""
    for name, buffer in model.buffers:
        if is_readable(local(buffer)):
            yield _entry(name, BUFFERS, buffer)


def _entry(name: str, kind: str, tensor: Any, *, is_frozen: bool = False) -> StateTensor:
    part = local(tensor)
    return StateTensor(name, kind, weakref.ref(tensor), is_frozen, int(part.numel() * part.element_size()))
