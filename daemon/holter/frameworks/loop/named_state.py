"""A loop's training state by name, as torch.distributed.checkpoint's `get_state_dict` returns it, read without side effects.

    {"model": {fqn: tensor}, "optim": {"state": {fqn: {…}}, "param_groups": [{…, "params": [fqn, …]}]}, "scheduler": …, "scaler": …, "ema": …}

The first model's tensors have the names that it gives them; those of other models begin with their variable. The rest
is numbered:

    scheduler  scheduler_2 …    by the number of their optimizer
    scaler     scaler_2 …       likewise, as far as a scaler says whom it scales for
    ema        ema_2 …          by name (`averages`)

`names.json` beside the checkpoint says which is which.

`get_state_dict` itself must not be called while main threads are blocked: for FSDP2 it reshards parameters that the
forward pass is using, for FSDP1 it gathers. Here a sharded parameter is taken from where FSDP2 keeps it while modules
hold the gathered one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holter.errors import SaveError
from holter.frameworks.fsdp.framework import Fsdp
from holter.frameworks.saving.averages import Average
from holter.rank import search
from holter.rank.models import Model

NAMES = "names.json"
"""File that says for people what is stored under which key."""
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Parts of a name that a wrapper inside a model adds, and that checkpoints leave out."""


class Other(NamedTuple):
    """An entry of the state besides models and optimizers."""

    key: str
    """Its key in the state."""
    text: str
    """Description for people."""
    holder: Any
    """The object, which has a `state_dict`."""


def state_of(
    models: Sequence[Model], optimizers: Sequence[torch.optim.Optimizer], others: Iterable[Other]
) -> dict[str, Any]:
    """Return everything but random states and counters."""
    weights: dict[str, Any] = {}
    names: dict[int, str] = {}
    for name, value in _entries(models):
        weights[name] = value
        # The optimizer knows a tied weight by its first name.
        names.setdefault(id(value), name)
    state = {"model": weights, "optim": _optim(optimizers, names)}
    for each in others:
        is_module = isinstance(each.holder, torch.nn.Module)
        state[each.key] = _held(each.holder) if is_module else each.holder.state_dict()
    return state


def tensors(state: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors at any depth, with their paths."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield f"{path}{key}", value
        elif isinstance(value, Mapping):
            yield from tensors(value, f"{path}{key}.")
        elif isinstance(value, list):
            yield from tensors(dict(enumerate(value)), f"{path}{key}.")


def own_buffers(models: Sequence[Model]) -> dict[str, torch.Tensor]:
    """Return persistent buffers that nobody keeps equal on all ranks; a checkpoint has those of one rank.

    They are read from the modules themselves, because `state_dict` of FSDP1 gathers, and ranks may be blocked.
    """
    found = {}
    for prefix, inner in _kept(
        models, [model for model in models if model.ddp is None or not model.ddp.broadcast_buffers]
    ):
        for path, part in inner.named_modules():
            for name, value in part._buffers.items():  # noqa: SLF001
                if value is None or name in part._non_persistent_buffers_set or hasattr(value, "placements"):  # noqa: SLF001
                    continue
                found[prefix + plain(f"{path}.{name}" if path else name)] = value.detach().cpu()
    return found


def _entries(models: Sequence[Model]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values in the models' state_dicts."""
    for prefix, inner in _kept(models, models):
        for name, value in _held(inner).items():
            yield prefix + plain(name), value


def _kept(models: Sequence[Model], wanted: Sequence[Model]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the wanted models with the prefix of their names; `models` are all that are kept."""
    for number, model in enumerate(models):
        if model not in wanted:
            continue
        if (inner := model.inner) is None:
            raise SaveError("the script has let go of its model")
        # The first one may have a prefix, if it was found after a model that is not kept.
        yield (model.prefix if number else ""), inner


def _held(module: torch.nn.Module) -> dict[str, Any]:
    """Return what the module's state_dict has, with sharded parameters as the optimizer knows them."""
    sharded = Fsdp().sharded(module)
    if not sharded:
        return dict(module.state_dict(keep_vars=True))
    held: dict[str, Any] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        # This is the part of state_dict() below FSDP2's hook, which would reshard.
        part._save_to_state_dict(held, prefix, keep_vars=True)  # noqa: SLF001
        for name in list(part._parameters):  # noqa: SLF001
            if (id(part), name) in sharded:
                held[prefix + name] = sharded[id(part), name]
    return held


def plain(name: str) -> str:
    """Return the name as checkpoints have it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _optim(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            unknown = sum(id(p) not in names for p in group["params"])
            if unknown:
                raise SaveError(f"{unknown} parameters of {type(optimizer).__name__} belong to no model that was seen")
            groups.append({**group, "params": [names[id(p)] for p in group["params"]]})
            state |= {names[id(p)]: dict(optimizer.state[p]) for p in group["params"] if p in optimizer.state}
    return {"state": state, "param_groups": groups}


def find_others(optimizers: Sequence[torch.optim.Optimizer], averages: Iterable[Average]) -> list[Other]:
    """Return living schedulers, scalers and averages, in the order of their keys."""
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


def describe_others(optimizers: Sequence[torch.optim.Optimizer], found: Iterable[Other]) -> dict[str, str]:
    """Return each key with a description of its entry, for `names.json`."""
    groups = [
        f"optimizer {number} ({type(optimizer).__name__}): {len(optimizer.param_groups)}"
        for number, optimizer in enumerate(optimizers, 1)
    ]
    return {"optim": "groups of " + ", ".join(groups)} | {each.key: each.text for each in found}


def _numbered(kind: str, found: Sequence[tuple[int, Any]], optimizers: Sequence[Any]) -> Iterator[Other]:
    named = [(number, search.variable_of(each), type(each).__name__, each) for number, each in found]
    for place, (number, name, label, each) in enumerate(sorted(named, key=lambda entry: entry[:3])):
        if number < len(optimizers):
            of = f" of optimizer {number + 1} ({type(optimizers[number]).__name__})"
        else:
            of = " of no optimizer that it names"
        yield Other(_key(kind, place), (f"{name}, " if name else "") + label + of, each)


def _first_scaled(scaler: Any, order: dict[int, int]) -> int:
    """Return the first optimizer that it scales for in this step; a number behind the last one if there is none yet."""
    scaled = getattr(scaler, "_per_optimizer_states", {})
    return min((order[each] for each in list(scaled) if each in order), default=len(order))


def _key(kind: str, place: int) -> str:
    return kind if place == 0 else f"{kind}_{place + 1}"
