"""The coordinator's process: one listening socket, one loop that judges, and an end that comes by itself.

    sidecars --> Listener --> Run.intake, Run.judge --> tables to fetch, news to tell, halts to continue
    people   --/, /api, /metrics--> Pages

Decisions are made elsewhere (`Run`) or in pure functions (`end_reason`); here are sockets, timers and signals.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from holter import clock
from holter.coordinator.announcer import Announcer, AnnouncerSettings
from holter.coordinator.closing import closing_line
from holter.coordinator.disk import DirectoryLock
from holter.coordinator.halt import sealing
from holter.coordinator.halt.driver import Act, Open, Outcome
from holter.coordinator.http.doors import Doors, DoorSettings, runner_of
from holter.coordinator.http.pages import AskHalt, Pages
from holter.coordinator.identity import ACCESS, Access, RunSettings
from holter.coordinator.recovery import journal, rebuilt_run
from holter.coordinator.roster import Roster
from holter.coordinator.run import FollowUp, Run
from holter.coordinator.run_card import card_of
from holter.diagnosis import report
from holter.errors import UsageError
from holter.faults import ALL, CAUSES, Detector, TableKey
from holter.faults.hangs.endings import kind_of
from holter.faults.window import RankExit
from holter.files import as_json, read_json, write_whole
from holter.halting.protocol import Tell
from holter.halting.vault.store import Vault
from holter.records import Diagnosis, Order
from holter.transport import wire
from holter.transport.choice import transport_of
from holter.transport.interface import ListenerMaker, Right

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FETCH_ROUNDS = 4
"""Largest number of fetches at the end: a detector may ask for more after it has seen what it asked for."""

OPEN_DEADLINE_S = 5.0
"""Seconds for making a directory, while ranks stand and wait for it."""

CARD_S = 1.0
LINGER_LOOK_S = 0.5

RECKON_S = 10.0
"""Seconds between two writes of where the time went."""

MAX_TOLD = 256
"""Largest number of ranks whose launchers are told what ended the job; one of them shows it."""

MAX_PAUSE_S = 1.0
"""Longest time in seconds between two judgements."""
RANKS_JUDGED_PER_S = 16_000
"""A job with more ranks is judged less often, but at least once a second; what is urgent is judged at once all the
same."""


@dataclass(frozen=True)
class Limits:
    """How long to wait for whom, in seconds."""

    first_s: float = 120.0
    """Seconds for the first sidecar of all."""
    idle_s: float = 30.0
    """Seconds for a sidecar to come back, if none is connected and not every rank has ended."""
    stragglers_s: float = 5.0
    """Seconds for ranks that never came, or whose sidecar was lost, if all others have ended."""
    settle_s: float = 1.2
    """Seconds after an abnormal end, so that deaths are in order and the last judgement sees them all."""
    linger_s: float = 0.0
    """Seconds after the end of a run with an incident or a halt, so that scrapers see it."""
    hold_s: float = 5.0
    """Seconds for which a sidecar that said Goodbye stays connected, to be asked for tables and told the news."""

    def __post_init__(self) -> None:
        for name in ("first_s", "idle_s", "stragglers_s", "settle_s", "linger_s", "hold_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True)
class ServiceSettings:
    """How the process behaves."""

    doors: DoorSettings
    """Who may come in; its `report_token` is what a sidecar must show."""
    halt_token: str = ""
    """Token for halting the run; empty: nobody may."""
    version: str = ""
    """Version of holter, for the metrics."""
    judge_interval_s: float = 0.25
    """Longest time between two judgements, in seconds; what is urgent is judged at once."""
    urgent_interval_s: float = 0.05
    """Shortest time between two judgements: ranks that all report NaN at every step must leave time for other work."""
    fetch_deadline_s: float = 2.0
    """Seconds that sidecars may take to send a table."""
    flush_interval_s: float = 1.0
    """Seconds for which data to be written may stay in memory."""
    disk_deadline_s: float = 5.0
    """Seconds at the end for what is still to be written."""
    seal_s: float = 600.0
    """Seconds for which a halt whose ranks are gone is still sealed."""
    has_run_clock: bool = False
    """Whether whoever started this process has set the run's clock."""
    is_only_one: bool = False
    """Whether to refuse to start if another coordinator writes to the run directory. Otherwise it warns and gives no
    orders, because a job must be watched in any case."""
    limits: Limits = field(default_factory=Limits)
    announcing: AnnouncerSettings = field(default_factory=AnnouncerSettings)


class Coordinator:
    """Watches one run: `start`, then `run` until there is nothing left to do."""

    def __init__(  # noqa: PLR0913 - the last two are of who shares a run
        self,
        about: RunSettings,
        settings: ServiceSettings,
        detectors: Sequence[Detector] = ALL,
        ask_halt: AskHalt | None = None,
        *,
        listen: ListenerMaker | None = None,
        right: Right | None = None,
    ) -> None:
        self.watched = Run(about, detectors)
        self._settings = settings
        self._right = right
        """Right to give orders; None if nobody else can want to, except one who writes to the same directory."""
        self.watched.disk.may_write = self._may_write
        self._wake = asyncio.Event()
        # Without another transport the coordinator listens on its own port: its address is `host:port`.
        listen = listen or transport_of("").listener
        self._listener = listen(self.watched.intake, settings.doors.report_token, self._wake.set, self._hold)
        self._pages = Pages(
            self.watched, settings.version, token=settings.halt_token, ask_halt=ask_halt or self._ask_halt
        )
        self.doors = Doors(settings.doors)
        self._announcer = Announcer(self.watched, settings.announcing)
        self._lock = DirectoryLock(about.run_dir)
        self._stop = asyncio.Event()
        self._is_over = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._fetching: set[TableKey] = set()
        """Tables that were asked for and are not here yet."""
        self._quiet_since_s = clock.monotonic_s()
        self._flushed_s = self._reckoned_s = clock.monotonic_s()
        self._carded_s = 0.0

    async def start(self, listener: socket.socket) -> None:
        """Serve on a socket that is already bound; callers wait in its queue until then."""
        if not self._lock.take() and self._right is None:
            self._say_there_are_two()
        if not self._settings.has_run_clock:
            self._go_on_with_the_clock()
        rebuilt_run.recall(self.watched, clock.wall_ns())
        app = web.Application(middlewares=[self.doors.middleware])
        self._listener.mount(app)
        app.add_routes(self._pages.routes())
        self._runner = runner_of(app)
        await self._runner.setup()
        assert self._runner.server is not None
        await self.doors.open(listener, self._runner.server)
        about, settings = self.watched.settings, self._settings
        access = Access(
            address=about.address,
            token=settings.doors.report_token,
            halt_token=settings.halt_token,
            read_token=settings.doors.read_token,
            pid=os.getpid(),
            clock_base_ns=clock.base_ns(),
            clock_boot=clock.boot_id(),
        )
        self.watched.disk.submit(partial(write_whole, about.run_dir / ACCESS, as_json(access), 0o600))
        self.watched.intake.write_down()
        self._announcer.start()

    def _go_on_with_the_clock(self) -> None:
        """Continue with the clock of a former coordinator if it is known, because the host's clock may have been set since.

        It is known on the same boot of the host.
        """
        former = read_json(self.watched.settings.run_dir / ACCESS, Access)
        written_ns = journal.written_ns(self.watched.intake.journal.folder)
        if former is None or not former.clock_boot or former.clock_boot != clock.boot_id():
            clock.be_at_least(written_ns)
        elif 0 <= clock.by_base_ns(former.clock_base_ns) - written_ns < rebuilt_run.MAX_AWAY_NS:
            clock.go_on_from(former.clock_base_ns)

    def _say_there_are_two(self) -> None:
        run_dir = self.watched.settings.run_dir
        known = read_json(run_dir / ACCESS, Access)
        who = f"another coordinator{f' (process {known.pid})' if known is not None else ''} writes to {run_dir}"
        if self._settings.is_only_one:
            raise UsageError(f"{who}; end it, or give this run a directory of its own")
        logger.warning("%s too, and gives the orders; this one halts nothing until it is gone", who)
        self.watched.also_written_by = f"run directory: {who} too; it alone halts the run"

    def _take_over(self) -> None:
        """Take over if the other coordinator is gone; until then this one waits, because two of them could halt ranks at two steps."""
        if self.watched.also_written_by and self._lock.take():
            logger.warning("the other coordinator is gone; orders are given here now")
            self.watched.also_written_by = ""

    def stop(self) -> None:
        """Make `run` end soon, after a last judgement."""
        self._stop.set()
        self._wake.set()

    async def run(self) -> str:
        """Judge until the end; return why it ended."""
        reason = None
        while reason is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._judge_interval_s):
                    await self._wake.wait()
            self._wake.clear()
            if self.has_lost_right:
                return await self._step_down()
            self._take_over()
            began_s = clock.monotonic_s()
            await self._judge()
            judging_s = clock.monotonic_s() - began_s
            if self._right is not None:
                self._right.sign(self._card())
            self.watched.judging.runner.guard("the page", self._pages.page_state.look)
            self._flush()
            reason = self._end_reason()
            # Judging a job of many ranks takes long; at least half of the time is left for receiving their reports.
            await asyncio.sleep(min(max(self._settings.urgent_interval_s, judging_s), MAX_PAUSE_S))
        logger.info("ending: %s", reason)
        if self._right is not None and self._stop.is_set():
            return await self._hand_over(reason)
        await self._judge_at_last()
        self.watched.judging.runner.guard("the page", self._pages.page_state.look)
        await self._say_the_last_line()
        self._is_over.set()
        await self._pages.events.close(reason)
        await self._close()
        return reason

    @property
    def has_lost_right(self) -> bool:
        """Whether another coordinator gives the orders."""
        return self._right is not None and self._right.standing() == "lost"

    def _card(self) -> bytes:
        """Return a new card now and then; empty if the last one still holds."""
        if clock.monotonic_s() - self._carded_s < CARD_S:
            return b""
        self._carded_s = clock.monotonic_s()
        return self.watched.judging.runner.guard("the card", lambda: as_json(card_of(self.watched))) or b""

    def _may_write(self) -> bool | None:
        if self._right is None:
            return True
        standing = self._right.standing()
        return None if standing == "suspended" and not self._is_over.is_set() else standing != "lost"

    async def _step_down(self) -> str:
        """End because another coordinator took over; it writes what is not written yet, having heard the same."""
        self._is_over.set()
        await self._end_quietly("another coordinator took over")
        return "another coordinator took over"

    async def _hand_over(self, reason: str) -> str:
        """End, but conclude nothing: the run continues with another coordinator."""
        self.watched.intake.write_down()
        await asyncio.to_thread(self.watched.close, self._settings.disk_deadline_s)
        self._is_over.set()
        await self._end_quietly(reason)
        return reason

    async def _end_quietly(self, reason: str) -> None:
        await self._pages.events.close(reason)
        await self.doors.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await asyncio.to_thread(self.watched.close, self._settings.disk_deadline_s)
        self._lock.release()

    @property
    def _judge_interval_s(self) -> float:
        large_s = min(MAX_PAUSE_S, self.watched.roster.world_size / RANKS_JUDGED_PER_S)
        return max(self._settings.judge_interval_s, large_s)

    async def _judge(self) -> None:
        """Judge as of now, and tell the news; tables that are missing are fetched meanwhile: what is urgent does not wait for them."""
        tables = await self._judge_once()
        if missing := [key for key in tables if key not in self._fetching]:
            self._fetching.update(missing)
            self._keep(self._fetch(missing))

    async def _judge_once(self, *, is_final: bool = False) -> Sequence[TableKey]:
        """Returns what is missing."""
        follow_up = self.watched.judge(clock.wall_ns(), is_final=is_final)
        if self.has_lost_right:
            return ()
        await self._tell(follow_up)
        await self._listener.examine(follow_up.exams)
        return follow_up.tables

    async def _fetch(self, keys: Sequence[TableKey]) -> None:
        try:
            await self._listener.fetch(keys, self._settings.fetch_deadline_s)
        finally:
            self._fetching.difference_update(keys)
        self._wake.set()

    async def _judge_at_last(self) -> None:
        """Judge, fetch what is missing, judge again."""
        if self._tasks and self._fetching:
            await asyncio.wait(self._tasks, timeout=self._settings.fetch_deadline_s)
        for _ in range(MAX_FETCH_ROUNDS):
            if not (tables := await self._judge_once(is_final=True)):
                return
            await self._listener.fetch(tables, self._settings.fetch_deadline_s)
        await self._judge_once(is_final=True)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Until it is done."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, follow_up: FollowUp) -> None:
        for diagnosis in follow_up.fresh:
            text = report.headline(diagnosis)
            logger.warning("incident %s: %s", diagnosis.id, text)
            await self._listener.notify(0, wire.Notice(severity=diagnosis.severity, text=text))
            await self._tell_launchers(diagnosis)
        self._announcer.tell()
        for text in (*follow_up.alarms, *follow_up.halt_news):
            logger.warning("%s", text)
            await self._listener.notify(0, wire.Notice(severity="critical", text=text))
        for act in follow_up.acts:
            await self._carry_out(act)

    async def _tell_launchers(self, diagnosis: Diagnosis) -> None:
        """Tell launchers what to show for a failing rank: the rank's own last words are often those of a victim."""
        entry = CAUSES.get(diagnosis.causes[0].cause) if diagnosis.causes else None
        if diagnosis.severity != "critical" and (entry is None or not entry.is_death):
            return
        text = f"{report.headline(diagnosis)}\n{diagnosis.symptom}\nholter report {self.watched.settings.run_dir}"
        notice = wire.Notice(severity=diagnosis.severity, text=text, kind="verdict")
        ranks = sorted(self.watched.roster.members)[:MAX_TOLD]
        await asyncio.gather(*(self._listener.notify(rank, notice) for rank in ranks))

    async def _say_the_last_line(self) -> None:
        line = closing_line(self.watched.summary())
        logger.info("%s", line)
        await self._listener.notify(0, wire.Notice(severity="info", text=line, kind="closing"))

    async def _carry_out(self, act: Act) -> None:
        """Do what a halt asks for; a disk may take its time, and reports are received meanwhile."""
        if isinstance(act, Tell):
            if self._right is not None:
                # Written before anybody is told, because a successor must know of it.
                await self.watched.disk.written()
            await self._listener.order(act.order, act.ranks)
            return
        self._keep(self._open(act.step) if isinstance(act, Open) else self._seal(act.order))

    async def _open(self, step: int) -> None:
        run_dir, base_step, stamp = self.watched.settings.run_dir, self.watched.checkpoints.base_step, clock.wall_ns()
        completed = base_step + step
        waiting = _in_thread(partial(sealing.open_directory, run_dir, completed, stamp))
        done, _ = await asyncio.wait({waiting}, timeout=OPEN_DEADLINE_S)
        where, why_not = Vault(run_dir).partial(completed, stamp), f"{run_dir} does not answer"
        if done:
            error = waiting.exception()
            where, why_not = waiting.result() if error is None else (where, f"{type(error).__name__}: {error}")
        self.watched.halts.opened(where, why_not, clock.wall_ns(), base_step)
        self._wake.set()

    async def _seal(self, order: Order) -> None:
        try:
            kept = await _in_thread(partial(sealing.seal, self.watched.ending(order)))
        except Exception as error:
            logger.exception("what was saved could not be sealed")
            text = f"halted, and what was saved could not be sealed: {type(error).__name__}: {error}"
            kept = sealing.SealedHalt(Outcome("failed", text), None)
        self.watched.sealed(kept)
        self._wake.set()

    def _ask_halt(self, reason: str, by: str) -> str | None:
        if self.watched.also_written_by:
            return self.watched.also_written_by
        why = self.watched.halts.ask(by, reason, clock.wall_ns())
        self._wake.set()
        return why

    async def _hold(self, _: int) -> None:
        """Hold a sidecar that said Goodbye until the last judgement, at most for `hold_s`, but as long as a halt needs it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.limits.hold_s):
                await self._is_over.wait()
        while self.watched.halts.is_busy and not self._is_over.is_set():  # noqa: ASYNC110 - it is looked at once in a while anyway
            # It may have to write how the step began for a rank that is dead.
            await asyncio.sleep(self._settings.urgent_interval_s)

    def _end_reason(self) -> str | None:
        if self._stop.is_set():
            return "asked to stop"
        now_s = clock.monotonic_s()
        roster = self.watched.roster
        if roster.members and not roster.has_everyone_ended and roster.num_connected:
            self._quiet_since_s = now_s
        reason = end_reason(roster, now_s - self._quiet_since_s, self._settings.limits)
        return None if self.watched.halts.is_busy and now_s - self._quiet_since_s < self._settings.seal_s else reason

    def _flush(self) -> None:
        now_s = clock.monotonic_s()
        if now_s - self._flushed_s >= self._settings.flush_interval_s or self.watched.intake.journal.is_filling:
            self._flushed_s = now_s
            self.watched.roster.allowance.look(resident_bytes(), self.watched.roster.world_size)
            self.watched.intake.write_down()
            self.watched.incidents.write_again()
            if now_s - self._reckoned_s >= RECKON_S:
                self._reckoned_s = now_s
                self.watched.intake.write_goodput(clock.wall_ns())
            self._announcer.write_targets()

    async def _close(self) -> None:
        await self._listener.hang_up()
        self.watched.intake.end(clock.wall_ns(), self.watched.summary().steps)
        if self.watched.incidents.standing() or self.watched.halts.outcomes:
            self.watched.disk.submit(self._lock.release)
            await self._linger()
        await self._announcer.close()
        await self.doors.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await asyncio.to_thread(self.watched.close, self._settings.disk_deadline_s)
        self._lock.release()

    async def _linger(self) -> None:
        """Stay for a while without writing, so that scrapers find what ended the run; end at once if a new life takes over."""
        self._announcer.tell(is_final=True)
        until_s = clock.monotonic_s() + self._settings.limits.linger_s
        while clock.monotonic_s() < until_s and not self._stop.is_set():
            known = await asyncio.to_thread(read_json, self.watched.settings.run_dir / ACCESS, Access)
            if known is not None and known.pid != os.getpid():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_LOOK_S):
                    await self._stop.wait()


def end_reason(roster: Roster, quiet_s: float, limits: Limits) -> str | None:
    """Return why to end now; None to go on.

    `quiet_s`: time since something last arrived or a sidecar was last connected.
    """
    if not roster.members:
        return f"no sidecar connected within {limits.first_s:.0f} s" if quiet_s >= limits.first_s else None
    if roster.has_everyone_ended:
        if roster.is_complete:
            return "every rank has ended" if quiet_s >= _settle_s(roster, limits) else None
        return "every rank that came has ended" if quiet_s >= limits.stragglers_s else None
    has_anyone_ended = any(member.state == "ended" for member in roster.members.values())
    if roster.num_connected == 0 and has_anyone_ended and quiet_s >= limits.stragglers_s:
        return "every rank that was still watched has ended"
    if roster.num_connected == 0 and quiet_s >= limits.idle_s:
        return f"no sidecar was connected for {limits.idle_s:.0f} s"
    return None


def resident_bytes() -> int:
    """Return the memory of this process in bytes; 0 if the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _settle_s(roster: Roster, limits: Limits) -> float:
    exits = [RankExit(rank, 0, member.exited) for rank, member in roster.members.items() if member.exited is not None]
    return limits.settle_s if any(kind_of(end) != "ordinary" for end in exits) else 0.0


def _in_thread(call: Callable[[], T]) -> "asyncio.Future[T]":
    """Call in a thread that nobody waits for at the end, because a disk may hang forever."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_it(value)

    def work() -> None:
        try:
            done, value = future.set_result, call()
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            done, value = future.set_exception, error  # type: ignore[assignment]
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, done, value)

    threading.Thread(target=work, name="holter-disk", daemon=True).start()
    return future


async def serve(about: RunSettings, settings: ServiceSettings, listener: socket.socket) -> str:
    """Run a coordinator until its work is done or SIGTERM or SIGINT comes; return why it ended."""
    coordinator = Coordinator(about, settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, coordinator.stop)
    await coordinator.start(listener)
    return await coordinator.run()
