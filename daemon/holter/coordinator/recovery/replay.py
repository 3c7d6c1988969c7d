"""Judge a journal again: finds the moments at which the live run judged, and implements `holter replay`.

    journal   | Attached  StepDone  StepDone  Judged | StepDone  Judged (news) |      (silence)      | StepDone ...
    news                                                         judge
    marks                                      judge             judge
    silence                                    judge             judge           judge    judge

The coordinator records when it judged, unless it had heard nothing new and nothing came of it. Detectors keep nothing
between two judgements, so where nothing came of it the same detectors find nothing: a restart and the page of a
finished run, which must not take long, judge at news only. `holter replay` judges at every mark; with other thresholds
in silences too, after half a second, a second, two. A journal without marks is judged every half a second.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from holter.coordinator.judge import IncidentTracker, Judge, Judgement
from holter.coordinator.recovery.journal import Entry
from holter.coordinator.window.assembly import Assembly
from holter.faults import Detector
from holter.records import Action, Diagnosis, Judged

TICK_NS = 500_000_000
PATIENCE_NS = 10 * 10**9
"""Nanoseconds after an observation within which a mark is expected; a coordinator that died left none."""
MAX_FINAL_JUDGEMENTS = 4
"""Largest number of final judgements: a detector may ask for more after it learned that what it asked for cannot be
had."""

Pace = Literal["news", "marks", "silence"]
"""At which moments to judge; see above."""

Substance = tuple[str, tuple[int, ...], tuple[str, ...], int]
"""(cause, ranks, tensors, first step)."""


@dataclass(frozen=True)
class Moment:
    """A moment at which the live run judged, or would have."""

    at_ns: int
    is_final: bool = False
    passed: tuple[str, ...] = ()
    """Incidents that the live run saw pass at this moment; the judgement that first missed them may not be recorded."""


def with_moments(entries: Iterable[Entry], pace: Pace, *, has_marks: bool = True) -> Iterator[Entry | Moment]:
    """Yield a journal's entries, without the marks, in order, and between them the moments at which to judge."""
    patience_ns = PATIENCE_NS if has_marks else TICK_NS
    unmarked = _Unmarked(patience_ns, is_in_silence=pace == "silence" or not has_marks)
    for entry in entries:
        if pace != "news":
            yield from map(Moment, unmarked.until(entry.received_ns))
        body = entry.observation.body
        if not isinstance(body, Judged):
            unmarked.hear(entry.received_ns)
            yield entry
            continue
        unmarked.judge(entry.received_ns)
        if pace != "news" or body.is_news or body.is_final:
            # What had passed for the live run may persist with other thresholds.
            yield Moment(entry.received_ns, body.is_final, () if pace == "silence" else body.closed)


class _Unmarked:
    """Decides when to judge without a mark: after a coordinator died, and in silences if that is wanted."""

    def __init__(self, patience_ns: int, *, is_in_silence: bool) -> None:
        self._patience_ns, self._is_in_silence = patience_ns, is_in_silence
        self._is_heard = False
        """Whether something was heard since the last judgement."""
        self._due_ns: int | None = None
        self._interval_ns = TICK_NS

    def hear(self, at_ns: int) -> None:
        if not self._is_heard:
            self._is_heard, self._due_ns = True, at_ns + self._patience_ns

    def judge(self, at_ns: int) -> None:
        # In a silence judgements become rare: a whole night of it costs twenty.
        self._interval_ns = TICK_NS if self._is_heard else self._interval_ns * 2
        self._is_heard = False
        self._due_ns = at_ns + self._interval_ns if self._is_in_silence else None

    def until(self, now_ns: int) -> Iterator[int]:
        while self._due_ns is not None and self._due_ns < now_ns:
            at_ns = self._due_ns
            self.judge(at_ns)
            yield at_ns


def judge_again(judging: Judge, moment: Moment, diagnoses: dict[str, Diagnosis]) -> Judgement:
    """Judge as of this moment, and update the diagnoses."""
    found = judging.judge(moment.at_ns, is_final=moment.is_final, passed=moment.passed)
    diagnoses |= {diagnosis.id: diagnosis for diagnosis in found.diagnoses}
    return found


class Replay:
    """A recorded run, judged again from its journal alone: `read` it, then `finish`."""

    def __init__(self, run_id: str, action: Action, detectors: Sequence[Detector]) -> None:
        self.num_entries = 0
        self._last_ns = 0
        self._judging = Judge(Assembly(), IncidentTracker(run_id, action), detectors)
        self._diagnoses: dict[str, Diagnosis] = {}

    def read(self, entries: Iterable[Entry], pace: Pace = "marks", *, has_marks: bool = True) -> None:
        """Take in everything again, and judge when the coordinator did."""
        for item in with_moments(entries, pace, has_marks=has_marks):
            if isinstance(item, Moment):
                self._last_ns = max(self._last_ns, item.at_ns)
                judge_again(self._judging, item, self._diagnoses)
            else:
                self.num_entries += 1
                self._last_ns = max(self._last_ns, item.received_ns)
                self._judging.assembly.add(item.observation, item.received_ns)

    def finish(self) -> list[Diagnosis]:
        """Make the last judgement, on everything; tables that never came are not available any more."""
        for _ in range(MAX_FINAL_JUDGEMENTS):
            found = judge_again(self._judging, Moment(self._last_ns, is_final=True), self._diagnoses)
            if not found.tables:
                break
            for key in found.tables:
                self._judging.assembly.mark_unavailable(key)
        return list(self._diagnoses.values())

    def failures(self) -> list[str]:
        """Return a sentence for each detector that failed."""
        return self._judging.runner.blind()


def differences(recorded: Sequence[Diagnosis], replayed: Sequence[Diagnosis]) -> list[str]:
    """Return what only one of the two says about the open incidents; empty if causes, ranks, tensors and first steps agree."""
    before, after = substances(recorded), substances(replayed)
    gone = [f"recorded but not replayed: {_words(one)}" for one in before if one not in after]
    return gone + [f"replayed but not recorded: {_words(one)}" for one in after if one not in before]


def substances(diagnoses: Sequence[Diagnosis]) -> list[Substance]:
    """Return what identifies each open diagnosis for a comparison."""
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
