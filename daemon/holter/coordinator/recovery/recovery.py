"""A coordinator that is started again reads its own journal first, so that its window goes on and an incident keeps its name.

It hears everything again, and judges at those moments only at which the former one learned something. A run directory that is used
for a second run has a past too, but another one: that is not recalled.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holter.clock import rfc3339
from holter.coordinator.identity import RunIdentity
from holter.coordinator.recovery import journal
from holter.coordinator.rounds import JudgingRounds
from holter.records import Attached, Begun, Diagnosis, HaltAnswered, HaltAsked, Halting, Judged, Observation, Ordered

MAX_AWAY_NS = 60 * 10**9
"""A coordinator that was away for longer watches another life of the job, if not another job."""


@dataclass
class Recovered:
    """What a former coordinator knew."""

    num_entries: int = 0
    diagnoses: dict[str, Diagnosis] = field(default_factory=dict)
    attached: dict[int, Attached] = field(default_factory=dict)
    """Rank -> how it last introduced itself."""
    begun: dict[int, Observation] = field(default_factory=dict)
    """Rank -> how far the run had come when it began."""
    halting: list[Observation] = field(default_factory=list)
    """What ranks said of a halt."""
    orders: list[Ordered] = field(default_factory=list)
    asked: HaltAsked | None = None
    """A request that has no answer yet."""
    is_complete: bool = True
    """False when there was no time for all of it."""

    def judge(self, rounds: JudgingRounds, judged: Judged, at_ns: int) -> None:
        """As it was judged then; that an incident had passed was seen in rounds that are not made again."""
        seen = rounds.make(at_ns, is_final=judged.is_final)
        self.diagnoses |= {diagnosis.id: diagnosis for diagnosis in seen.diagnoses}
        rounds.casebook.close(judged.closed)
        for known in [self.diagnoses[id_] for id_ in judged.closed if id_ in self.diagnoses]:
            if known.closed_at is None:
                self.diagnoses[known.id] = msgspec.structs.replace(known, closed_at=rfc3339(at_ns))


def is_interrupted(run_dir: Path, run_id: str, now_ns: int) -> bool:
    """Whether the coordinator of this very run stopped writing a moment ago, without having come to an end."""
    try:
        known = msgspec.json.decode((run_dir / "run.json").read_bytes(), type=RunIdentity)
        written_ns = max((path.stat().st_mtime_ns for _, path in journal.segments(run_dir / "journal")), default=0)
    except (OSError, msgspec.MsgspecError):
        return False
    return known.run_id == run_id and known.ended_at is None and now_ns - written_ns < MAX_AWAY_NS


def recall(folder: Path, rounds: JudgingRounds, stopwatch_s: Callable[[], float], deadline_s: float) -> Recovered:
    """Feed a journal to the rounds; ends in time, read or not. Raises OSError."""
    found, began_s = Recovered(), stopwatch_s()
    for entry in journal.read(folder):
        body = entry.observation.body
        if isinstance(body, Judged):
            if body.is_news:
                found.judge(rounds, body, entry.received_ns)
        elif isinstance(body, Ordered):
            found.orders.append(body)
        else:
            rounds.assembly.add(entry.observation, entry.received_ns)
        _take(found, entry.observation)
        found.num_entries += 1
        if stopwatch_s() - began_s > deadline_s:
            found.is_complete = False
            break
    return found


def _take(found: Recovered, observation: Observation) -> None:
    """What is known beside the window."""
    match observation.body:
        case HaltAsked() as asked:
            found.asked = asked
        case HaltAnswered():
            found.asked = None
        # Asking is in the journal twice: as the rank's word, which may have its answer, and as the request.
        case Halting(state=state) if state != "asking":
            found.halting.append(observation)
        case Begun():
            found.begun[observation.rank] = observation
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
