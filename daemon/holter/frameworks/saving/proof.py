"""After a save, in the rank: read back what it wrote, and look for every tensor that it holds, bit for bit.

    live tensors  ──(dtype, shape, fingerprint)──▶  found among those in this rank's files?   no ──▶ `missing`: perhaps in another rank's
                                                                                                    files, the coordinator looks there

Names are not compared: frameworks rename, flatten and nest. Each file is read by one rank, so that a save of many ranks is read once.
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from holter.errors import SaveError, VaultError
from holter.files import write_whole
from holter.frameworks.saving.reading import holds_tensors, tensors_in
from holter.halting.vault import manifest as manifests
from holter.halting.vault.manifest import RankPart, StoredTensor
from holter.rank.framework import Keeper, Task
from holter.rank.readings.fused_pass import count_nan, count_nonfinite, fingerprint_of

_SHARD = re.compile(r"^(?:__(\d+)_\d+\.distcp|(?:\w+_)?zero_pp_rank_(\d+)_.*)$")
"""Names of files that hold one rank's shard, whoever else is there."""
_OWN = re.compile(r"^(?:random_states|rng_state)_(\d+)\.")
"""Names of files that each rank writes itself, unless one has to write for all."""


def prove(task: Task, keeper: Keeper, notes: Sequence[str] = ()) -> None:
    """Write `parts/<rank>.json`, with what else is to be said of it. Raises SaveError when not even that can be done."""
    try:
        ours = sorted(name for name in manifests.listed(task.directory) if _is_ours(name, task, keeper))
        sizes = {name: _synced_size(task.directory / name) for name in ours}
        part = _part(task, keeper, sizes, notes)
        path = task.directory / manifests.PARTS / f"{task.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: the coordinator reads it as soon as it is there.
        write_whole(path, manifests.encode(part))
    except OSError as error:
        raise SaveError(f"what rank {task.rank} wrote could not be read back: {error.strerror or error}") from error


def _part(task: Task, keeper: Keeper, sizes: dict[str, int], notes: Sequence[str]) -> RankPart:
    tensors, unread = [], {}
    for name in filter(holds_tensors, sizes):
        try:
            tensors += [
                _described(tensor_name, tensor, name, task.rank)
                for tensor_name, tensor in tensors_in(task.directory / name)
            ]
        except (VaultError, ValueError) as error:
            unread[name] = str(error)
    found = {tensor.content for tensor in tensors}
    live, with_nan, is_sharded = [], [], _is_split(sizes, task) or bool(getattr(keeper, "is_sharded", False))
    for name, tensor in keeper.live():
        if tensor.numel():
            live.append(_described(name, tensor, "", task.rank))
            if (count_nonfinite if _must_be_finite(name, tensor) else count_nan)(tensor):
                with_nan.append(name)
        is_sharded = is_sharded or any(placement.is_shard() for placement in getattr(tensor, "placements", ()))
    return RankPart(
        rank=task.rank,
        framework=keeper.framework,
        is_sharded=is_sharded,
        has_index=any(Path(name).name == ".metadata" for name in sizes),
        files=sizes,
        tensors=tensors,
        unread=unread,
        num_live=len(live),
        with_nan=with_nan,
        missing=[tensor for tensor in live if tensor.content not in found],
        notes=list(notes),
    )


def _must_be_finite(name: str, tensor: torch.Tensor) -> bool:
    """What trains, and what an optimizer remembers of it; a buffer, or what is frozen, may be a mask of infinities."""
    return tensor.requires_grad or name.startswith(("optimizer", "master weights"))


def _is_split(files: Iterable[str], task: Task) -> bool:
    """Whether other ranks' files are needed as well, by their names: pieces may be all there is, written by one replica alone."""
    names = [match for name in files if (match := _SHARD.match(Path(name).name))]
    return any(match[2] or int(match[1]) != task.savers[0] for match in names)


def _described(name: str, tensor: torch.Tensor, file: str, rank: int) -> StoredTensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return StoredTensor(
        name=name,
        file=file,
        shape=tuple(local.shape),
        dtype=str(local.dtype).removeprefix("torch."),
        fingerprint=fingerprint_of(local),
        rank=rank,
    )


def _is_ours(name: str, task: Task, keeper: Keeper) -> bool:
    """Which rank reads a file back: the one that wrote it, as far as its name tells, else the first that saves."""
    if not name.startswith(f"{manifests.STATE}/"):
        return False
    base = Path(name).name
    is_alone = task.is_rescue and keeper.rescues_alone
    named = _SHARD.match(base) or (None if is_alone else _OWN.match(base))
    rank = int(next(filter(None, named.groups()))) if named else task.savers[0]
    return task.rank == (rank if rank in task.savers else task.savers[0])


def _synced_size(path: Path) -> int:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size
