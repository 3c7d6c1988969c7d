"""Which ranks hold the same bytes of a tensor: one description for all frameworks, known and never guessed.

    DTensor                  its mesh and placements: ranks that differ from this one on replicated axes only
    FSDP's first version     the group across which a hybrid strategy reduces; none where everything is sharded
    DDP                      its process group, for what it does not ignore
    ZeRO                     its data-parallel group, for the weights that stages 1 and 2 keep whole
    HOLTER_MESH              the user's mesh for plain parameters: `pp=2,dp=2`; along `tp`, parameters without Megatron's mark of a cut are whole

    mesh (replicate=2, shard=2)      weight: replicate, shard(0)
    0 1                              rank 1 holds what rank 3 holds, along `replicate`
    2 3

The ranks over which a tensor's bytes are compared are called its scope. The scope is a part of the name of the tensor's class on the wire:

    parameters_after                 every rank of the job holds it
    parameters_after@replicate#1     the ranks that share this rank's place on all other axes hold it; the lowest of them is rank 1
    parameters_after@own             no other rank holds it: it can only be compared with its own history
"""

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from holter.records import MeshAxis
from holter.records.rank import IGNORED, OWN

PARTITION_LISTS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
"""Attributes in which ZeRO keeps the float32 partitions that its optimizer steps: stages 1 and 2, then stage 3."""

GROUPS: Mapping[Any, Any] = dist.distributed_c10d._world.pg_map if dist.is_available() else {}  # noqa: SLF001  nothing public lists them
"""The process groups of this rank: torch's own table, which is emptied but never replaced. Reading it is cheaper than `dist.is_initialized()`."""


@dataclass(frozen=True)
class Holders:
    """Which ranks hold the same bytes of a tensor, and how that is known."""

    axis: str
    """Axis of the mesh along which they lie, several joined by `+`; empty: all ranks of the job; `own`: this rank alone; `ignored`: nobody reduces it."""
    ranks: tuple[int, ...] = ()
    """The ranks in ascending order, with this rank among them; empty if the axis is."""
    placements: str = ""
    """How the tensor is placed on each axis, such as `replicate=R,shard=S(0)`; empty if no mesh is known."""

    @property
    def scope(self) -> str:
        """The suffix that names this scope, after the name of a class of tensors."""
        return "" if not self.axis else f"@{self.axis}" if self.axis == OWN else f"@{self.axis}#{self.ranks[0]}"


EVERYONE = Holders("")


def of_dtensor(tensor: torch.Tensor) -> Holders | None:
    """Return the holders of a DTensor; None for any other tensor, and for one of which this rank holds no part."""
    placements: Any = getattr(tensor, "placements", None)
    mesh: Any = getattr(tensor, "device_mesh", None)
    coordinate = mesh.get_coordinate() if placements and mesh is not None else None
    if coordinate is None:
        return None
    names = axis_names(mesh)
    is_same = [placement.is_replicate() or mesh.size(axis) == 1 for axis, placement in enumerate(placements)]
    place = tuple(slice(None) if same else coordinate[axis] for axis, same in enumerate(is_same))
    ranks = tuple(sorted(mesh.mesh[place].reshape(-1).tolist()))
    along = [name for axis, name in enumerate(names) if is_same[axis] and mesh.size(axis) > 1]
    words = ",".join(f"{name}={_word(placement)}" for name, placement in zip(names, placements, strict=True))
    if len(ranks) == 1 and not all(placement.is_replicate() for placement in placements):
        return Holders(OWN, ranks, words)
    return of_group("+".join(along), ranks, words)


def of_group(axis: str, ranks: Sequence[int], placements: str = "") -> Holders:
    """Return the holders for ranks that hold the same bytes along an axis; all ranks of the job, or a single one, become their own kinds."""
    if len(ranks) == _world_size():
        return Holders("", (), placements)
    if len(ranks) < 2:  # noqa: PLR2004 - a rank alone has nobody to agree with
        return Holders(OWN, tuple(ranks), placements)
    return Holders(axis or "group", tuple(sorted(ranks)), placements)


def axis_names(mesh: Any) -> tuple[str, ...]:
    """Return the axis names of a DeviceMesh; `axis0`, `axis1`, … if it has none."""
    return tuple(mesh.mesh_dim_names or (f"axis{number}" for number in range(mesh.ndim)))


def axes_of(mesh: Any) -> Iterator[MeshAxis]:
    """Yield the axes of a DeviceMesh, outermost first, with their sizes and strides in rank numbers; they are the same on every rank."""
    for number, name in enumerate(axis_names(mesh)):
        line = mesh.mesh.movedim(number, 0).reshape(mesh.size(number), -1)[:, 0].tolist()
        yield MeshAxis(name, len(line), line[1] - line[0] if len(line) > 1 else 0)


def spread(mesh: Any, ranks: Iterable[int], axes: Sequence[str]) -> tuple[int, ...]:
    """Return these ranks, and all ranks that differ from one of them only on these axes of a mesh, in ascending order."""
    names, table, found = axis_names(mesh), mesh.mesh, set()
    for rank in ranks:
        (place,) = (table == rank).nonzero().tolist()
        chosen = tuple(slice(None) if name in axes else place[number] for number, name in enumerate(names))
        found.update(table[chosen].reshape(-1).tolist())
    return tuple(sorted(found))


def forgotten_axes(submesh: Any, rank: int) -> tuple[Any, list[str]]:
    """Return the mesh that `submesh` was cut out of, and the axes that were forgotten in the cut.

    These are axes that hold replicas, judging by their names, and along which `submesh` has no rank but this one.
    """
    find = getattr(submesh, "_get_root_mesh", None)
    whole = find() if find is not None else submesh
    if whole is submesh or whole.size() != _world_size():
        return whole, []
    held = set(submesh.mesh.reshape(-1).tolist())
    named = [name for name in axis_names(whole) if any(fnmatch.fnmatchcase(name, glob) for glob in REPLICATED_NAMES)]
    return whole, [name for name in named if held.isdisjoint({*spread(whole, (rank,), (name,))} - {rank})]


def group_ranks(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group in ascending order; all ranks if it is None, none if it cannot be asked."""
    try:
        return tuple(sorted(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)))
    except (AttributeError, RuntimeError, TypeError, ValueError, KeyError):
        return ()


def of_flat(root: torch.nn.Module | None) -> dict[int, tuple[Holders, torch.Size | None]]:
    """Return, by parameter's id, the holders and whole shape of each parameter under FSDP's first version; flat parameters have no shape (None)."""
    found: dict[int, tuple[Holders, torch.Size | None]] = {}
    for module in torch.nn.Module.modules(root) if root is not None else ():
        handle = getattr(module, "_handle", None) if type(module).__name__ == "FullyShardedDataParallel" else None
        if handle is None:
            continue
        flat = handle.flat_param
        between = getattr(module, "_inter_node_pg", None)
        shared = group_ranks(between) if between is not None else ()
        if not getattr(handle, "uses_sharded_strategy", True):
            shared = group_ranks(getattr(module, "process_group", None))
        size = len(group_ranks(getattr(module, "process_group", None)))
        holders = of_group("replicate", shared, f"replicate={'R' if len(shared) > 1 else '-'},shard=S({size})")
        found[id(flat)] = holders, None
        for parameter, shape in zip(getattr(flat, "_params", None) or (), flat._shapes, strict=False):  # noqa: SLF001
            found[id(parameter)] = holders, shape
    return found


def partitions(zero: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the float32 partitions that a ZeRO optimizer steps, with names; each belongs to one rank alone."""
    flats = next((found for name in PARTITION_LISTS if (found := getattr(zero, name, None))), ())
    return [(f"fp32 partition {number}", flat) for number, flat in enumerate(flats) if flat.numel()]


def is_fully_sharded(module: torch.nn.Module | None) -> bool:
    """Whether `fully_shard` was applied to this module; then it was told to ignore the parameters that are still plain."""
    return module is not None and any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


@dataclass(frozen=True)
class DeclaredMesh:
    """The job's layout as the user declares it: axes, outermost first, and which of them hold replicas."""

    axes: tuple[MeshAxis, ...]
    replicated: frozenset[str]
    tensor: frozenset[str] = frozenset()
    """Names of axes along which some parameters are cut and the rest are whole."""

    def holders(self, rank: int, *, is_whole: bool = False) -> Holders:
        """Return the holders of a plain parameter on this rank; `is_whole`: others of its model are marked as cut, and it is not."""
        along = self.replicated | (self.tensor if is_whole else frozenset())
        ranks = [rank]
        for axis in self.axes:
            if axis.name in along:
                base = [one - one // axis.stride % axis.size * axis.stride for one in ranks]
                ranks = [one + place * axis.stride for one in base for place in range(axis.size)]
        words = ",".join(f"{axis.name}={'R' if axis.name in along else '-'}" for axis in self.axes)
        return of_group("+".join(axis.name for axis in self.axes if axis.name in along), ranks, words)


def declare(said: Any) -> DeclaredMesh | None:
    """Return the mesh that the user declared as `pp=2,dp=2`, a mapping of names to sizes, or a DeviceMesh; None if empty, or not of this world size."""
    if isinstance(said, str):
        said = {name.strip(): int(size) for name, _, size in (word.partition("=") for word in said.split(",") if word)}
    elif hasattr(said, "mesh_dim_names"):
        said = {name: said.size(number) for number, name in enumerate(axis_names(said))}
    found = declared(said.items()) if said else None
    if found is None or math.prod(axis.size for axis in found.axes) != _world_size():
        return None
    return found


REPLICATED_NAMES = ("dp", "ddp", "data", "replicate", "*dp_replicate", "data_parallel")
PIPELINE_NAMES = ("pp", "pipe", "pipeline", "stage", "pipeline_parallel")
TENSOR_NAMES = ("tp", "tensor", "model", "tensor_parallel", "model_parallel")


def is_marked_cut(parameter: torch.Tensor) -> bool:
    """Whether a parameter is marked as cut along the tensor-parallel axis, as Megatron's layers and those modelled on them mark it."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def declared(sizes: Iterable[tuple[str, int]]) -> DeclaredMesh:
    """Make a mesh from names and sizes, outermost first; a name that ends in `:replicate` or `:split` says whether the axis holds replicas."""
    found: list[tuple[str, int, bool]] = []
    for name, size in sizes:
        plain, _, said = name.partition(":")
        usual = any(fnmatch.fnmatchcase(plain, glob) for glob in REPLICATED_NAMES)
        found.append((plain, size, said == "replicate" if said else usual))
    stride, axes = 1, []
    for name, size, _ in reversed(found):
        axes.append(MeshAxis(name, size, stride))
        stride *= size
    same = frozenset(name for name, _, is_same in found if is_same)
    return DeclaredMesh(
        tuple(reversed(axes)), same, frozenset(name for name, *_ in found if name in TENSOR_NAMES) - same
    )


def _word(placement: Any) -> str:
    if placement.is_replicate():
        return "R"
    return "P" if placement.is_partial() else f"S({getattr(placement, 'dim', '?')})"


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


__all__ = ["EVERYONE", "IGNORED", "OWN", "DeclaredMesh", "Holders"]
