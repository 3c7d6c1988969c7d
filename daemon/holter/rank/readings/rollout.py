"""Whether the weights that generate equal those that train: fingerprints of both, tensor by tensor, when a script gives the former.

    watch.log(rollout=sampler)     a module, or names and tensors, just before it generates

    live now      w3  b3  e3        equal: w     stale: b, as it was a log ago     missing: e
    generating    w3  b2  -

Nothing waits for a device: both are read in one pass, and the result is reported when it has answered. Of large tensors only the first elements
are read.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from holter.rank.context import Context
from holter.records import Rollout
from holter.records.rank import Named

WRAPPERS = ("module.", "_orig_mod.", "model.", "ema_model.", "averaged_model.", "base_model.")
"""Prefixes that wrappers and copies put before the names of their parameters."""
MAX_ELEMENTS = 1 << 18
"""Number of elements read of each tensor."""
MAX_LOGS = 8
"""Number of earlier logs whose weights are remembered."""
MAX_NAMED = 8
KNOWN_SHARE = 0.5
"""Least share of the live tensors that must be known by name: an engine with fewer uses names of its own, and cannot be compared."""


def bare_name(name: str, live: Mapping[str, Any]) -> str:
    """Return the name without the prefixes that wrappers put before it."""
    while name not in live:
        shorter = next((name.removeprefix(wrapper) for wrapper in WRAPPERS if name.startswith(wrapper)), None)
        if shorter is None:
            break
        name = shorter
    return name


class Pair(NamedTuple):
    """One tensor of the model that trains, and the one that generates in its place."""

    name: str
    live: torch.Tensor
    given: torch.Tensor


class RolloutReader:
    """Compares generating weights with the live ones, and remembers what those were at the last logs."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._history: dict[str, deque[set[int]]] = {}

    def read(self, given: Mapping[str, torch.Tensor]) -> None:
        """Compare these weights with the live ones, and report the result when both were read."""
        live = self._live(given)
        if not live:
            return
        found = {bare_name(name, live): tensor for name, tensor in given.items()}
        pairs = [Pair(name, tensor, found[name]) for name, tensor in live.items() if name in found]
        pairs = [pair for pair in pairs if _is_comparable(pair.live) and _is_comparable(pair.given)]
        held = {pair.live.data_ptr() for pair in pairs}
        missing = [
            name
            for name, tensor in live.items()
            if name not in found and tensor.requires_grad and tensor.data_ptr() not in held
        ]
        parts = [part for pair in pairs for part in _parts(pair)]
        step = self._context.log.step

        def answered(table: Any) -> None:
            self._context.writer.say(step, self._compared(pairs, [int(one) for one in table.fingerprint], missing))

        self._context.read("rollout", parts, answered)

    def _compared(self, pairs: list[Pair], fingerprints: list[int], missing: list[str]) -> Rollout:
        words = iter(fingerprints)
        stale, other, cast, num_equal, num_moved, behind = [], [], [], 0, 0, 0
        for pair in pairs:
            live, given = next(words), next(words)
            is_cast = pair.live.dtype != pair.given.dtype
            wanted = next(words) if is_cast else live
            history = self._history.setdefault(pair.name, deque(maxlen=MAX_LOGS))
            num_moved += bool(history) and live not in history[-1]
            if given == wanted:
                num_equal += not is_cast
                cast += [pair.name] * is_cast
            elif age := next((age for age, known in enumerate(reversed(history), 1) if given in known), 0):
                stale.append(pair.name)
                behind = max(behind, age)
            else:
                other.append(pair.name)
            history.append({live, wanted})
        to = next((str(pair.given.dtype).removeprefix("torch.") for pair in pairs if pair.name in cast), "")
        return Rollout(
            num_equal=num_equal,
            num_moved=num_moved,
            missing=_named(missing),
            stale=_named(stale),
            other=_named(other),
            cast=_named(cast),
            cast_to=to,
            behind=behind,
        )

    def _live(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of the trained model that has the most names in common with the generating weights; empty if there are too few."""
        best: dict[str, torch.Tensor] = {}
        most = 0
        for model in self._context.models:
            live = {name.removeprefix(model.prefix): parameter for name, parameter in model.parameters}
            if not any(parameter.requires_grad for parameter in live.values()):
                continue
            common = len({bare_name(name, live) for name in given} & live.keys())
            if common > most:
                best, most = live, common
        return best if best and most >= KNOWN_SHARE * len(best) else {}


def _is_comparable(tensor: Any) -> bool:
    is_plain = isinstance(tensor, torch.Tensor) and type(tensor) in {torch.Tensor, torch.nn.Parameter}
    return (
        is_plain
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.numel() > 0
        and not tensor.is_meta
    )


def _parts(pair: Pair) -> Iterator[torch.Tensor]:
    """Yield the tensors to be read: the live one, the given one, and the live one cast to the given one's dtype if that differs."""
    live, given = _head(pair.live.detach()), _head(pair.given.detach())
    yield live
    yield given
    if live.dtype != given.dtype:
        yield live.to(given.dtype)


def _head(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first elements of a tensor, without a copy if it is contiguous."""
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().reshape(-1)
    return flat[:MAX_ELEMENTS]


def _named(names: list[str]) -> Named:
    return Named(len(names), sorted(names)[:MAX_NAMED])
