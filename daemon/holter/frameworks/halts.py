"""Makes a rank's agent for halts, and what saves for it: that needs torch, the hooks and the frameworks.

    rewind.restore(step) -> frameworks.keeper -> keeper.save(task) -> proof.prove(task, keeper)
    snapshots.restore(step) where the order names a snapshot: how that step began is known to nobody else, so each saver writes it down

Nothing below `save` is imported before a save has been decided.
"""

import os
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holter import clock
from holter.config import Settings
from holter.errors import HolterError, PartlySavedError, RewindError, SaveError
from holter.files import write_whole
from holter.frameworks.place import RankPlace
from holter.rank.framework import Task
from holter.rank.guard import say
from holter.rank.hold import commit_register
from holter.rank.hold.agreement import Tree
from holter.rank.hold.halt_agent import HaltAgent
from holter.rank.hold.halts import AgentParts, AgentSettings, Leaving, Position, find_agent
from holter.rank.hold.peers import PeerAddress, ShardPeers
from holter.rank.hooks.signals import Termination
from holter.rank.monitor import Monitor
from holter.records import Farewell, Order

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holter.rank.undo.rewind import Rewound

BLOBS_S = 3.0
"""So long a rescue waits for what the sidecars of other ranks write down of them."""
BLOBS_POLL_S = 0.05
FULL_BYTES = 1 << 18
"""Less is no room for a file of a checkpoint."""


def open_agent(settings: Settings, here: RankPlace, monitor: Monitor, line: socket.socket, run_dir: str) -> HaltAgent:
    """The agent of this rank, which hears orders from now on; to be made before anything registers what it does at exit."""
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
        """Where the main thread is, as far as the hooks tell."""
        context = self._monitor.context
        return Position(context.log.step, self._monitor.is_torn(), context.hold.poisoned_step)

    def save(self, order: Order, *, is_main_thread: bool) -> None:
        """Save this rank's part of a checkpoint, as the order says; raises what is not saved."""
        try:
            self._save(order, is_main_thread=is_main_thread)
        except HolterError:
            raise
        except Exception as error:
            if not (left := _lack_of_room(Path(order.directory))):
                raise
            # Some writers turn it into a sentence of their own.
            raise SaveError(f"{left} ({error})") from error

    def _save(self, order: Order, *, is_main_thread: bool) -> None:
        from holter.frameworks.saving import proof  # noqa: PLC0415

        monitor, here = self._monitor, self._here
        if monitor.is_torn() and order.snapshot < 0:
            where = "between two optimizers of one step" if is_main_thread else "inside an optimizer's step"
            raise SaveError(f"the rank is {where}: its weights are partly new")
        if is_main_thread:
            # What we call now is not the script's doing, and the process ends afterwards.
            monitor.context.guard.is_on = False
        before = self._place()
        own = self._restore(order)
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
            is_snapshot=order.snapshot >= 0,
            base_step=order.base_step,
            deadline_s=order.deadline_s,
        )
        notes = self._take_over(task)
        keeper = monitor.context.frameworks.keeper(monitor.context, monitor.optimizers)
        partly = None
        try:
            keeper.save(task)
        except PartlySavedError as error:
            partly = error
        proof.prove(task, keeper, notes)
        if not is_main_thread and self._place() != before:
            raise SaveError("the rank went on by itself while it was saved")
        if partly is not None:
            raise partly

    def _place(self) -> tuple[int, int, int]:
        """Where the main thread is; one that is blocked stays there."""
        context = self._monitor.context
        return context.log.step, context.log.micro_step, context.phases.phase

    def _take_over(self, task: Task) -> list[str]:
        """Whoever saves for the first rank saves its buffers, where DDP would have given them to all; returns what is to be said."""
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

    def _restore(self, order: Order) -> "Rewound":
        context = self._monitor.context
        if order.snapshot < 0:
            return context.undo.rewind.restore(order.step)
        if context.undo.snapshots is None:
            raise RewindError(f"there is no snapshot of step {order.snapshot}: none are kept (HOLTER_SNAPSHOT_EVERY)")
        own = context.undo.snapshots.restore(order.snapshot)
        _write(Path(order.directory), self._here.rank, own)
        return own


def _lack_of_room(directory: Path) -> str:
    """That the disk is as good as full; empty: it is not, or cannot be asked."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return ""
    left_bytes = disk.f_bavail * disk.f_frsize
    return f"No space left on device: {left_bytes >> 10} KB are free" if left_bytes < FULL_BYTES else ""


def _rewinds(order: Order, here: RankPlace, own: "Rewound", *, patience_s: float) -> "Mapping[int, Rewound]":
    """How the step began for each rank: of others, what their sidecars wrote."""
    found = {here.rank: own}
    until_s = clock.monotonic_s() + patience_s
    while True:
        for rank in set(range(here.world_size)) - set(found):
            rewound = _read(_path(Path(order.directory), rank), own.step)
            # Of a round that a loss scaler skipped for others only: it is not what they go back to.
            if rewound is not None and rewound.num_skipped == own.num_skipped:
                found[rank] = rewound
        if len(found) == here.world_size or clock.monotonic_s() >= until_s:
            return found
        threading.Event().wait(BLOBS_POLL_S)


def _path(directory: Path, rank: int) -> Path:
    return directory / "ranks" / f"{rank}.msgpack"


def _write(directory: Path, rank: int, own: "Rewound") -> None:
    """As a sidecar writes what the page holds, whole or not at all; it holds no step of long ago."""
    from holter.rank.undo import rewind  # noqa: PLC0415

    path = _path(directory, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.msgpack.encode([(own.step, rewind.encode(own))]))


def _read(path: Path, step: int) -> "Rewound | None":
    """How this step began for a rank; None: nobody wrote it, or not of this step."""
    from holter.rank.undo import rewind  # noqa: PLC0415

    try:
        blobs = msgspec.msgpack.decode(path.read_bytes(), type=list[tuple[int, bytes]])
        return next((rewind.decode(blob) for at, blob in blobs if at == step), None)
    except (OSError, msgspec.MsgspecError):
        return None
