"""Parameters grouped by the module that they belong to: few enough groups to be told, by names that a person knows.

    blocks.0.attention.weight, blocks.0.mlp.weight, blocks.1.attention.weight, head.weight   ->   blocks.0, blocks.1, head

As many parts of the names as give no more than 32 groups; parameters of another dtype or device are a group of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_GROUPS = 32
MAX_DEPTH = 8
REST = "(others)"


@dataclass(frozen=True)
class ModuleGroup:
    """Parameters of one module, by their places in the list that was grouped."""

    module: str
    dtype: str
    places: list[int]


def grouped(named: Sequence[tuple[str, Any]]) -> list[ModuleGroup]:
    """All parameters of the list, each in one group."""
    paths = [name.split(".")[:-1] for name, _ in named]
    kinds = [(p.dtype, p.device) for _, p in named]
    keys = _keys(paths, kinds, 1)
    for depth in range(2, MAX_DEPTH + 1):
        deeper = _keys(paths, kinds, depth)
        if len(set(deeper)) > MAX_GROUPS or deeper == keys:
            break
        keys = deeper
    members: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        rest = (REST, *key[1:])
        is_full = len(members) >= MAX_GROUPS - 1
        members.setdefault(key if key in members or not is_full else rest, []).append(place)
    return [
        ModuleGroup(module, str(dtype).removeprefix("torch."), places) for (module, dtype, _), places in members.items()
    ]


def _keys(paths: list[list[str]], kinds: list[Any], depth: int) -> list[Any]:
    return [(".".join(path[:depth]), *kind) for path, kind in zip(paths, kinds, strict=True)]
