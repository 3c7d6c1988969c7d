"""State that ranks hold by the same names but not in common: pipeline stages, hand-split models, experts that DDP ignores.

    rank 0   model.0.weight [64, 32]   model.norm.weight          what differs is saved under a name for each rank:
    rank 1   model.0.weight [32]       model.norm.weight              rank_0.model.0.weight   rank_1.model.0.weight   model.norm.weight

Each such rank finds all that it held below its own name, whether others share it or not: `dcp.load({f"rank_{rank}":
state}, checkpoint_id=…)`. What is known to be shared (DDP's replicas, DTensors over all ranks) is not examined; all
else is compared by content, in files beside the checkpoint.
"""

import hashlib
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from holter.rank.models import Model, world_size
from holter.rank.readings.fused_pass import fingerprint_of

StatePath = tuple[Any, ...]
"""Where a value is in the nested state: keys, and numbers for the elements of a list."""


class Piece(NamedTuple):
    """What one rank holds of one entry of the state."""

    content: str
    """Fingerprint or digest of the value, with dtype and shape."""
    offset: tuple[int, ...] = ()
    """For a DTensor: its offset in the whole."""
    mesh: tuple[int, ...] = ()
    """For a DTensor: the ranks that it is spread over."""
    is_buffer: bool = False


class Division(NamedTuple):
    """How the entries are divided among the ranks."""

    labels: Mapping[str, Mapping[int, int]]
    """Entry -> rank -> the rank after which its version is named; only entries that have several versions."""
    is_split: bool
    """Whether some rank holds what the first saver does not."""

    @property
    def ranks(self) -> list[int]:
        """Ranks that hold a version of their own of some entry."""
        return sorted({rank for of_rank in self.labels.values() for rank in of_rank})


NOTHING = Division({}, is_split=False)


def own_pieces(models: Sequence[Model], flat: Mapping[str, Any], paths: Mapping[str, StatePath]) -> dict[str, Piece]:
    """Return the entries that no other rank is known to hold; empty if all that trains is shared."""
    replicas = set().union(*(model.replicas for model in models))
    weights = {paths[key][1]: value for key, value in flat.items() if paths[key][0] == "model"}
    shared = {name for name, value in weights.items() if _is_shared(value, replicas)}
    if all(name in shared or not isinstance(value, torch.nn.Parameter) for name, value in weights.items()):
        return {}
    return {
        key: _piece(value)._replace(is_buffer=paths[key][0] == "model" and not isinstance(value, torch.nn.Parameter))
        for key, value in flat.items()
        if _parameter(paths[key]) not in shared
    }


def _parameter(path: StatePath) -> Any:
    """Return the name of the parameter or buffer that an entry belongs to; None if it belongs to none."""
    if path[0] == "model":
        return path[1]
    return path[2] if path[:2] == ("optim", "state") else None


def _is_shared(value: Any, replicas: set[int]) -> bool:
    if isinstance(value, DTensor):
        return bool(value.device_mesh.size() == world_size())
    return id(value) in replicas


def _piece(value: Any) -> Piece:
    if not isinstance(value, torch.Tensor):
        return Piece(hashlib.blake2b(pickle.dumps(value), digest_size=16).hexdigest())
    content = f"{value.dtype} {tuple(value.shape)} {fingerprint_of(value)}"
    if not isinstance(value, DTensor):
        return Piece(content)
    _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return Piece(content, tuple(offset), tuple(value.device_mesh.mesh.flatten().tolist()))


def divide(held: Mapping[int, Mapping[str, Piece]], first: int) -> Division:
    """Find the entries that are different things on different ranks."""
    holders: dict[str, dict[int, Piece]] = {}
    for rank, pieces in sorted(held.items()):
        for key, piece in pieces.items():
            holders.setdefault(key, {})[rank] = piece
    contested = {key: of_rank for key, of_rank in holders.items() if _is_contested(of_rank.values())}
    if all(map(_is_statistic, contested.values())):
        # These are running statistics of one model, which each rank finds beside its random states: they keep the names
        # that scripts load.
        contested = {}
    labels = {key: _labels(of_rank) for key, of_rank in contested.items()}
    return Division(labels, is_split=bool(labels) or any(first not in of_rank for of_rank in holders.values()))


def _is_contested(pieces: Iterable[Piece]) -> bool:
    """Whether two ranks hold different things in one place, or one of them a part and the other the whole."""
    contents: dict[tuple[int, ...], set[str]] = {}
    for piece in pieces:
        contents.setdefault(piece.offset, set()).add(piece.content)
    return any(len(found) > 1 for found in contents.values()) or len(set(map(len, contents))) > 1


def _is_statistic(of_rank: Mapping[int, Piece]) -> bool:
    """Whether it is a buffer of the same dtype and shape on all ranks."""
    return (
        all(piece.is_buffer for piece in of_rank.values())
        and len({p.content.rpartition(" ")[0] for p in of_rank.values()}) == 1
    )


def _labels(of_rank: Mapping[int, Piece]) -> dict[int, int]:
    """Return for each rank the first rank with the same version: of one mesh, because those hold parts of one tensor, or of equal content."""
    first: dict[object, int] = {}
    return {rank: first.setdefault(piece.mesh or piece.content, rank) for rank, piece in sorted(of_rank.items())}


def rename(planner: Any, rank: int, division: Division) -> None:
    """Rename this rank's own versions in what a planner is about to save."""
    for key, of_rank in division.labels.items():
        if rank in of_rank:
            path = (f"rank_{of_rank[rank]}", *planner.mappings.pop(key))
            other = ".".join(map(str, path))
            planner.mappings[other], planner.state_dict[other] = path, planner.state_dict.pop(key)


def add_names(
    metadata: Metadata, written: Iterable[WriteResult], plans: Mapping[int, Any], division: Division
) -> list[WriteResult]:
    """Add names below `rank_<number>` for all that each divided rank holds to the metadata; return where they are stored."""
    by_key: dict[str, list[WriteResult]] = {}
    for result in written:
        by_key.setdefault(result.index.fqn, []).append(result)
    more = []
    for rank in division.ranks:
        for key, path in plans[rank].planner_data.items() if rank in plans else ():
            own = (f"rank_{rank}", *(path[1:] if str(path[0]).startswith("rank_") else path))
            other = ".".join(map(str, own))
            if other not in metadata.state_dict_metadata:
                metadata.state_dict_metadata[other] = metadata.state_dict_metadata[key]
                metadata.planner_data[other] = own
                more += [
                    WriteResult(MetadataIndex(other, each.index.offset, each.index.index), 0, each.storage_data)
                    for each in by_key.get(key, ())
                ]
    return more
