"""Shows whether replicas are equal at the moment of a save: a root for each set of ranks, and a table behind it.

    parts/<rank>.json        replica_roots: {"all": root, "<digest of the ranks>": root}
    parts/<rank>.replicas    {"all": {name: fingerprint}, …}

The table is read if roots differ.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from holter.rank.models import Models, world_size
from holter.rank.readings.fused_pass import fingerprint_of
from holter.rank.readings.samples import is_readable, local

ALL = "all"
Tables = dict[str, dict[str, str]]
"""Set of ranks -> tensor -> fingerprint."""


def tables_of(models: Models, optimizers: Sequence[torch.optim.Optimizer]) -> Tables:
    """Return tables of the parameters that other ranks hold too, and of their optimizers' state."""
    found: Tables = {}
    memory = {id(p): state for optimizer in optimizers for p, state in optimizer.state.items()}
    for model in models:
        for name, parameter in model.parameters:
            ranks = ALL if id(parameter) in model.replicas else _counterparts(parameter)
            if ranks:
                table = found.setdefault(ranks, {})
                remembered = memory.get(id(parameter), {}).items()
                for called, value in ((name, parameter), *((f"optimizer: {name}.{key}", v) for key, v in remembered)):
                    if isinstance(value, torch.Tensor) and is_readable(local(value)):
                        table[called] = fingerprint_of(value)
    return found


def roots_of(tables: Tables) -> dict[str, str]:
    """Return one digest for each table."""
    return {
        ranks: _digest(*(f"{name} {print_}" for name, print_ in sorted(table.items())))
        for ranks, table in tables.items()
    }


def _counterparts(tensor: Any) -> str:
    """Return the key of the ranks that hold the same part of a DTensor; empty if it is none, or only this rank does."""
    placements: Any = getattr(tensor, "placements", None)
    mesh: Any = getattr(tensor, "device_mesh", None)
    coordinate = mesh.get_coordinate() if placements and mesh is not None else None
    if coordinate is None or any(placement.is_partial() for placement in placements):
        return ""
    place = tuple(slice(None) if p.is_replicate() else coordinate[axis] for axis, p in enumerate(placements))
    ranks = sorted(mesh.mesh[place].reshape(-1).tolist())
    if len(ranks) == 1:
        return ""
    return ALL if len(ranks) == world_size() else _digest(*map(str, ranks))


def _digest(*words: str) -> str:
    return hashlib.blake2b("\n".join(words).encode(), digest_size=8).hexdigest()
