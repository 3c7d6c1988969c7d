"""How a tensor lies on the ranks, as far as it or its process group says so."""

from typing import Any

import torch
import torch.distributed as dist


def is_replica(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor of which every rank of the job holds a whole copy."""
    placements = getattr(tensor, "placements", None)
    if not placements or not all(placement.is_replicate() for placement in placements):
        return False
    mesh: Any = getattr(tensor, "device_mesh", None)
    return mesh is not None and bool(mesh.size() == world_size())


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this rank holds a part of it: a DTensor's shard, FSDP's flat parameter, or ZeRO's."""
    placements = getattr(tensor, "placements", None)
    if placements:
        return not all(placement.is_replicate() for placement in placements)
    return hasattr(tensor, "ds_id") or type(tensor).__name__ == "FlatParameter"


def is_split(tensor: torch.Tensor) -> bool:
    """Whether several ranks hold different parts of it, and so may find different things in its gradient."""
    placements: Any = getattr(tensor, "placements", None)
    if not placements:
        return is_sharded(tensor)
    mesh: Any = getattr(tensor, "device_mesh", None)
    return any(not placement.is_replicate() and mesh.size(axis) > 1 for axis, placement in enumerate(placements))


def spans_world(group: Any) -> bool:
    """Whether a process group (None: the default one) holds all ranks of the job."""
    return group is None or num_replicas(group) == world_size()


def num_replicas(group: Any) -> int:
    """Ranks of a process group."""
    try:
        return int(group.size()) if group is not None else world_size()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return 0


def world_size() -> int:
    """Ranks of the job; 1 without a process group."""
    is_there = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if is_there else 1
