"""Makes a rank's agent for halts, with what saves for it, which needs torch, the hooks and the frameworks.

    rewind.restore(step) -> frameworks.keeper -> keeper.save(task) -> prove(task, keeper)
    snapshots.restore(step) if the order names a snapshot: nobody else knows how that step began, so each saver writes it

After a save the rank reads back what it wrote, and looks there for every tensor that it holds, bit for bit:

    live tensors  ──(dtype, shape, fingerprint)──▶  found among those in this rank's files?   no ──▶ `missing`: perhaps in another rank's
                                                                                                    files, the coordinator looks there

Names are not compared, because frameworks rename, flatten and nest. Each file is read by one rank, so that a save of
many ranks is read only once. Keepers and readers of files are imported only when a save has been decided.
"""

import os
import re
import signal
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from holter import clock
from holter.config import Settings
from holter.errors import HolterError, PartlySavedError, RewindError, SaveError, VaultError
from holter.files import UNREADABLE, write_whole
from holter.frameworks.place import RankPlace
from holter.halting.vault import manifest as manifests
from holter.halting.vault.manifest import RankPart, StoredTensor
from holter.rank.framework import Keeper, Task
from holter.rank.guard import say
from holter.rank.hold import commit_register
from holter.rank.hold.agreement import Tree
from holter.rank.hold.halt_agent import HaltAgent
from holter.rank.hold.halts import AgentParts, AgentSettings, Leaving, Position, find_agent
from holter.rank.hold.peers import PeerAddress, ShardPeers
from holter.rank.hooks.signals import Termination
from holter.rank.monitor import Monitor
from holter.rank.readings.fused_pass import count_nan, count_nonfinite, fingerprint_of, largest
from holter.rank.undo.side_stream import beside_training, devices_of
from holter.records import Farewell, Order

if TYPE_CHECKING:
    from holter.rank.undo.rewind import Rewound

BLOBS_S = 3.0
"""Seconds that a rescue waits for what the sidecars of other ranks write about them."""
BLOBS_POLL_S = 0.05
FULL_BYTES = 1 << 18
"""Free bytes below which there is no room for a file of a checkpoint."""
LARGEST_WEIGHT, LARGEST_MOMENT = 1e8, 1e24
"""Largest finite weight, and largest moment of an optimizer, that training may have made."""
_SHARD = re.compile(r"^(?:__(\d+)_\d+\.distcp|(?:\w+_)?zero_pp_rank_(\d+)_.*|part_rank_(\d+)\.pt)$")
"""Names of files that hold one rank's shard."""
_OWN = re.compile(r"^(?:random_states|rng_state)_(\d+)\.")
"""Names of files that each rank writes itself, unless one must write for all."""


def open_agent(settings: Settings, here: RankPlace, monitor: Monitor, line: socket.socket, run_dir: str) -> HaltAgent:
    """Return this rank's agent, which hears orders from now on.

    It must be made before anything registers what it does at exit.
    """
    context = monitor.context

    def farewell() -> None:
        context.writer.say(context.log.step, Farewell(kind="end", text="halted by decision", where=""))

    leaving = Leaving(farewell, agent=find_agent() if here.is_restarted else 0)
    leaving.register()
    mapped = frozenset(signal.Signals[name] for name in settings.halt_signals)
    is_halting = settings.action == "halt"
    termination = Termination()
    termination.install(mapped | ({signal.SIGTERM} if is_halting else set()))
    agent = HaltAgent(
        AgentSettings(
            rank=here.rank,
            world_size=here.world_size,
            run_dir=run_dir,
            is_halting=is_halting,
            halt_signals=mapped,
            neighbours=here.neighbours,
        ),
        AgentParts(
            actions=RankSaver(monitor, here),
            register=lambda: commit_register.reach(here.restarts),
            leaving=leaving,
            log=say,
            signals=termination if termination.descriptor >= 0 else None,
            signal_fd=termination.descriptor,
        ),
        line,
    )
    leaving.before_end = agent.finish
    agent.start()
    context.hold.agent = agent
    if is_halting and here.world_size > 1:
        context.hold.peers = ShardPeers(PeerAddress(Tree(here.rank, here.world_size), here.address, here.restarts))
    return agent


class RankSaver:
    """Saves this rank's part, and knows where its main thread is."""

    def __init__(self, monitor: Monitor, here: RankPlace) -> None:
        self._monitor = monitor
        self._here = here

    def position(self) -> Position:
        """Return where the main thread is, as far as the hooks tell."""
        context = self._monitor.context
        hold = context.hold
        if hold.left_out is not None:
            return Position(hold.left_out.step, hold.left_out.is_torn, hold.poisoned_step)
        return Position(context.log.step, self._monitor.is_torn(), hold.poisoned_step)

    def save(self, order: Order, *, is_main_thread: bool) -> None:
        """Save this rank's part of a checkpoint as the order says; raises if anything is not saved."""
        try:
            self._save(order, is_main_thread=is_main_thread)
        except HolterError:
            raise
        except Exception as error:
            if not (left := _lack_of_room(Path(order.directory))):
                raise
            # Some writers raise an error of their own for a full disk.
            raise SaveError(f"{left} ({error})") from error

    def _save(self, order: Order, *, is_main_thread: bool) -> None:
        monitor = self._monitor
        if self.position().is_torn and order.snapshot < 0:
            where = "between two optimizers of one step" if is_main_thread else "inside an optimizer's step"
            raise SaveError(f"the rank is {where}: its weights are partly new")
        if is_main_thread:
            # What is called from now on is not the script's doing, and the process ends afterwards.
            monitor.context.guard.is_on = False
        before = self._place()
        with beside_training(self._devices(), is_hung=not is_main_thread):
            partly = self._keep(order, is_main_thread=is_main_thread)
        if not is_main_thread and self._place() != before:
            raise SaveError("the rank went on by itself while it was saved")
        if partly is not None:
            raise partly

    def _devices(self) -> list[torch.device]:
        models = self._monitor.context.models.all()
        return devices_of(p for model in models if model.root is not None for p in model.root.parameters())

    def _keep(self, order: Order, *, is_main_thread: bool) -> PartlySavedError | None:
        """Restore, save and prove; return an error that names what is missing of the whole, or None."""
        monitor, here = self._monitor, self._here
        own = self._restore(order, is_hung=not is_main_thread)
        task = Task(
            directory=Path(order.directory),
            step=own.step,
            rank=here.rank,
            world_size=here.world_size,
            savers=order.savers,
            lost=order.lost,
            is_rescue=not is_main_thread,
            writes_shared=here.rank == order.savers[0],
            rewinds=_rewinds(order, here, own, patience_s=0.0 if is_main_thread else BLOBS_S),
            is_snapshot=order.snapshot >= 0 or own.step < monitor.context.undo.rewind.step,
            base_step=order.base_step,
            deadline_s=order.deadline_s,
        )
        notes = self._take_over(task)
        history = monitor.context.state_history
        odd = history.judge(own.step, is_live=not task.is_snapshot)
        unlooked = history.unread(monitor.context.models, monitor.optimizers)
        replicas = self._replicas(task)
        keeper = monitor.context.frameworks.keeper(monitor.context, monitor.optimizers)
        partly = None
        try:
            keeper.save(task)
        except PartlySavedError as error:
            partly = error
        prove(task, keeper, [*notes, *getattr(keeper, "notes", ())], self._own(task), Looks(odd, replicas, unlooked))
        return partly

    def _replicas(self, task: Task) -> dict[str, str]:
        """Write tables of what other ranks hold too, and return the roots of these."""
        from holter.frameworks.saving import replicas  # noqa: PLC0415  not before a save

        tables = (
            replicas.tables_of(self._monitor.context.models, self._monitor.optimizers) if task.world_size > 1 else {}
        )
        if tables:
            path = manifests.replicas_path(task.directory, task.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, msgspec.json.encode(tables))
        return replicas.roots_of(tables)

    def _own(self, task: Task) -> list[tuple[str, torch.Tensor]]:
        """Return plain parameters that no other rank is known to hold, with their optimizers' state."""
        if task.world_size == 1:
            return []
        context = self._monitor.context
        found = [(name, p) for model in context.models if model.was_optimized for name, p in model.unshared()]
        names = {id(p): name for name, p in found}
        for optimizer in self._monitor.optimizers:
            found += [
                (f"optimizer: {names[id(p)]}.{key}", value)
                for p, state in optimizer.state.items()
                if id(p) in names
                for key, value in state.items()
                if isinstance(value, torch.Tensor)
            ]
        return found

    def _place(self) -> tuple[int, int, int]:
        """Return where the main thread is; a blocked one stays there."""
        context = self._monitor.context
        return context.log.step, context.log.micro_step, context.phases.phase

    def _take_over(self, task: Task) -> list[str]:
        """Take over rank 0's buffers if this rank saves in its place and DDP would have given them to all; return notes."""
        rewind = self._monitor.context.undo.rewind
        if (
            not task.is_rescue
            or not task.writes_shared
            or task.rank == 0
            or (rewind.has_forward and not task.is_snapshot)
        ):
            return []
        given = task.rewinds[0].given if 0 in task.rewinds else {}
        if rewind.buffers.take_over(given):
            return []
        return [
            f"buffers (running statistics) are as rank {task.rank} has them: rank 0's, which DDP gives to all, are not known"
        ]

    def _restore(self, order: Order, *, is_hung: bool) -> "Rewound":
        context = self._monitor.context
        if order.snapshot < 0:
            return context.undo.rewind.restore(order.step)
        if context.undo.snapshots is None:
            raise RewindError(f"there is no snapshot of step {order.snapshot}: none are kept (HOLTER_SNAPSHOT_EVERY)")
        own = context.undo.snapshots.restore(order.snapshot, is_hung=is_hung)
        _write(Path(order.directory), self._here.rank, own)
        return own


def _lack_of_room(directory: Path) -> str:
    """Say that the disk is nearly full; empty if it is not, or cannot be asked."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return ""
    left_bytes = disk.f_bavail * disk.f_frsize
    return f"No space left on device: {left_bytes >> 10} KB are free" if left_bytes < FULL_BYTES else ""


def _rewinds(order: Order, here: RankPlace, own: "Rewound", *, patience_s: float) -> "Mapping[int, Rewound]":
    """Return how the step began for each rank; for others, what their sidecars wrote."""
    found = {here.rank: own}
    until_s = clock.monotonic_s() + patience_s
    while True:
        for rank in set(range(here.world_size)) - set(found):
            rewound = _read(_path(Path(order.directory), rank), own.step)
            # One of a round that a loss scaler skipped only on other ranks is not what they go back to.
            if rewound is not None and rewound.num_skipped == own.num_skipped:
                found[rank] = rewound
        if len(found) == here.world_size or clock.monotonic_s() >= until_s:
            return found
        threading.Event().wait(BLOBS_POLL_S)


def _path(directory: Path, rank: int) -> Path:
    return directory / "ranks" / f"{rank}.msgpack"


def _write(directory: Path, rank: int, own: "Rewound") -> None:
    """Write it as a sidecar does, completely or not at all, because the page holds no older step."""
    from holter.rank.undo import rewind  # noqa: PLC0415

    path = _path(directory, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.msgpack.encode([(own.step, rewind.encode(own))]))


def _read(path: Path, step: int) -> "Rewound | None":
    """Return how this step began for a rank; None if nobody wrote it for this step."""
    from holter.rank.undo import rewind  # noqa: PLC0415

    try:
        blobs = msgspec.msgpack.decode(path.read_bytes(), type=list[tuple[int, bytes]])
        return next((rewind.decode(blob) for at, blob in blobs if at == step), None)
    except (OSError, *UNREADABLE):
        return None


MAX_UNLOOKED = 16


class Looks(NamedTuple):
    """What is known of the state that is saved, from comparisons."""

    odd: Mapping[str, str]
    """Tensors that do not fit their history, with a sentence each."""
    replica_roots: Mapping[str, str]
    """For each set of ranks that must hold the same, the root of what this rank holds."""
    unlooked: Sequence[str] = ()
    """Tensors without a history."""


NO_LOOKS = Looks({}, {})


def prove(
    task: Task,
    keeper: Keeper,
    notes: Sequence[str] = (),
    own: Sequence[tuple[str, torch.Tensor]] = (),
    looks: Looks = NO_LOOKS,
) -> None:
    """Write `parts/<rank>.json`: what was written, what of it only this rank holds, and how it compares.

    Raises SaveError if not even that can be done.
    """
    try:
        ours = sorted(name for name in manifests.listed(task.directory) if _is_ours(name, task, keeper))
        sizes = {name: _synced_size(task.directory / name) for name in ours}
        part = msgspec.structs.replace(
            _part(task, keeper, sizes, notes, own),
            implausible=dict(looks.odd),
            replica_roots=dict(looks.replica_roots),
            unlooked=list(looks.unlooked[:MAX_UNLOOKED]),
        )
        path = task.directory / manifests.PARTS / f"{task.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written completely or not at all, because the coordinator reads it as soon as it exists.
        write_whole(path, manifests.encode(part))
    except OSError as error:
        raise SaveError(f"what rank {task.rank} wrote could not be read back: {error.strerror or error}") from error


def _part(
    task: Task,
    keeper: Keeper,
    sizes: dict[str, int],
    notes: Sequence[str],
    own: Sequence[tuple[str, torch.Tensor]],
) -> RankPart:
    from holter.frameworks.saving.reading import holds_tensors, tensors_in  # noqa: PLC0415

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
    live, with_nan, oversized = [], [], {}
    is_sharded = _is_split(sizes, task) or bool(getattr(keeper, "is_sharded", False))
    used = getattr(keeper, "used", lambda _name, tensor: [tensor])
    for name, tensor in keeper.live():
        if tensor.numel():
            live.append(_described(name, tensor, "", task.rank))
            parts = [part for part in used(name, tensor) if part.numel()]
            must_be_finite = _must_be_finite(name, tensor)
            if any((count_nonfinite if must_be_finite else count_nan)(part) for part in parts):
                with_nan.append(name)
            elif must_be_finite and (size := max(map(largest, parts), default=0.0)) > _limit(name, tensor):
                oversized[name] = size
        is_sharded = is_sharded or any(placement.is_shard() for placement in getattr(tensor, "placements", ()))
    described_own = [_described(name, tensor, "", task.rank) for name, tensor in own if tensor.numel()]
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
        oversized=oversized,
        missing=[tensor for tensor in live if tensor.content not in found],
        num_own=len(own),
        own_missing=[tensor for tensor in described_own if tensor.content not in found],
        notes=list(notes),
    )


def _must_be_finite(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor must be finite: trained ones and optimizer state must, a buffer or a frozen one may be a mask of infinities."""
    return tensor.requires_grad or name.startswith(("optim", "master weights"))


def _limit(name: str, tensor: torch.Tensor) -> float:
    """Return a size that no weight of a training model comes near, in whatever dtype; moments are squares of gradients."""
    limit = LARGEST_MOMENT if name.startswith("optim") else LARGEST_WEIGHT
    return min(limit, torch.finfo(tensor.dtype).max / 2) if tensor.is_floating_point() else limit


def _is_split(files: Iterable[str], task: Task) -> bool:
    """Whether other ranks' files are needed as well, by the names: one replica alone may also have written pieces."""
    names = [match for name in files if (match := _SHARD.match(Path(name).name))]
    return any(match[2] or match[3] or int(match[1]) != task.savers[0] for match in names)


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
    """Whether this rank reads a file back: the rank that wrote it, as far as its name tells, else the first saver."""
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
