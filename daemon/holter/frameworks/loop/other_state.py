"""What a loop's state has besides model and optimizer: under which key, and what the script calls it.

    scheduler  scheduler_2 …    by the number of their optimizer
    scaler     scaler_2 …       likewise, as far as a scaler says whom it scales for
    ema        ema_2 …          by name (`averages`)

`names.json` beside the checkpoint says which is which.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from holter.frameworks.saving.averages import Average
from holter.rank import naming, search

NAMES = "names.json"


class Other(NamedTuple):
    """One of them."""

    key: str
    """In the state."""
    text: str
    """What it is, for a person."""
    holder: Any
    """Has a `state_dict`."""


def find(optimizers: Sequence[torch.optim.Optimizer], averages: Iterable[Average]) -> list[Other]:
    """All that live."""
    order = {id(search.innermost(optimizer)): number for number, optimizer in enumerate(optimizers)}
    schedulers = [
        (order[id(search.innermost(scheduler.optimizer))], scheduler) for scheduler in search.schedulers(optimizers)
    ]
    scalers = [(_first_scaled(scaler, order), scaler) for scaler in search.scalers()]
    return [
        *_numbered("scheduler", schedulers, optimizers),
        *_numbered("scaler", scalers, optimizers),
        *(
            Other(_key("ema", i), f"{each.name}, {type(each.holder).__name__}", each.holder)
            for i, each in enumerate(averages)
        ),
    ]


def described(optimizers: Sequence[torch.optim.Optimizer], found: Iterable[Other]) -> dict[str, str]:
    """For `names.json`: each key, and what is under it."""
    groups = [
        f"optimizer {number} ({type(optimizer).__name__}): {len(optimizer.param_groups)}"
        for number, optimizer in enumerate(optimizers, 1)
    ]
    return {"optim": "groups of " + ", ".join(groups)} | {each.key: each.text for each in found}


def _numbered(kind: str, found: Sequence[tuple[int, Any]], optimizers: Sequence[Any]) -> Iterator[Other]:
    named = [(number, naming.variable_of(each), type(each).__name__, each) for number, each in found]
    for place, (number, name, label, each) in enumerate(sorted(named, key=lambda entry: entry[:3])):
        if number < len(optimizers):
            of = f" of optimizer {number + 1} ({type(optimizers[number]).__name__})"
        else:
            of = " of no optimizer that it names"
        yield Other(_key(kind, place), (f"{name}, " if name else "") + label + of, each)


def _first_scaled(scaler: Any, order: dict[int, int]) -> int:
    """The first optimizer that it scales for in this step; beyond the last one where it has none yet."""
    scaled = getattr(scaler, "_per_optimizer_states", {})
    return min((order[each] for each in list(scaled) if each in order), default=len(order))


def _key(kind: str, place: int) -> str:
    return kind if place == 0 else f"{kind}_{place + 1}"
