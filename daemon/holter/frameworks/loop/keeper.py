"""A loop of the script's own, kept by torch.distributed.checkpoint: plain, DDP, or sharded by DTensors (FSDP2, tensor parallel).

    dcp.load({"model": …, "optim": …}, checkpoint_id=run/"checkpoints/30/state")      no holter needed

The same planner and the same writer as `dcp.save`, but what savers must tell each other goes through files beside the checkpoint, without a collective:
one way for a held step and for a thread beside a blocked main thread. Replicated state is written by the first saver alone.

    parts/exchange/own-2        what only rank 2 is known to hold, where there is such
    parts/exchange/division-0   which of that are different things by the same name (`own_state`)
    parts/exchange/plan-2       what rank 2 could write
    parts/exchange/orders-0     who writes what, from the first saver
    parts/exchange/written-2    where rank 2 wrote it
    parts/exchange/failure-2    or why it did not
    parts/exchange/end-0        what is missing of the whole, once its metadata is written

Scripts load with the keys that they are used to, so the metadata has other names for the same bytes:

    dcp.load({"model": …, "optim": …, "scheduler": …})              what is written
    dcp.load({"model": …, "optimizer": …, "lr_scheduler": …})       the same bytes
    dcp.load({"app": AppState(…)})                                  the same bytes
    get_state_dict(…, options=StateDictOptions(flatten_optimizer_state_dict=True))

Shards that nobody wrote are said, and the metadata is then called `.metadata.incomplete`: `dcp.load` would take a checkpoint with holes
without a word and leave what it does not find as it was initialised.
"""

import contextlib
import json
import pickle
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from holter import clock
from holter.errors import PartlySavedError, SaveError
from holter.frameworks.loop import named_state, own_state
from holter.frameworks.loop.own_state import NOTHING, Division, StatePath
from holter.frameworks.saving import averages, random_states
from holter.rank import accelerator
from holter.rank.context import Context
from holter.rank.framework import Task

PATIENCE_S = 15.0
"""Seconds to wait for a saver's plan, which takes a fraction of a second; a saver that has given none by then gives
none."""
INCOMPLETE = ".metadata.incomplete"
ALIASES = {
    "model": ("app.model",),
    "optim": ("optimizer", "app.optim", "app.optimizer"),
    "scheduler": ("lr_scheduler", "app.scheduler", "app.lr_scheduler"),
    "step": ("app.step",),
}
"""Top-level keys, with the names that scripts use for them."""

FOLDER = "parts/exchange"
"""Folder that is removed once the checkpoint is sealed."""
POLL_S = 0.01


class DistributedKeeper:
    """Saves one rank's part of a checkpoint of torch.distributed.checkpoint."""

    framework = "dcp"
    rescues_alone = False

    def __init__(self, context: Context, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._context = context
        self._optimizers = list(optimizers)
        ours = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        self._models = [m for m in context.models if m.was_optimized or any(id(p) in ours for _, p in m.parameters)]
        self._averages: list[averages.Average] = []
        self._written: list[tuple[str, torch.Tensor]] = []
        self._groups: Sequence[Mapping[str, Any]] = ()
        """The optimizers' groups, with the names of their parameters."""
        self.notes: list[str] = []
        """Sentences to be said about a save."""
        self.is_sharded = False
        """Whether the state is sharded; known once it is saved."""

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this rank wrote, as it is in memory: its shards, and on the first saver what all ranks share."""
        return iter(self._written)

    def save(self, task: Task) -> None:
        """Write this rank's part; the first saver also describes the whole."""
        if not self._models:
            raise SaveError("no model was seen that the optimizer trains")
        task.state.mkdir(parents=True, exist_ok=True)
        with torch.no_grad():
            buffers = named_state.own_buffers(self._models) if task.world_size > 1 else {}
            ranks = random_states.write(task, buffers)
            if task.writes_shared and buffers and (silent := set(range(task.world_size)) - set(task.savers)):
                whose = ", ".join(map(str, sorted(silent)))
                self.notes.append(
                    f"running statistics that rank {whose} had of its own are lost: rank {task.rank}'s are there"
                )
            trained = [inner for model in self._models if (inner := model.inner) is not None]
            self._averages = averages.find(self._context, trained)
            self._save_state(task)
        random_states.check_all_known(task, ranks)
        if task.writes_shared and (lost := self._lost(task)):
            raise PartlySavedError(f"averages of the weights are not saved as of this step: {', '.join(lost)}")

    def _lost(self, task: Task) -> list[str]:
        """Return the averages that are not saved with the weights."""
        copied = [model.inner for model in self._context.models.all()] if task.is_snapshot else []
        is_lost = self._loses_averages(task)
        return [each.name for each in self._averages if is_lost and not any(each.holder is held for held in copied)]

    def _loses_averages(self, task: Task) -> bool:
        """Whether averages are of another step than the weights: a snapshot does not put them back, unless it copied them."""
        return task.is_snapshot

    def _save_state(self, task: Task) -> None:
        found = named_state.find_others(
            self._optimizers, [each for each in self._averages if each.name not in self._lost(task)]
        )
        state = {**named_state.state_of(self._models, self._optimizers, found), "step": task.completed}
        self._groups = state["optim"]["param_groups"]
        savers = task.savers or tuple(range(task.world_size))
        self.is_sharded = any(_is_shard(tensor) for _, tensor in named_state.tensors(state))
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=task.rank == savers[0])
        own = own_state.own_pieces(self._models, planner.state_dict, planner.mappings) if task.world_size > 1 else {}
        exchange = Exchange(task.directory, task.rank, clock.monotonic_s() + task.deadline_s)
        exchange.put("own", own)
        division, lost = NOTHING, ""
        if not self.is_sharded and not own:
            if task.rank != savers[0]:
                return
            exchange.put("division", NOTHING)
            savers = savers[:1]
        try:
            if self.is_sharded or own:
                division, lost = self._divide(task, exchange, savers)
            own_state.rename(planner, task.rank, division)
            if task.rank == savers[0]:
                others = named_state.describe_others(self._optimizers, found)
                named = others | {f"rank_{rank}": f"all that rank {rank} held" for rank in division.ranks}
                (task.state / named_state.NAMES).write_text(json.dumps(named, indent=2) + "\n")
            missing = self._write(task, planner, exchange, savers, division=division) or lost
        except Exception as error:
            exchange.fail(error)
            raise
        if missing:
            raise PartlySavedError(missing)

    def _divide(self, task: Task, exchange: "Exchange", savers: tuple[int, ...]) -> tuple[Division, str]:
        """Return what ranks hold differently by the same names; on the first saver also what of that is lost with its rank."""
        lost = ""
        if task.rank == savers[0]:
            held, whys = exchange.gather("own", savers, PATIENCE_S)
            found = own_state.divide(held, savers[0])
            whys |= dict.fromkeys(task.lost, "cannot save")
            # If several ranks hold the same, a lost one presumably held it too.
            if whys and any(held.values()) and (found.is_split or len(held) == 1):
                who = "; ".join(f"rank {rank} {why}" for rank, why in sorted(whys.items()))
                lost = f"what a rank alone held is lost with it: {who}"
            exchange.put("division", found)
            if found.ranks:
                self.notes.append(
                    "ranks hold different tensors by the same names: each loads {'rank_<its number>': state}"
                )
        else:
            found = exchange.get("division", savers[0], 2 * PATIENCE_S)
        self.is_sharded |= found.is_split or bool(lost)
        return found, lost

    def _write(
        self,
        task: Task,
        planner: DefaultSavePlanner,
        exchange: "Exchange",
        savers: tuple[int, ...],
        *,
        division: Division,
    ) -> str:
        """Write this rank's part; the first saver returns what is missing of the whole, others an empty string."""
        # torch's writer copies ahead on a stream if there is an accelerator, and fails on one without streams.
        ahead = {} if accelerator.has_streams() else {"per_thread_copy_ahead": 0}
        is_first, writer = task.rank == savers[0], dcp.FileSystemWriter(task.state, **ahead)
        writer.set_up_storage_writer(is_first, rank=task.rank, use_collectives=True)
        exchange.put("plan", writer.prepare_local_plan(planner.create_local_plan()))
        if is_first:
            plans, silent = exchange.gather("plan", savers, PATIENCE_S)
            # Ranks without a plan keep their place, because files are named after it.
            padded = [plans.get(rank, SavePlan([], planner_data={})) for rank in range(task.world_size)]
            orders, metadata = create_default_global_save_plan(dedup_save_plans(padded, save_to_lowest_rank=True))
            exchange.put("orders", writer.prepare_global_plan(orders))
        plan = planner.finish_plan(exchange.get("orders", savers[0], 2 * PATIENCE_S)[task.rank])
        exchange.put("written", writer.write_data(plan, planner).wait())
        self._written = list(_pieces(planner, plan))
        if not is_first:
            # The metadata says where in its files a rank's tensors are: without it nobody could read them back.
            exchange.get("end", savers[0], task.deadline_s)
            return ""
        results, late = exchange.gather("written", plans, task.deadline_s)
        metadata.planner_data = {key: path for plan in plans.values() for key, path in plan.planner_data.items()}
        whys = dict.fromkeys(task.lost, "cannot save") | silent | late
        written = [result for each in results.values() for result in each]
        names = own_state.add_names(metadata, written, plans, division)
        missing = _finish(writer, metadata, [*written, *names], whys, self._groups)
        exchange.put("end", missing)
        return missing


def _finish(
    writer: dcp.FileSystemWriter,
    metadata: Metadata,
    written: Sequence[WriteResult],
    whys: Mapping[int, str],
    groups: Sequence[Mapping[str, Any]],
) -> str:
    """Write the metadata, with all names or as an incomplete one; return what is missing."""
    holes = _holes(metadata, {result.index for result in written})
    if not holes:
        writer.finish(metadata, [written, add_aliases(metadata, written, groups)])
        return ""
    metadata.storage_data = {result.index: result.storage_data for result in written}
    (Path(writer.path) / INCOMPLETE).write_bytes(pickle.dumps(metadata))
    who = "; ".join(f"rank {rank} {why}" for rank, why in sorted(whys.items()))
    return f"of {len(holes)} tensors parts are missing ({holes[0]}, …): {who}"


def _pieces(planner: DefaultSavePlanner, plan: SavePlan) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what this rank writes by its plan: a shard as its DTensor, unless it is stored in several pieces."""
    items = [item for item in plan.items if item.tensor_data is not None]
    counts = Counter(item.index.fqn for item in items)
    for item in items:
        name = item.index.fqn
        yield name, planner.state_dict[name] if counts[name] == 1 else planner.resolve_data(item)


def _holes(metadata: Metadata, written: AbstractSet[MetadataIndex]) -> list[str]:
    """Return the entries that nobody wrote, or not completely."""
    found = []
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks = [chunk for chunk in entry.chunks if MetadataIndex(key, chunk.offsets) in written]
            is_whole = sum(chunk.sizes.numel() for chunk in chunks) == entry.size.numel()
        else:
            is_whole = MetadataIndex(key) in written
        if not is_whole:
            found.append(key)
    return found


def _is_shard(tensor: torch.Tensor) -> bool:
    """Whether other ranks hold other parts of it."""
    return isinstance(tensor, DTensor) and any(
        not placement.is_replicate() and size > 1
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    )


def add_aliases(
    metadata: Metadata, written: Iterable[WriteResult], groups: Sequence[Mapping[str, Any]]
) -> list[WriteResult]:
    """Add every entry's other names to the metadata; return where they are stored. `groups` name the optimizers' parameters.

    An entry of the metadata is a name and a place in a file, so a second name costs a hundred bytes and no copy.
    """
    more = []
    for result in written:
        key = result.index.fqn
        for path in _other_paths(metadata.planner_data[key], groups):
            other = ".".join(map(str, path))
            metadata.state_dict_metadata[other] = metadata.state_dict_metadata[key]
            metadata.planner_data[other] = path
            index = MetadataIndex(other, result.index.offset, result.index.index)
            more.append(WriteResult(index=index, size_in_bytes=0, storage_data=result.storage_data))
    return more


def _other_paths(path: StatePath, groups: Sequence[Mapping[str, Any]]) -> Iterator[StatePath]:
    flattened = list(_flattened(path, groups))
    yield from flattened
    for each in (path, *flattened):
        for other in ALIASES.get(each[0], ()):
            yield (*other.split("."), *each[1:])


def _flattened(path: StatePath, groups: Sequence[Mapping[str, Any]]) -> Iterator[StatePath]:
    """Yield the flattened form: `optim.param_groups.0.lr` becomes `optim.param_groups.<fqn>.lr` for every parameter."""
    if path[:2] == ("optim", "param_groups") and path[-1] != "params":
        for name in groups[path[2]]["params"]:
            yield "optim", ".".join(("param_groups", name, *map(str, path[3:])))


class Exchange:
    """One saver's end of the exchange of files.

    The files are pickles, like the plans that torch.distributed.checkpoint itself sends, and are read only from this
    directory, which is made for one save.
    """

    def __init__(self, directory: Path, rank: int, until_s: float) -> None:
        self.folder = directory / FOLDER
        self._rank = rank
        self._until_s = until_s
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(self, kind: str, content: Any) -> None:
        """Publish content for the others; they see all of it or nothing."""
        part = self.folder / f".{kind}-{self._rank}"
        part.write_bytes(pickle.dumps(content))
        part.rename(self.folder / f"{kind}-{self._rank}")

    def fail(self, error: Exception) -> None:
        """Tell the others not to wait for this rank, if the disk still accepts a file."""
        with contextlib.suppress(OSError):
            self.put("failure", f"{type(error).__name__}: {error}")

    def get(self, kind: str, rank: int, patience_s: float) -> Any:
        """Return what this rank published; SaveError if it published nothing in time, or that it failed."""
        found, whys = self.gather(kind, [rank], patience_s)
        if rank not in found:
            raise SaveError(f"rank {rank} {whys[rank]}")
        return found[rank]

    def gather(self, kind: str, ranks: Iterable[int], patience_s: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Return what these ranks published, and why some did not."""
        found: dict[int, Any] = {}
        whys: dict[int, str] = {}
        began_s = clock.monotonic_s()
        until_s = min(began_s + patience_s, self._until_s)
        awaited = set(ranks)
        while awaited:
            for rank in sorted(awaited):
                if (path := self.folder / f"{kind}-{rank}").exists():
                    found[rank] = pickle.loads(path.read_bytes())  # noqa: S301  written by a saver of this very halt
                elif (path := self.folder / f"failure-{rank}").exists():
                    whys[rank] = f"failed: {pickle.loads(path.read_bytes())}"  # noqa: S301  as above
            awaited -= {*found, *whys}
            if awaited and clock.monotonic_s() > until_s:
                whys |= dict.fromkeys(awaited, f"gave no {kind} within {clock.monotonic_s() - began_s:.0f} s")
                break
            if awaited:
                threading.Event().wait(POLL_S)
        return found, whys
