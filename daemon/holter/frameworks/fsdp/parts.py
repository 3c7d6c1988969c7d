"""FSDP1's state without a collective: each rank writes the part that it holds, and `holter checkpoint assemble` joins them.

    flat parameter   [ first.weight … | first.bias | second.weight … | padding ]
    rank 0           [ first.weight[:96]                ]                 a shard has a stretch of a parameter's elements
    rank 1                               [ first.weight[96:] | first.bias | … ]

    state/part_rank_<rank>.pt    {"model": {name: {"shape", "start", "value"}}, "optim": {name: {key: {"start", "value"} or value}},
                                  "whole": {name: tensor}, "groups": […], "others": {key: state}, "step"}
    assembled/                   {"model", "optim", "step", …} of torch.distributed.checkpoint, as a held step writes it

`whole` holds buffers, and parameters that no unit shards. If ranks hold different ones by the same name, each rank's is
found below `rank_<its number>`; buffers are each rank's own, in its file of random states.
"""

import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel

from holter.errors import VaultError
from holter.frameworks.loop.named_state import plain

NAME = re.compile(r"part_rank_(\d+)\.pt")


def path_of(state: Path, rank: int) -> Path:
    """Return the path of a rank's part."""
    return state / f"part_rank_{rank}.pt"


def part_of(root: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return what this rank holds, as it is in memory: nothing is gathered, and nothing is changed."""
    memory = {id(p): state for optimizer in optimizers for p, state in optimizer.state.items()}
    model: dict[str, Any] = {}
    optim: dict[str, Any] = {}
    names: dict[int, list[str]] = {}
    for prefix, flat in _flat_parameters(root):
        shard = getattr(flat, "_local_shard", flat).detach()
        for place, (own, shape, info) in enumerate(zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)):  # noqa: SLF001
            name, held = plain(prefix + own), flat._params[place] if flat._params is not None else flat  # noqa: SLF001
            names.setdefault(id(held), []).append(name)
            start, offset, count = info.intra_param_start_idx or 0, info.offset_in_shard or 0, info.numel_in_shard or 0
            model[name] = {"shape": list(shape), "start": start, "value": shard[offset : offset + count].clone()}
            if memory.get(id(held)):
                of_flat = (offset, count) if held is flat else None
                optim[name] = dict(_remembered(memory[id(held)], start, count, of_flat))
    whole = dict(_whole(root, model))
    names |= {id(p): [name] for name, p in whole.items()}
    optim |= {name: dict(memory[id(p)]) for name, p in whole.items() if memory.get(id(p))}
    groups = [
        {**group, "params": [name for p in group["params"] for name in names[id(p)]]}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    return {
        "model": model,
        "optim": optim,
        "whole": {name: value.detach().clone() for name, value in whole.items()},
        "groups": groups,
    }


def _flat_parameters(root: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each unit's flat parameter, with the prefix of its parameters' names."""
    for path, module in root.named_modules():
        handle = getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
        if handle is not None:
            yield f"{path}." if path else "", handle.flat_param


def _remembered(
    state: Mapping[str, Any], start: int, count: int, of_flat: tuple[int, int] | None
) -> Iterator[tuple[str, Any]]:
    """Yield the optimizer's state of a parameter's stretch.

    `of_flat` is the stretch's place (offset, count) in the state of the flat parameter; None if the state is the
    parameter's own.
    """
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            yield key, value
        else:
            own = value.detach().flatten()
            stretch = own[:count] if of_flat is None else own[of_flat[0] : of_flat[0] + of_flat[1]]
            yield key, {"start": start, "value": stretch.clone()}


def _whole(root: torch.nn.Module, sharded: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield persistent buffers, and parameters that no unit shards."""
    for path, module in root.named_modules():
        for name, value in (*module._parameters.items(), *module._buffers.items()):  # noqa: SLF001
            known = plain(f"{path}.{name}" if path else name)
            is_kept = value is not None and name not in module._non_persistent_buffers_set  # noqa: SLF001
            if is_kept and known not in sharded and name != "_flat_param":
                yield known, value


def tensors_of(part: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a part for its proof; tensors of optimizers are named so."""
    yield from ((f"model: {name}", entry["value"]) for name, entry in part["model"].items())
    yield from ((f"model: {name}", value) for name, value in part["whole"].items())
    for name, state in part["optim"].items():
        for key, entry in state.items():
            value = entry["value"] if isinstance(entry, dict) else entry
            if isinstance(value, torch.Tensor):
                yield f"optimizer: {name}.{key}", value


def assemble(directory: Path, out: Path, world_size: int) -> int:
    """Join the parts of a sealed checkpoint into one of torch.distributed.checkpoint; return the number of tensors.

    Raises VaultError.
    """
    state = directory / "state"
    parts = {
        int(found[1]): torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        for path in sorted(state.iterdir())
        if (found := NAME.fullmatch(path.name))
    }
    lacking = [str(rank) for rank in range(world_size) if rank not in parts]
    if lacking:
        raise VaultError(f"the part of rank {', '.join(lacking)} is not there")
    joined = _joined(parts)
    out.mkdir(parents=True)
    with warnings.catch_warnings():
        # A single process is intended here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        dcp.save(joined, checkpoint_id=out, no_dist=True)
    for path in state.iterdir():
        if not NAME.fullmatch(path.name):
            shutil.copy2(path, out / path.name)
    return len(joined["model"]) + sum(map(len, joined["optim"]["state"].values()))


def _joined(parts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    first = parts[min(parts)]
    shapes = {name: entry["shape"] for part in parts.values() for name, entry in part["model"].items()}
    model = {
        name: _tensor(name, shape, (part["model"].get(name) for part in parts.values()))
        for name, shape in shapes.items()
    }
    optim: dict[str, dict[str, Any]] = {}
    for name, key in dict.fromkeys((n, k) for part in parts.values() for n, s in part["optim"].items() for k in s):
        found = [part["optim"].get(name, {}).get(key) for part in parts.values()]
        is_split = any(isinstance(entry, dict) for entry in found)
        known = next(entry for entry in found if entry is not None)
        optim.setdefault(name, {})[key] = _tensor(f"{name}.{key}", shapes[name], found) if is_split else known
    apart: dict[str, Any] = {}
    for rank, part in parts.items():
        for name, value in part["whole"].items():
            same = first["whole"].get(name)
            if same is None or not torch.equal(same, value):
                apart.setdefault(f"rank_{rank}", {"model": {}})["model"][name] = value
    return {
        "model": model | dict(first["whole"]),
        "optim": {"state": optim, "param_groups": first["groups"]},
        "step": first["step"],
        **first["others"],
        **apart,
    }


def _tensor(name: str, shape: Sequence[int], stretches: Iterable[Mapping[str, Any] | None]) -> torch.Tensor:
    """Make a whole tensor from stretches of its elements, which may overlap. Raises VaultError if some are missing."""
    held = sorted((s for s in stretches if s is not None and s["value"].numel()), key=lambda one: one["start"])
    numel = torch.Size(shape).numel()
    if not held:
        if numel:
            raise VaultError(f"nobody saved {name}")
        return torch.empty(list(shape))
    whole, filled = torch.empty(numel, dtype=held[0]["value"].dtype), 0
    for stretch in held:
        start, count = stretch["start"], stretch["value"].numel()
        if start > filled:
            raise VaultError(f"elements {filled} to {start} of {name} are in no part")
        whole[start : start + count] = stretch["value"]
        filled = max(filled, start + count)
    if filled < numel:
        raise VaultError(f"elements {filled} to {numel} of {name} are in no part")
    return whole.reshape(list(shape))
