"""Settings of the step's optimizers: rates, betas, weight decay, and how far they have counted. Every replica has the same.

A value is its own fingerprint: the bits of the number as float64. What lies on a device is left out, for reading it would wait.
"""

import hashlib
import struct
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holter.rank.context import Context
from holter.records import PackedTable

CLASS = "hyperparameters"
LARGEST = 3e38
"""Of the float32 numbers of a table."""


@dataclass(frozen=True)
class _Group:
    """What is read of one group of an optimizer. The optimizer is held weakly, as everything of the script's is."""

    optimizer: "weakref.ref[torch.optim.Optimizer]"
    place: int
    counter: "weakref.ref[torch.Tensor] | None"
    """Its first replica whose state counts steps."""
    keys: list[tuple[str, int]]
    """(setting, place in it), -1 where it is a number itself."""

    def add_values(self, values: list[float]) -> None:
        """Append the numbers as they are now."""
        optimizer = self.optimizer()
        assert optimizer is not None, "it is about to step"
        group = optimizer.param_groups[self.place]
        values += [float(group[key] if place < 0 else group[key][place]) for key, place in self.keys]
        if self.counter is not None:
            values.append(float(optimizer.state[self.counter()]["step"]))

    def names(self, prefix: str) -> Iterator[str]:
        """Names of these numbers."""
        for key, place in self.keys:
            yield prefix + key if place < 0 else f"{prefix}{key}.{place}"
        if self.counter is not None:
            yield f"{prefix}step"


class Hyperparameters:
    """Reads them at every step; tells the table when something changed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizers in the order of their first step."""
        self._known: tuple[Any, ...] = ()
        self._groups: list[_Group] = []
        self._names: list[str] = []
        self._encoded_names = b""
        self._has_scaler = False
        self._told = b""
        self._root = 0

    def read(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The settings that these optimizers are about to step with."""
        log = self._context.log.now
        scale = log.losses.scale
        self._has_scaler |= scale is not None and scale != 1.0
        shape = (
            self._context.models.generation,
            self._has_scaler and scale is not None,
            *((id(o), len(o.state), *map(len, o.param_groups)) for o in optimizers),
        )
        if shape != self._known:
            self._known = shape
            self._learn(optimizers, has_scale=self._has_scaler and scale is not None)
        if not self._names:
            return
        values: list[float] = []
        for group in self._groups:
            group.add_values(values)
        if len(values) < len(self._names) and scale is not None:
            values.append(scale)
        bits = struct.pack(f"<{len(values)}d", *values)
        if bits != self._told:
            self._told = bits
            self._tell(bits, values)
        log.roots[CLASS] = self._root

    def _tell(self, bits: bytes, values: Sequence[float]) -> None:
        digest = hashlib.blake2b(bits + self._encoded_names, digest_size=8).digest()
        self._root = int.from_bytes(digest, "little")
        if max(values) > LARGEST or min(values) < -LARGEST:
            values = [min(max(value, -LARGEST), LARGEST) for value in values]
        norms = struct.pack(f"<{len(values)}f", *values)
        table = PackedTable(tensor_class=CLASS, root=self._root, fingerprints=bits, norms=norms, names=self._names)
        self._context.writer.say(self._context.log.step, table)

    def _learn(self, optimizers: Sequence[torch.optim.Optimizer], *, has_scale: bool) -> None:
        """Which settings there are; only groups that hold a replica count."""
        for optimizer in optimizers:
            self._numbers.setdefault(optimizer, len(self._numbers))
        replicas = set().union(*(model.replicas for model in self._context.models))
        self._groups, self._names, self._told = [], [], b""
        for optimizer in sorted(optimizers, key=self._numbers.__getitem__):
            for place, group in enumerate(optimizer.param_groups):
                held = [p for p in group["params"] if id(p) in replicas]
                if held:
                    # One that is frozen or unused has no state: the first that has tells the count.
                    counting = (p for p in held if _is_number(optimizer.state.get(p, {}).get("step")))
                    first = next(counting, None)
                    counter = weakref.ref(first) if first is not None else None
                    found = _Group(weakref.ref(optimizer), place, counter, list(_keys(group)))
                    self._groups.append(found)
                    self._names += found.names(f"optimizer{self._numbers[optimizer]}.group{place}.")
        if self._names and has_scale:
            self._names.append("scaler.scale")
        self._encoded_names = "\n".join(self._names).encode()


def _keys(group: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for key, value in group.items():
        if _is_number(value):
            yield key, -1
        elif isinstance(value, (tuple, list)) and key != "params":
            yield from ((key, place) for place, part in enumerate(value) if _is_number(part))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_cpu and value.numel() == 1 and not value.is_complex()
    return isinstance(value, (bool, int, float))
