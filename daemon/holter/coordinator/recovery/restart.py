"""A coordinator that is started again reads its own journal first, so that its window goes on and an incident keeps its name.

It hears everything again, and judges at those moments at which the former one learned something. A run directory that is used for a
second run has a journal too, but of another run: that is not read.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holter import clock
from holter.coordinator.identity import RunIdentity
from holter.coordinator.judge import Judge
from holter.coordinator.recovery import journal
from holter.coordinator.recovery.journal import Entry
from holter.coordinator.recovery.replay import Moment, judge_again, with_moments
from holter.coordinator.run import Run
from holter.records import Attached, Diagnosis, FirstStep, HaltAnswered, HaltAsked, Halting, Observation, Ordered

MAX_AWAY_NS = 60 * 10**9
"""A coordinator that was away for longer watches another life of the job, if not another job."""
DEADLINE_S = 5.0
"""For reading the journal."""
RETURN_NS = 3 * 10**9
"""How long sidecars are given to come back before anything is judged: what they have to say is missing until then."""

logger = logging.getLogger(__name__)


@dataclass
class Recovered:
    """What a former coordinator knew."""

    num_entries: int = 0
    diagnoses: dict[str, Diagnosis] = field(default_factory=dict)
    attached: dict[int, Attached] = field(default_factory=dict)
    """Rank -> how it last introduced itself."""
    first_steps: dict[int, Observation] = field(default_factory=dict)
    """Rank -> how far the run had come when it began."""
    halting: list[Observation] = field(default_factory=list)
    """What ranks said of a halt."""
    orders: list[Ordered] = field(default_factory=list)
    asked: HaltAsked | None = None
    """A request that has no answer yet."""
    is_complete: bool = True
    """False when there was no time for all of it."""


def recall(run: Run, now_ns: int) -> None:
    """Take over from a coordinator of this run that died a moment ago; close what an earlier life of the run left open. Raises nothing."""
    if _is_interrupted(run.settings.run_dir, run.settings.run_id, now_ns):
        run.judging.tracker.count(())
        try:
            found = read(journal.read(run.intake.journal.folder), run.judging, clock.monotonic_s, DEADLINE_S)
        except OSError as error:
            logger.warning("cannot read the journal of a former coordinator: %s", error)
            found = Recovered()
        run.judging.tracker.count([known for known in run.incidents.all() if known.id not in found.diagnoses])
        if found.num_entries:
            _take_over(run, found, now_ns)
    run.left_open = run.incidents.close_former(now_ns)


def read(entries: Iterable[Entry], judging: Judge, stopwatch_s: Callable[[], float], deadline_s: float) -> Recovered:
    """Judge a journal again; ends in time, read or not. Raises OSError."""
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


def _is_interrupted(run_dir: Path, run_id: str, now_ns: int) -> bool:
    """Whether the coordinator of this very run stopped writing a moment ago, without having come to an end."""
    try:
        known = msgspec.json.decode((run_dir / "run.json").read_bytes(), type=RunIdentity)
        written_ns = max((path.stat().st_mtime_ns for _, path in journal.segments(run_dir / "journal")), default=0)
    except (OSError, msgspec.MsgspecError):
        return False
    return known.run_id == run_id and known.ended_at is None and now_ns - written_ns < MAX_AWAY_NS


def _take_over(run: Run, found: Recovered, now_ns: int) -> None:
    run.silent_until_ns = now_ns + RETURN_NS
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


def _note(found: Recovered, observation: Observation) -> None:
    """What is known beside the window."""
    match observation.body:
        case Ordered() as ordered:
            found.orders.append(ordered)
        case HaltAsked() as asked:
            found.asked = asked
        case HaltAnswered():
            found.asked = None
        # Asking is in the journal twice: as the rank's word, which may have its answer, and as the request.
        case Halting(state=state) if state != "asking":
            found.halting.append(observation)
        case FirstStep():
            found.first_steps[observation.rank] = observation
        case Attached() as attached:
            known = found.attached.get(observation.rank)
            if known is not None and known.pid != attached.pid:
                # Another life of the job: what was ordered or asked for before is over.
                found.orders.clear()
                found.halting.clear()
                found.asked = None
            found.attached[observation.rank] = attached
        case _:
            pass
