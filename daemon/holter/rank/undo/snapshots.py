"""Keeps copies of the training state in memory, so that a poisoned, torn or hung run can go back to a step of seconds ago.

    forward k begins    the state of k completed steps: buffers and random states are known as of here, weights do not change before the optimizer's step
    forward, backward   weights and optimizer state are copied meanwhile
    optimizer's step    waits until they are copied; the newest two copies are kept, the memory of the older one is used for the next

Which steps are copied depends on their numbers only, so that ranks agree. If `max_bytes` does not suffice for two copies, there is one; if
not for one, there is none, and the log says so. Frozen parameters are not copied unless they have changed.

The user asked for the copies, so they count neither as overhead nor towards its budget. Approximate times on two shared virtual cores:
100 MB (AdamW, 8 M parameters) take 1 ms before the forward pass and 20 ms beside it (5 GB/s), 10 MB take 0.5 and 5 ms. The optimizer's step
finds them done, but a pass that keeps all cores busy takes longer by about as much. Searching for schedulers takes 80 ms, once.

Copies are made beside the training, by a thread, or on a stream of their own.

    copy begins   forward … backward   settle      weights change
    thread        copies ──────────▶   joined                        the interpreter's lock is free meanwhile
    device        copies on a side stream into slabs of pinned memory ──▶     the training's stream waits for it, the host does not
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from holter import clock
from holter.errors import RewindError
from holter.rank.context import Context
from holter.rank.guard import is_from_signal_handler, say
from holter.rank.readings.samples import is_plain_moment, local
from holter.rank.undo.rewind import Rewound
from holter.rank.undo.side_stream import beside_training, devices_of, wait_until
from holter.rank.undo.state_parts import RestingParameter, StateGatherer, StatePart, parameters_of, take_image
from holter.records import Snapped
from holter.threads import without_signals
from holter_kernels import side_stream
from holter_kernels.devices import can_pin, is_past, on_stream, recorded, wait_for

NUM_COPIES = 2
SLAB_BYTES = 1 << 20
ALIGNMENT = 64
COPIED_S = 10.0
"""Seconds that a halt waits for a copy that is under way on a device."""

Pair = tuple[torch.Tensor, torch.Tensor]


def room_for(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Allocate host memory for a copy of each tensor, with the same layout; for tensors on a device it is cut from a few pinned slabs.

    torch rounds each pinned allocation up to a power of two, which may double it. So the slabs are powers of two, as large as the largest tensor
    needs; they are filled from the largest tensor to the smallest, and each is cut to what is used of it.
    """
    large = [index for index, source in enumerate(sources) if can_pin(source.device.type) and source.nbytes]
    large.sort(key=lambda index: -sources[index].nbytes)
    slab_bytes = max([SLAB_BYTES, *(_power_of_two(sources[index].nbytes) for index in large[:1])])
    filled: list[int] = []
    places: dict[int, tuple[int, int]] = {}
    for index in large:
        num_bytes = -(-sources[index].nbytes // ALIGNMENT) * ALIGNMENT
        slab = next((k for k, used in enumerate(filled) if used + num_bytes <= slab_bytes), len(filled))
        filled += [0] * (slab == len(filled))
        places[index] = slab, filled[slab]
        filled[slab] += num_bytes
    slabs = [torch.empty(_power_of_two(used), dtype=torch.uint8, pin_memory=True) for used in filled]
    rooms = []
    for index, source in enumerate(sources):
        like = torch.empty_like(source, device="meta")
        if index in places:
            slab, start = places[index]
            flat = slabs[slab][start : start + source.nbytes].view(source.dtype)
            rooms.append(flat.as_strided(like.shape, like.stride()))
        else:
            rooms.append(torch.empty_like(source, device="cpu"))
    return rooms


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def fits(room: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether this memory can take a copy of the tensor: shape, dtype and strides are equal, and it is pinned if that is possible."""
    return (room.shape, room.dtype, room.stride()) == (source.shape, source.dtype, source.stride()) and (
        room.is_pinned() or not can_pin(source.device.type)
    )


class BackgroundCopy:
    """One set of copies that are being made; each pair is (target, source).

    The thread is not a daemon: a daemon thread that is in native code at the interpreter's end would abort the process.
    """

    def __init__(self, still: Sequence[Pair], moving: Sequence[Pair]) -> None:
        self._moving = moving
        self._here = [pair for pair in still if pair[1].device.type == "cpu"]
        self._there = [pair for pair in still if pair[1].device.type != "cpu"]
        self._thread = threading.Thread(target=self._run, name="holter-snapshot", daemon=False)
        self._events: list[tuple[Any, Any]] = []
        self._error: Exception | None = None
        self._ended_s = 0.0

    def start(self) -> None:
        """Copy the moving tensors at once and begin to copy the others, which must not change before `settle`."""
        _copy(self._moving)
        for device in {source.device for _, source in (*self._moving, *self._there)} - {torch.device("cpu")}:
            side = side_stream(device, "snapshots")
            if side is not None:
                side.wait_event(recorded(device))
            with on_stream(side, device):
                _copy([pair for pair in self._there if pair[1].device == device])
                self._events.append((device, recorded(device)))
        with without_signals():
            self._thread.start()

    def _run(self) -> None:
        try:
            _copy(self._here)
            self._ended_s = clock.monotonic_s()
        except Exception as error:  # noqa: BLE001  `settle` raises it
            self._error = error

    def settle(self) -> None:
        """Wait for the thread, and have the device wait, because the sources are about to change. Raises what the copying raised."""
        self._thread.join()
        for device, event in self._events:
            wait_for(event, device)
        if self._error is not None:
            raise self._error
        self._here, self._moving = [], []

    def ended_s(self) -> float:
        """Return when the copying ended, by the monotonic clock; with a device, the present time, since it was just seen to be over."""
        return self._ended_s if not self._events else clock.monotonic_s()

    def is_done(self) -> bool:
        """Whether everything has been copied."""
        if (
            self._thread.is_alive()
            or self._error is not None
            or not all(is_past(event, device) for device, event in self._events)
        ):
            return False
        self._there = []
        return True


def _copy(pairs: Sequence[Pair]) -> None:
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs], non_blocking=True)


@dataclass(eq=False)
class Snapshot:
    """One copy of the whole training state."""

    step: int
    """Number of completed steps in it."""
    rewound: Rewound
    images: list[tuple[StatePart, Any]]
    """(part without its living state, image of that state)."""
    copies: list[torch.Tensor]
    under_way: BackgroundCopy
    resting: list[tuple[torch.Tensor, int]]
    """(tensor, torch's count of its changes) of each tensor that must not change while it is copied."""
    frozen: list[RestingParameter]
    """(parameter, torch's count of its changes) of each parameter that is not copied because it does not change."""
    began_s: float
    num_lost: int
    is_told: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that it takes."""
        return sum(copy.nbytes for copy in self.copies)


class Snapshots:
    """One rank's snapshots; the hooks call `begin` and `settle`, and a halt that is decided calls `restore`."""

    def __init__(
        self, context: Context, optimizers: Callable[[], list[torch.optim.Optimizer]], *, every: int, max_bytes: int = 0
    ) -> None:
        self._context = context
        self._gatherer = StateGatherer(context.models, context.frameworks, optimizers)
        self._every, self._max_bytes = every, max_bytes
        self._whole: list[Snapshot] = []
        """Finished snapshots, oldest first."""
        self._open: Snapshot | None = None
        self._do_weights_move = False
        """Whether weights were seen to change before the optimizer's step, so that all is now copied before the forward pass."""
        self._is_off = False
        self._has_said = self._has_missed = False
        self._last_forward = 0
        """The last step that was due for a copy and whose forward pass was seen."""
        self._num_lost = 0
        context.models.on_forget.append(self.forget)

    def begin(self, step: int) -> None:
        """Begin a snapshot if this step is due, before its first forward pass."""
        if not self._is_due(step):
            return
        self._last_forward = step
        if not is_plain_moment():
            return
        with self._unharmed():
            self._open = self._lay_out(step)
            if self._open is not None:
                self._open.under_way.start()

    def _is_due(self, step: int) -> bool:
        return step > 0 and step % self._every == 0 and not self._is_off

    def settle(self) -> None:
        """Finish the snapshot that is being made, because weights are about to change; report those whose copies are done."""
        log = self._context.log
        if self._is_due(log.step) and self._last_forward != log.step and log.micro_step and not self._has_missed:
            self._has_missed = True
            say(
                f"rank {self._context.writer.rank}: there is no snapshot of step {log.step}, because its forward pass "
                "was not seen (a compiled model shows none)"
            )
        if self._open is not None:
            with self._unharmed():
                self._finish(self._open)
            self._open = None
        for snapshot in self._whole:
            if not snapshot.is_told and snapshot.under_way.is_done():
                self._tell(snapshot)

    def restore(self, step: int, *, is_hung: bool = False) -> Rewound:
        """Put the state of `step` completed steps back into the living objects; only called after a halt is decided.

        On a device this happens after all queued work, which would otherwise overwrite it; if the training's stream hangs, beside that stream.
        """
        opened = self._open
        if opened is not None and opened.step == step:
            self._finish(opened)
        found = next((each for each in self._whole if each.step == step), None)
        if found is None or not wait_until(found.under_way.is_done, COPIED_S):
            steps = " and ".join(str(each.step) for each in self._whole if each is not found)
            raise RewindError(f"there is no snapshot of step {step}" + f", only of {steps}" * bool(steps))
        parameters = list(parameters_of(self._context.models.all(), self._context.frameworks))
        self._check(found, parameters)
        with torch.no_grad(), beside_training(devices_of(parameters), is_hung=is_hung):
            for part, image in found.images:
                part.put(part.owner(), image, found.copies)
        found.rewound.restore()
        return found.rewound

    def forget(self) -> None:
        """Drop all snapshots, because the script has let go of a model and its memory must be freed; may be called in any thread at any moment."""
        self._num_lost += 1
        self._open, self._whole = None, []

    @contextlib.contextmanager
    def _unharmed(self) -> Iterator[None]:
        """Let a failure end the snapshots and not the training, and do not count the time as overhead."""
        began_s = clock.monotonic_s()
        try:
            yield
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            self._give_up(f"{type(error).__name__}: {error}")
        self._context.guard.own_s -= clock.monotonic_s() - began_s

    def _give_up(self, why: str) -> None:
        self._is_off, self._open, self._whole = True, None, []
        say(f"rank {self._context.writer.rank} keeps no snapshots any more: {why}")

    def _lay_out(self, step: int) -> Snapshot | None:
        began_s, num_lost = clock.monotonic_s(), self._num_lost
        rewound = self._context.undo.rewind.known()
        if engine := self._gatherer.engine():
            self._give_up(f"{engine} keeps weights and counters where they are not found")
        if self._is_off or rewound is None:
            return None
        found, frozen = self._gatherer.gather(self._context.undo.rewind.buffers)
        sources: list[torch.Tensor] = []
        shown: list[tuple[StatePart, Any]] = []
        moving: list[bool] = []
        for part in found:
            shown.append((replace(part, state=None, apart=()), take_image(part.state, sources, part.apart)))
            moving += [part.is_moving or self._do_weights_move] * (len(sources) - len(moving))
        sources = [local(source) for source in sources]
        room = self._room(sources)
        if room is None:
            return None
        pairs: dict[bool, list[Pair]] = {False: [], True: []}
        for target, source, is_moving in zip(room, sources, moving, strict=True):
            pairs[is_moving].append((target, source))
        under_way = BackgroundCopy(pairs[False], pairs[True])
        resting = [(source, source._version) for _, source in pairs[False]]  # noqa: SLF001
        return Snapshot(step, rewound, shown, room, under_way, resting, frozen, began_s, num_lost)

    def _room(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return host memory for one copy, that of the oldest copy if the limit is reached; None if there is not room for even one."""
        num_bytes = sum(source.nbytes for source in sources)
        most = NUM_COPIES if not self._max_bytes else min(NUM_COPIES, self._max_bytes // max(num_bytes, 1))
        if not most:
            self._give_up(
                f"one takes {num_bytes / 1e6:.1f} MB, and snapshot_bytes allows {self._max_bytes / 1e6:.1f} MB"
            )
            return None
        spare: list[torch.Tensor] = []
        if self._open is not None:
            # A loss scaler skipped the step of the open snapshot.
            self._open.under_way.settle()
            spare, self._open = self._open.copies, None
        while len(self._whole) >= most:
            spare = self._whole.pop(0).copies
        if not self._has_said and self._context.writer.rank == 0:
            self._has_said = True
            say(
                f"every {self._every} steps the training state is copied in memory: {num_bytes / 1e6:.1f} MB on rank 0, "
                f"of which {most} cop{'ies are' if most > 1 else 'y is'} kept"
            )
        if len(spare) == len(sources) and all(map(fits, spare, sources)):
            return spare
        del spare
        return room_for(sources)

    def _finish(self, snapshot: Snapshot) -> None:
        snapshot.under_way.settle()
        resting, snapshot.resting = snapshot.resting, []
        if any(tensor._version != version for tensor, version in resting):  # noqa: SLF001
            self._do_weights_move = True
            say(
                f"rank {self._context.writer.rank}: weights change between the forward pass and the optimizer's step: "
                f"there is no snapshot of step {snapshot.step}, and the next ones are copied before the pass"
            )
        elif snapshot.num_lost == self._num_lost and snapshot not in self._whole:
            self._whole.append(snapshot)

    def _tell(self, snapshot: Snapshot) -> None:
        snapshot.is_told = True
        seconds = snapshot.under_way.ended_s() - snapshot.began_s
        self._context.writer.say(snapshot.step, Snapped(num_bytes=snapshot.num_bytes, seconds=seconds))

    def _check(self, snapshot: Snapshot, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Raise RewindError unless everything that trains now is in the snapshot, and everything in the snapshot still exists."""
        about = f"the snapshot of step {snapshot.step}"
        owners = {id(owner) for part, _ in snapshot.images if (owner := part.owner()) is not None}
        for each in (*self._gatherer.in_use(), *(each for each in parameters if each.requires_grad)):
            if id(each) not in owners:
                raise RewindError(f"{about} has no {type(each).__name__} that is used now")
        if any(part.owner() is None for part, _ in snapshot.images):
            raise RewindError(f"part of what {about} has does not exist any more")
        if any((rests := first()) is not None and rests._version != version for first, version in snapshot.frozen):  # noqa: SLF001
            raise RewindError(f"{about} lacks a frozen parameter that has moved since")
