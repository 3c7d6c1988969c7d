"""What the training state was like while it trained: how large each tensor was, and its fingerprint after the last step that was read.

    weights, frozen ones too      all models' parameters, and what optimizers hold besides (master weights, partitions)
    what optimizers remember      each kind (exp_avg, exp_avg_sq …) by itself

Read with the vitals, as many bytes at a time as train, in turn. A halt holds what it is about to save against it: a weight of 1e4 that was never
beyond 0.3, and where no weight was, is finite and is not what training made.

A tensor's usual size is the largest that was seen of it, as long as it came there by degrees: what jumps is not taken in, or one look at a damaged weight
would make it usual.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from holter.rank.models import Models
from holter.rank.readings.samples import is_readable, local
from holter_kernels import summarize

if TYPE_CHECKING:
    import weakref

LEAST_BYTES = 16 << 20
"""Read at one vital step, if fewer bytes than that train."""
WEIGHTS = "weights"
JUMPS = {WEIGHTS: 100.0}
"""How many times its usual size, and the largest usual size of its kind, a tensor may come to between two looks."""
MOMENT_JUMP, SQUARE_JUMP = 1e3, 1e6
"""Gradients may well be a thousand times what they were; their squares are then a million times."""
SQUARES = ("sq", "square", "sum")
NUM_STILL = 3
"""Readings in a row without a change, after which one is not the script's habit."""

Held = tuple[str, str, Any, bool]
"""Name, kind, tensor, whether it is frozen."""


@dataclass
class _Known:
    tensor: "weakref.ref[Any]"
    name: str
    kind: str
    is_frozen: bool
    usual: float
    step: int
    """After which it was last read."""
    fingerprint: int = 0
    num_still: int = 0
    """Of a frozen one: readings in a row in which it had not moved."""


class StateHistory:
    """One rank's."""

    def __init__(self) -> None:
        self.touched: set[str] = set()
        """Parameters that were seen to move between two steps: the script itself writes to them."""
        self._known: dict[int, _Known] = {}
        self._usual: dict[str, float] = {}
        """Kind -> the largest usual size."""
        self._place = 0

    def choose(self, models: Models, optimizers: Sequence[torch.optim.Optimizer]) -> list[Held]:
        """What is to be read now: as many bytes as train, beginning where the last reading ended."""
        every = list(_state(models, optimizers))
        if not every:
            return []
        trained = sum(_bytes(tensor) for _, kind, tensor, is_frozen in every if kind == WEIGHTS and not is_frozen)
        room, start = max(trained, LEAST_BYTES), self._place % len(every)
        chosen: list[Held] = []
        for held in every[start:] + every[:start]:
            room -= _bytes(held[2])
            if room < 0 and chosen:
                break
            chosen.append(held)
        self._place = (start + len(chosen)) % len(every)
        return chosen

    def learn(self, step: int, chosen: Sequence[tuple[str, str, "weakref.ref[Any]", bool]], table: Any) -> None:
        """These were read after `step`."""
        for row, (name, kind, reference, is_frozen) in enumerate(chosen):
            tensor, size = reference(), float(table.absmax[row])
            if tensor is None or not table.numel[row]:
                continue
            known = self._known.get(id(tensor))
            if known is None or known.tensor() is not tensor:
                known = self._known[id(tensor)] = _Known(reference, name, kind, is_frozen, size, step)
                self._usual.setdefault(kind, size)
            if size <= self._limit(known):
                known.usual = max(known.usual, size)
                self._usual[kind] = max(self._usual[kind], size)
            now = int(table.fingerprint[row])
            known.num_still = known.num_still + 1 if now == known.fingerprint else 0
            known.fingerprint, known.step, known.is_frozen = now, step, is_frozen
        # Those that are gone need not be remembered.
        if len(self._known) > 2 * len(chosen) + 4096:
            self._known = {key: known for key, known in self._known.items() if known.tensor() is not None}

    def judge(self, completed: int, *, is_live: bool = True) -> dict[str, str]:
        """What is odd about the state of so many completed steps, by tensor, a sentence each. With `is_live` it is what the last step left."""
        held = [(known, tensor) for known in list(self._known.values()) if (tensor := known.tensor()) is not None]
        held = [(known, tensor) for known, tensor in held if is_readable(local(tensor))]
        if not held:
            return {}
        # As it was read before: a shard's fingerprint is that of its place in the whole.
        table, found = summarize([tensor for _, tensor in held], histogram="off"), {}
        for row, (known, _) in enumerate(held):
            size = float(table.absmax[row])
            if size > self._limit(known):
                found[known.name] = (
                    f"holds values of up to {size:.3g}, where until now it was {known.usual:.3g} at most"
                )
            elif is_live and int(table.fingerprint[row]) != known.fingerprint and self._must_be_same(known, completed):
                since = f"step {known.step}" if known.is_frozen else "the last step ended"
                found[known.name] = f"has changed since {since}, and no step has done that"
        return found

    def _must_be_same(self, known: _Known, completed: int) -> bool:
        """Whether nothing may have changed it since it was last read."""
        is_last = known.step == completed - 1 and known.kind == WEIGHTS
        return known.name not in self.touched and (known.num_still >= NUM_STILL if known.is_frozen else is_last)

    def _limit(self, known: _Known) -> float:
        is_square = any(part in known.kind for part in SQUARES)
        jump = JUMPS.get(known.kind, SQUARE_JUMP if is_square else MOMENT_JUMP)
        return jump * max(known.usual, self._usual[known.kind])


def _state(models: Models, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Held]:
    """Everything that trains, is frozen or is remembered, and that this rank holds elements of."""
    names: dict[int, str] = {}
    for model in models.all():
        for name, parameter in model.parameters:
            # ZeRO-3 keeps this rank's part of it elsewhere.
            held = getattr(parameter, "ds_tensor", parameter)
            if id(held) not in names and is_readable(local(held)):
                names[id(parameter)] = names[id(held)] = name
                yield name, WEIGHTS, held, not parameter.requires_grad
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                name = names.get(id(parameter), f"master weights of group {number}")
                if id(parameter) not in names and is_readable(local(parameter)):
                    yield name, WEIGHTS, parameter, False
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and value.dim() and is_readable(local(value)):
                        yield f"optimizer: {name}.{key}", str(key), value, False


def _bytes(tensor: Any) -> int:
    part = local(tensor)
    return int(part.numel() * part.element_size())
