"""A `Run` rebuilt from its journal: by a restarted coordinator, and for the page of a finished run.

A restarted coordinator first reads its own journal, so that its window continues and an incident keeps its name. It
hears everything again, and judges at the moments at which its predecessor learned something. If a run directory is used
for a second run, its journal belongs to another run and is not read.

Nobody is connected to a finished run, and it writes nothing. Its incidents are those that were written down; findings
are judged again at the moments at which the coordinator learned something, for the timeline alone.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from holter import clock
from holter.coordinator.http.doors import runner_of
from holter.coordinator.http.page_state import PageState
from holter.coordinator.http.pages import Pages
from holter.coordinator.identity import Introductions, RunIdentity, RunSettings
from holter.coordinator.judge import Judge
from holter.coordinator.recovery import journal
from holter.coordinator.recovery.journal import Entry
from holter.coordinator.recovery.replay import Moment, judge_again, with_moments
from holter.coordinator.run import Run
from holter.faults import ALL, Detector
from holter.files import read_json
from holter.halting import halt_record
from holter.records import (
    Attached,
    Consumed,
    Diagnosis,
    Exited,
    FirstStep,
    HaltAnswered,
    HaltAsked,
    Halting,
    Observation,
    Ordered,
    Seated,
)
from holter.records.goodput import GOODPUT, Goodput
from holter.records.titles import titled
from holter.transport.wire import Hello

MAX_AWAY_NS = 60 * 10**9
"""Nanoseconds without a coordinator after which a new one assumes another life of the job, unless it knows better."""
AHEAD_NS = 10**9
DEADLINE_S = 5.0
"""Seconds for reading the journal."""
RETURN_NS = 3 * 10**9
"""Nanoseconds for sidecars to come back before anything is judged, because their reports are missing until then."""

logger = logging.getLogger(__name__)


@dataclass
class Recovered:
    """What a former coordinator knew."""

    num_entries: int = 0
    diagnoses: dict[str, Diagnosis] = field(default_factory=dict)
    attached: dict[int, Attached] = field(default_factory=dict)
    """For each rank, how it last introduced itself."""
    first_steps: dict[int, Observation] = field(default_factory=dict)
    """For each rank, how far the run had come when the rank began."""
    halting: list[Observation] = field(default_factory=list)
    """Reports of ranks on their state in a halt."""
    orders: list[Ordered] = field(default_factory=list)
    places: dict[int, bytes] = field(default_factory=dict)
    """For each rank that has not ended, the digest of its sidecar's key."""
    asked: HaltAsked | None = None
    """A request for a halt that has no answer yet; None if there is none."""
    taken: int | None = None
    """Position up to which it had read the network's stream."""
    is_complete: bool = True
    """False if there was no time to read all of it."""


def recall(run: Run, now_ns: int) -> None:
    """Take over from a coordinator of this run that died a moment ago, or close what an earlier life left open.

    Never raises.
    """
    about = run.settings
    is_same = is_interrupted(about, now_ns) and (about.goes_on or not is_stale(about, now_ns))
    former = read_json(run.settings.run_dir / GOODPUT, Goodput)
    run.intake.wall_time.recall(former.lives if former is not None else (), is_same=is_same)
    if is_same:
        run.judging.tracker.count(())
        damage: list[str] = []
        try:
            entries = journal.read(run.intake.journal.folder, damage, is_joined=True)
            found = read(entries, run.judging, clock.monotonic_s, DEADLINE_S)
        except Exception:
            # Whatever is in that file, the run must be watched again.
            logger.exception("the journal of a former coordinator cannot be used")
            found = Recovered()
        for sentence in damage:
            logger.warning("journal: %s", sentence)
        run.intake.journal.num_damaged = len(damage)
        run.judging.tracker.count([known for known in run.incidents.all() if known.id not in found.diagnoses])
        if found.num_entries:
            _take_over(run, found, now_ns)
    run.left_open = run.incidents.close_former(now_ns)


def read(entries: Iterable[Entry], judging: Judge, stopwatch_s: Callable[[], float], deadline_s: float) -> Recovered:
    """Judge a journal again, ending in time even if it is not read completely. Raises OSError."""
    found, began_s = Recovered(), stopwatch_s()
    for item in with_moments(entries, "news"):
        if isinstance(item, Moment):
            judge_again(judging, item, found.diagnoses)
        else:
            found.num_entries += 1
            judging.assembly.add(item.observation, item.received_ns)
            _note(found, item.observation)
        if stopwatch_s() - began_s > deadline_s:
            found.is_complete = False
            break
    return found


def is_interrupted(about: RunSettings, now_ns: int) -> bool:
    """Whether a coordinator of this same run stopped writing without having ended."""
    known = read_json(about.run_dir / "run.json", RunIdentity)
    if known is None or known.run_id != about.run_id or known.ended_at is not None:
        return False
    # A time in the future was written by another clock: in a former life of the job.
    return journal.written_ns(about.run_dir / "journal") < now_ns + AHEAD_NS


def is_stale(about: RunSettings, now_ns: int) -> bool:
    """Whether that is so long ago that the job may be in another life."""
    return now_ns - journal.written_ns(about.run_dir / "journal") >= MAX_AWAY_NS


def _take_over(run: Run, found: Recovered, now_ns: int) -> None:
    run.silent_until_ns = now_ns + RETURN_NS
    run.intake.taken = found.taken
    run.roster.keep_places(found.places)
    for observation in found.first_steps.values():
        run.checkpoints.hear(observation)
    run.checkpoints.recall(found.diagnoses.values())
    for observation in found.halting:
        run.checkpoints.hear(observation)
        run.halts.hear(observation, now_ns)
    everyone = frozenset(range(run.settings.world_size or run.roster.world_size))
    run.halts.recall(found.orders, everyone, now_ns, found.asked)
    for rank, attached in found.attached.items():
        run.intake.introductions.add(rank, attached)
    run.incidents.meet_again(found.diagnoses)
    run.judging.news(found.diagnoses.values())
    for diagnosis in found.diagnoses.values():
        if run.incidents.get(diagnosis.id) is None:
            run.incidents.put(diagnosis)
    is_all = "" if found.is_complete else ", not all"
    logger.info("read %d entries of a former coordinator%s", found.num_entries, is_all)


def _note(found: Recovered, observation: Observation) -> None:  # noqa: C901 - one line a kind
    """Note what a restarted coordinator needs in addition to the window."""
    match observation.body:
        case Ordered() as ordered:
            found.orders.append(ordered)
        case HaltAsked() as asked:
            found.asked = asked
        case HaltAnswered():
            found.asked = None
        # A request is in the journal twice: as the rank's report, which may have its answer, and as the request itself.
        case Halting(state=state) if state != "asking":
            found.halting.append(observation)
        case Consumed(sequence=sequence):
            found.taken = sequence
        case Seated(digest=digest):
            found.places[observation.rank] = digest
        case Exited():
            found.places.pop(observation.rank, None)
        case FirstStep():
            found.first_steps[observation.rank] = observation
        case Attached() as attached:
            known = found.attached.get(observation.rank)
            if known is not None and known.pid != attached.pid:
                # Another life of the job: earlier orders and requests are over.
                found.orders.clear()
                found.halting.clear()
                found.asked = None
            found.attached[observation.rank] = attached


class FinishedRun:
    """A run that is over, for its page: `read` a journal's entries, then `finish`."""

    def __init__(self, settings: RunSettings, identity: Mapping[str, Any], detectors: Sequence[Detector] = ALL) -> None:
        """Prepare the run; `identity` is the content of run.json."""
        self._settings, self._identity = settings, identity
        self._last_ns = clock.wall_ns()
        self.run = Run(settings, detectors)
        self.page_state = PageState(self.run, lambda: self._last_ns, record=self._record())
        self.diagnoses: dict[str, Diagnosis] = {}
        """Diagnoses as they are made by judging now."""

    def read(self, entries: Iterable[Entry]) -> None:
        """Take in the whole journal, in order."""
        is_first = True
        for item in with_moments(entries, "news"):
            if isinstance(item, Moment):
                self._last_ns = max(self._last_ns, item.at_ns)
                judge_again(self.run.judging, item, self.diagnoses)
                self.page_state.timeline.look_at_findings(self.run.judging.findings, item.at_ns)
                continue
            if is_first:
                is_first = False
                about, self._last_ns = self._settings, item.received_ns
                known = Introductions(about.run_id, about.world_size, self._last_ns, about.address)
                self.run.intake.introductions = known
            self._last_ns = max(self._last_ns, item.received_ns)
            self.run.assembly.add(item.observation, item.received_ns)
            if item.observation.rank >= 0:
                self._enter(item.observation, item.received_ns)

    def finish(self, diagnoses: Iterable[Diagnosis]) -> None:
        """Add the incidents that were written down; everything has been heard."""
        self.run.incidents.recall(diagnoses)
        told = read_json(self._settings.run_dir / GOODPUT, Goodput)
        self.run.intake.wall_time.recall(told.lives if told is not None else (), is_same=True, is_over=True)
        self.run.roster.compare(self.run.assembly.arrivals())
        for member in self.run.roster.members.values():
            member.line.is_connected, member.line.has_hung_up = False, True
        self.page_state.read_vault()
        self.page_state.look()

    def _enter(self, observation: Observation, received_ns: int) -> None:
        rank, body, members = observation.rank, observation.body, self.run.roster.members
        if isinstance(body, Attached):
            if rank in members:
                # It belongs to a former life; its place is free, and this is no second process.
                members[rank].line.is_connected = False
            self.run.intake.introductions.add(rank, body)
            self.run.roster.connect(_hello(rank, body.world_size, body.host, body.pid))
        elif rank not in members:
            # The journal's oldest part is gone, and with it how the rank introduced itself.
            self.run.roster.connect(_hello(rank, max(self._settings.world_size, rank + 1), "", 0))
        self.run.roster.observe(observation, received_ns)
        if isinstance(body, Exited):
            members[rank].progress.phase = body.last_phase

    def _record(self) -> dict[str, Any]:
        """Return what the page is told about a finished run."""
        found = {"ended_at": self._identity.get("ended_at")}
        halt = halt_record.read(self._settings.run_dir)
        if halt is not None:
            kept = {"checkpoint": halt.checkpoint, "verdict": halt.verdict}
            found["halt"] = {
                "course": "done",
                "step": halt.step,
                "cause": halt.cause,
                "title": titled(halt.cause),
                "reason": halt.why,
                **kept,
            }
        return found


def _hello(rank: int, world_size: int, host: str, pid: int) -> Hello:
    return Hello(
        run_id="", rank=rank, world_size=world_size, host=host, rank_pid=pid, sidecar_pid=0, metrics_address=""
    )


async def serve(finished: FinishedRun, version: str, listener: socket.socket) -> None:
    """Serve the page until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    pages = Pages(finished.run, version, page_state=finished.page_state)
    app = web.Application()
    app.add_routes(pages.routes())
    runner = runner_of(app)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    await stop.wait()
    await pages.events.close("the page was closed")
    await runner.cleanup()
    await asyncio.to_thread(finished.run.disk.close, 1.0)
