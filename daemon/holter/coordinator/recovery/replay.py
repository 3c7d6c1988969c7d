"""A recorded run, judged again: the same assembly, detectors and casebook, fed from the journal at the journal's own pace.

    journal   | Attached  StepDone  StepDone  Judged | StepDone  Judged |      (silence)      | StepDone ...
    replayed                                   round              round   round   round   round

The coordinator writes down when it judged, so a replay sees what it saw, no more and no less. In a silence nothing new is heard, but
time passes: it is judged after half a second, a second, two. A journal without such marks is judged every half a second.
"""

from collections.abc import Sequence

from holter.coordinator.incidents.tracker import IncidentTracker
from holter.coordinator.recovery.journal import Entry
from holter.coordinator.rounds import JudgingRounds, Seen
from holter.coordinator.window.assembly import Assembly
from holter.faults import Detector
from holter.records import Action, Diagnosis, Judged

TICK_NS = 500_000_000
PATIENCE_NS = 10 * 10**9
"""How long after something was heard the coordinator's mark is waited for: one that died left none."""
MAX_FINAL_ROUNDS = 4
"""A detector may ask for more after it has seen that what it asked for is not to be had."""

Substance = tuple[str, tuple[int, ...], tuple[str, ...], int]
"""(cause, ranks, tensors, first step)"""


class Replay:
    """Feed it with a journal's entries, in order, then `finish`."""

    def __init__(self, run_id: str, action: Action, detectors: Sequence[Detector], *, has_marks: bool = True) -> None:
        self.num_entries = 0
        self.num_rounds = 0
        self.last_ns = 0
        self._rounds = JudgingRounds(Assembly(), IncidentTracker(run_id, action), detectors)
        self._diagnoses: dict[str, Diagnosis] = {}
        self._is_heard = False
        """Something was heard since the last round."""
        self._patience_ns = PATIENCE_NS if has_marks else TICK_NS
        self._due_ns: int | None = None
        self._interval_ns = TICK_NS

    def feed(self, entry: Entry) -> None:
        """One entry; judges when the coordinator did."""
        self.num_entries += 1
        self._pass_time(entry.received_ns)
        self.last_ns = max(self.last_ns, entry.received_ns)
        if isinstance(entry.observation.body, Judged):
            self._judge(entry.received_ns, is_final=entry.observation.body.is_final)
            return
        self._rounds.assembly.add(entry.observation, entry.received_ns)
        if not self._is_heard:
            self._is_heard = True
            self._due_ns = entry.received_ns + self._patience_ns

    def finish(self) -> list[Diagnosis]:
        """The last judgement, on everything: tables that never came are not to be had any more."""
        for _ in range(MAX_FINAL_ROUNDS):
            seen = self._judge(self.last_ns, is_final=True)
            if not seen.needs:
                break
            for key in seen.needs:
                self._rounds.assembly.mark_unavailable(key)
        return list(self._diagnoses.values())

    def failures(self) -> list[str]:
        """A sentence for each detector that failed."""
        return self._rounds.bench.blind()

    def _pass_time(self, until_ns: int) -> None:
        while self._due_ns is not None and self._due_ns < until_ns:
            self._judge(self._due_ns)

    def _judge(self, now_ns: int, *, is_final: bool = False) -> Seen:
        self.num_rounds += 1
        # In a silence the rounds grow rare: a night of it costs twenty.
        self._interval_ns = TICK_NS if self._is_heard else self._interval_ns * 2
        self._is_heard, self._due_ns = False, now_ns + self._interval_ns
        seen = self._rounds.make(now_ns, is_final=is_final)
        self._diagnoses |= {diagnosis.id: diagnosis for diagnosis in seen.diagnoses}
        return seen


def differences(recorded: Sequence[Diagnosis], replayed: Sequence[Diagnosis]) -> list[str]:
    """What one says and the other does not, of the incidents that stand; empty: the same causes, ranks, tensors and first steps."""
    before, after = substances(recorded), substances(replayed)
    gone = [f"recorded but not replayed: {_words(one)}" for one in before if one not in after]
    return gone + [f"replayed but not recorded: {_words(one)}" for one in after if one not in before]


def substances(diagnoses: Sequence[Diagnosis]) -> list[Substance]:
    """What must be the same for two diagnoses to be the same, of those that are open."""
    return sorted(
        (cause.cause, cause.ranks, cause.tensors, one.first_step)
        for one in diagnoses
        if one.closed_at is None
        for cause in one.causes[:1]
    )


def _words(substance: Substance) -> str:
    cause, ranks, tensors, step = substance
    on = f" on rank {', '.join(map(str, ranks[:4]))}{' and more' if len(ranks) > 4 else ''}" if ranks else ""  # noqa: PLR2004
    of = f" in {tensors[0]}{f' and {len(tensors) - 1} more' if len(tensors) > 1 else ''}" if tensors else ""
    return f"{cause}{on}{of} at step {step}"
