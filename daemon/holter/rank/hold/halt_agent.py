"""The rank's halt agent: a thread that receives orders, and the place where the main thread waits for the decision.

    sidecar's socket ─┐                        ┌─▶ answers to the sidecar
    signals' pipe ────┼─▶ rank_protocol.advance ─┼─▶ the main thread, if it waits in `hold`: ask the register, save, go on, leave
    the clock ────────┤                        ├─▶ a thread that saves while the main thread is blocked
    hold, linger ─────┘                        └─▶ the process: leave with 93, or die of its own signal or exception

In a healthy run the thread is blocked in `poll` and costs nothing; the main thread reads two attributes at each step. Every wait ends: by an order, by
the sidecar's end, by the clock, or by Ctrl-C.
"""

import contextlib
import os
import select
import signal
import socket
import threading
from collections import deque
from dataclasses import dataclass, field

import msgspec

from holter import clock
from holter.files import UNREADABLE, encoded
from holter.halting import rank_protocol as table
from holter.halting.orders import refusal
from holter.halting.rank_protocol import Ask, Do, Rank, RankEvent, SaveState, Say, Stand
from holter.patience import ORPHAN_S, TERMINATED_S
from holter.rank.hold.commit_register import CommitRegister
from holter.rank.hold.halts import AgentParts, AgentSettings, HoldReason
from holter.records import Halting, Observation, Order, RankState
from holter.threads import without_signals

POLL_S = 0.2
"""Seconds after which a waiting main thread wakes by itself; whatever concerns it wakes it at once."""
LOOK_S = 1.0
"""Seconds between two looks into the register."""
SPARE_S = 5.0
"""Seconds after our own deadline at which the signal ends the process if we do not."""
MAX_ORDER_BYTES = 1 << 20
NEVER = float("inf")
_KEEPING = (Stand.SAVING, Stand.SAVED)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Order)


@dataclass
class _Clock:
    """The times at which the rank stops waiting in its present state."""

    standing: tuple[Stand, float | None] = (Stand.TRAINING, None)
    until_s: float = NEVER
    asked_until_s: float = NEVER
    """Until when we wait for a halt to begin after a SIGTERM that asked for one."""
    is_terminated: bool = False
    """Whether a SIGTERM came, of which the process dies unless we grant it more time."""


@dataclass
class _Standing:
    """What a waiting main thread still has to do, and why it waits."""

    why: str = ""
    todo: deque[Ask | SaveState | Do] = field(default_factory=deque)
    is_saving: bool = False
    is_lingering: bool = False
    """Whether it waits in the excepthook, not in `hold`."""


class HaltAgent:
    """The agent of one rank."""

    def __init__(self, settings: AgentSettings, parts: AgentParts, line: socket.socket) -> None:
        self.run_dir = settings.run_dir
        """The directory below which orders may make us write; ranks other than 0 learn it late."""
        self.num_refused = 0
        """Number of orders that were refused."""
        self._settings = settings
        self._parts = parts
        self._line = line
        self._rank = Rank(settings.rank)
        self._due: float = NEVER
        """From this step on the main thread has to be held; read without the lock."""
        self._asked = -1
        """The last step before which the main thread asked whether it has to be held."""
        self._is_wanted = settings.is_halting
        self._known: set[int] = set()
        """Numbers of the halts of which an order was obeyed: only these can end the rank while it trains."""
        self._main = _Standing()
        self._signal = ""
        """Name of the last signal that came."""
        self._clock = _Clock()
        self._register: CommitRegister | None = None
        self._changed = threading.Condition(threading.RLock())
        self._awake, self._wake = os.pipe()
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the thread that receives orders and signals."""
        os.set_blocking(self._wake, False)
        with without_signals():
            threading.Thread(target=self._listen, name="holter-halts", daemon=True).start()

    # The main thread calls these.

    def is_wanted(self) -> bool:
        """Whether a step that is not finite is to be held. After a release from such a hold it is not, because the weights are then bad."""
        return self._is_wanted

    def is_due(self, step: int) -> bool:
        """Whether the ranks agreed to stop before this step is applied; rounds that a loss scaler has skipped since the step before count as steps."""
        # The order matters: the agent's thread sets `_due` first and then reads `_asked`, so that one of the two sees the other.
        self._asked = step
        return step >= self._due

    def hold(self, step: int, why: HoldReason, num_skipped: int = 0) -> None:
        """Wait before this step until the halt is decided; return if training goes on, else leave with SystemExit(93)."""
        with self._changed:
            if self._rank.stand is Stand.LEAVING:
                # The script has caught the SystemExit and trains on: leave again.
                self._parts.leaving.leave(tells_agent=False)
            is_agreed = why == "agreed" and self._rank.stand not in _KEEPING
            self._main = _Standing(why=why)
            self._happen(table.Reached(step, is_agreed, num_skipped))
        try:
            self._stand(step)
        except SystemExit:
            raise
        except BaseException:
            self._happen(RankEvent.INTERRUPTED)
            raise
        if why != "agreed":
            self._is_wanted = False

    def linger(self, why: str) -> None:
        """Wait to be told whether to save, after an uncaught exception; then return, so that the process ends."""
        if not self._settings.is_halting or os.getpid() != self._pid:
            return
        with self._changed:
            self._main = _Standing(why=why, is_lingering=True)
            try:
                self._happen(RankEvent.THROWN)
                while self._rank.stand is Stand.DYING or self._rank.stand in _KEEPING:
                    self._changed.wait(POLL_S)
                    self._look_at_clock()
            except KeyboardInterrupt:
                self._happen(RankEvent.INTERRUPTED)

    def finish(self) -> None:
        """Wait for a save that is under way, so that the interpreter's end does not cut it off."""
        with self._changed:
            while os.getpid() == self._pid and self._rank.stand in _KEEPING:
                self._changed.wait(POLL_S)
                self._look_at_clock()

    def _stand(self, step: int) -> None:
        looked_s = clock.monotonic_s()
        while True:
            with self._changed:
                if not self._main.todo:
                    if self._rank.stand in (Stand.TRAINING, Stand.WILLING, Stand.DEAD):
                        return
                    self._changed.wait(POLL_S)
                    # The agent's own thread does that too, but a waiting thread must not depend on it.
                    self._look_at_clock()
                action = self._main.todo.popleft() if self._main.todo else None
                # Set under the lock: an order to leave must see either the save in the list or that it has begun.
                self._main.is_saving = isinstance(action, SaveState)
            match action:
                case Do.RELEASE:
                    return
                case Do.LEAVE:
                    self._parts.leaving.leave(tells_agent=self._tells_agent())
                case Ask():
                    self._happen(table.Answered(self._offer(action)))
                case SaveState():
                    self._save(action)
                case None if clock.monotonic_s() - looked_s > LOOK_S:
                    looked_s = clock.monotonic_s()
                    self._look(step)

    def _look(self, step: int) -> None:
        """Look for a peer's word in the register and obey it as an order: the peer may have received one that we have not."""
        if self._rank.stand is not Stand.HELD:
            return
        with contextlib.suppress(Exception):
            word = self._reach_register().look(step)
            with self._changed:
                if word is None or self._rank.stand is not Stand.HELD:
                    return
                if word.kind == "abort":
                    self._happen(RankEvent.PATIENCE_OVER)
                elif self._is_sane(word):
                    self._obey(word)

    def _offer(self, ask: Ask) -> Order:
        """Offer this order to the register and return the word that it keeps; an abort if the register cannot be reached or its word makes no sense."""
        abort = msgspec.structs.replace(ask.order, kind="abort")
        try:
            register = self._reach_register()
            if ask.order.kind == "abort" and not self._rank.has_sidecar:
                until_s = clock.monotonic_s() + ORPHAN_S
                while register.look(ask.step) is None and clock.monotonic_s() < until_s:
                    with self._changed:
                        self._changed.wait(POLL_S)
            word = register.offer(ask.step, ask.order)
        except Exception as error:  # noqa: BLE001  a store is another process's
            self._parts.log(f"the job's store cannot be asked ({type(error).__name__}: {error}); training goes on")
            return abort
        return word if self._is_sane(word) else abort

    def _reach_register(self) -> CommitRegister:
        if self._register is None:
            self._register = self._parts.register()
        return self._register

    # The agent's thread runs these.

    def _listen(self) -> None:
        poll = select.poll()
        for descriptor in (self._line.fileno(), self._parts.signal_fd, self._awake):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(self._timeout_ms())]
            try:
                self._turn(poll, ready)
            except Exception as error:  # noqa: BLE001  whatever is wrong with one order, the next is heard
                self._parts.log(f"the halt agent failed: {type(error).__name__}: {error}")
                # Pause, so that something unreadable is not read again and again.
                threading.Event().wait(POLL_S)

    def _turn(self, poll: select.poll, ready: list[int]) -> None:
        if self._awake in ready:
            os.read(self._awake, 4096)
        if self._line.fileno() in ready and not self._hear():
            poll.unregister(self._line.fileno())
        if self._parts.signal_fd in ready:
            for number in os.read(self._parts.signal_fd, 4096):
                self._signalled(number)
        self._look_at_clock()

    def _hear(self) -> bool:
        """Receive and obey one order; return False if the sidecar is gone."""
        try:
            said = self._line.recv(MAX_ORDER_BYTES)
        except OSError:
            said = b""
        if not said:
            with self._changed:
                self._happen(RankEvent.SIDECAR_LOST)
                if self._rank.stand in (Stand.DYING, Stand.TERMINATED):
                    self._happen(RankEvent.PATIENCE_OVER)
            return False
        try:
            order = _DECODER.decode(said)
        except UNREADABLE:
            self.num_refused += 1
            return True
        if self._is_sane(order):
            self._obey(order)
        return True

    def _obey(self, order: Order) -> None:
        with self._changed:
            is_ending = self._rank.stand in (Stand.DYING, Stand.TERMINATED)
            if order.kind == "leave" and order.halt not in self._known and not is_ending:
                self.num_refused += 1
                return
            if order.kind in ("prepare", "commit", "rescue"):
                if not self._settings.is_halting and not order.is_requested:
                    # A coordinator that was started separately may be set to halt although this job is not.
                    self.num_refused += 1
                    self._say("unwilling", order.halt, "the job's action is not halt")
                    return
                self._known.add(order.halt)
            if order.kind == "prepare":
                self._due = min(self._due, order.step)
            self._happen(table.OrderArrived(order, self._asked))

    def _is_sane(self, order: Order) -> bool:
        settings = self._settings
        why = refusal(order, rank=settings.rank, world_size=settings.world_size, run_dir=self.run_dir)
        if why is not None:
            self.num_refused += 1
            if self.num_refused == 1:
                self._parts.log(f"an order to rank {settings.rank} is not obeyed: {why}")
        return why is None

    def _signalled(self, number: int) -> None:
        is_term = number == signal.SIGTERM
        with self._changed:
            self._clock.is_terminated |= is_term
            self._signal = signal.Signals(number).name
            if number in self._settings.halt_signals and self._rank.has_sidecar:
                if is_term:
                    self._clock.asked_until_s = clock.monotonic_s() + TERMINATED_S
                self._happen(RankEvent.ASKED)
            elif is_term:
                self._happen(RankEvent.SIGNALLED)
                if not self._rank.has_sidecar and self._rank.stand is Stand.TERMINATED:
                    self._happen(RankEvent.PATIENCE_OVER)
                if self._rank.stand in (Stand.TRAINING, Stand.WILLING, Stand.DEAD):
                    self._die()
            self._grant()

    def _look_at_clock(self) -> None:
        now_s = clock.monotonic_s()
        with self._changed:
            if now_s >= self._clock.until_s:
                self._clock.until_s = NEVER
                self._happen(RankEvent.PATIENCE_OVER)
            if now_s >= self._clock.asked_until_s:
                self._clock.asked_until_s = NEVER
                # A willing rank has a deadline of its own.
                if self._rank.stand is Stand.TRAINING:
                    self._die()

    def _timeout_ms(self) -> float | None:
        with self._changed:
            until_s = min(self._clock.until_s, self._clock.asked_until_s)
        return None if until_s == NEVER else max(0.0, until_s - clock.monotonic_s()) * 1000 + 1

    # Both threads call these, under the lock.

    def _happen(self, event: table.Event) -> None:
        """Advance the protocol by this event, and do the actions that it returns."""
        with self._changed:
            if isinstance(event, RankEvent) and event is RankEvent.THROWN and not self._rank.has_sidecar:
                return
            self._rank, actions = table.advance(self._rank, event)
            self._settle()
            for action in actions:
                self._do(action)
            self._changed.notify_all()

    def _settle(self) -> None:
        """Set from the rank's present state from which step on the main thread has to be held, and until when we wait."""
        rank, patience_s = self._rank, self._parts.patience_s(self._rank)
        if rank.stand in (*_KEEPING, Stand.LEAVING):
            self._due = -1
        else:
            self._due = rank.step if rank.stand is Stand.WILLING else NEVER
        if (rank.stand, patience_s) == self._clock.standing:
            return
        self._clock.standing = rank.stand, patience_s
        self._clock.until_s = NEVER if patience_s is None else clock.monotonic_s() + patience_s
        self._grant()
        # If the pipe is full, it wakes the thread anyway.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"!")

    def _grant(self) -> None:
        """After a SIGTERM, set the timer that ends the process if we do not finish."""
        if not self._clock.is_terminated or self._parts.signals is None:
            return
        until_s = min(self._clock.until_s, self._clock.asked_until_s)
        left_s = TERMINATED_S if until_s == NEVER else max(0.0, until_s - clock.monotonic_s())
        self._parts.signals.grant(left_s + SPARE_S)

    def _do(self, action: table.Action) -> None:
        match action:
            case Say():
                self._say(action.state, action.halt, action.why)
            case SaveState(is_main_thread=False):
                self._save_beside(action)
            case Ask() | SaveState() | Do.RELEASE:
                self._main.todo.append(action)
            case Do.LEAVE:
                self._leave()
            case Do.DIE if self._rank.ending == "signal":
                self._die()

    def _save_beside(self, save: SaveState) -> None:
        try:
            with without_signals():
                threading.Thread(target=self._save, args=(save,), name="holter-rescue", daemon=True).start()
        except RuntimeError as error:
            self._happen(table.Saved(save.order.halt, f"no thread could be started to save: {error}"))

    def _leave(self) -> None:
        if self._rank.is_standing and not self._main.is_saving and not self._main.is_lingering:
            # A save that has not begun is dropped, because it might hang.
            self._main.todo.clear()
            self._main.todo.append(Do.LEAVE)
        else:
            self._parts.leaving.leave_now(tells_agent=self._tells_agent())

    def _die(self) -> None:
        if self._parts.signals is not None:
            self._parts.signals.die(signal.SIGTERM)

    def _tells_agent(self) -> bool:
        """Whether this rank signals its elastic agent, which then ends the others: of the agent's ranks the first one that saved does, or each if none did."""
        order, own = self._rank.order, self._settings.rank
        return own == min(self._settings.neighbours & set(order.savers if order is not None else ()), default=own)

    def _say(self, state: RankState, halt: int, why: str) -> None:
        position = self._parts.actions.position()
        if state in ("held", "dying"):
            why = self._main.why
        elif state in ("terminated", "asking"):
            why = self._signal
        said = Halting(state=state, halt=halt, why=why, is_torn=position.is_torn, poisoned_step=position.poisoned_step)
        observation = Observation(rank=self._settings.rank, step=position.step, at_ns=clock.wall_ns(), body=said)
        # It is noticed elsewhere if the sidecar is gone or has stopped reading.
        with contextlib.suppress(OSError):
            self._line.send(encoded(observation, _ENCODER.encode), socket.MSG_DONTWAIT)

    def _save(self, save: SaveState) -> None:
        """Save, in the main thread or in a thread of its own, and report the result to the protocol."""
        failure = ""
        try:
            self._parts.actions.save(save.order, is_main_thread=save.is_main_thread)
        except Exception as error:  # noqa: BLE001  whatever a framework raises says that nothing was saved
            failure = str(error) or type(error).__name__
        if save.is_main_thread:
            self._main.is_saving = False
        self._happen(table.Saved(save.order.halt, failure))
