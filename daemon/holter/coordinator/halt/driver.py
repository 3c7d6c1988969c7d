"""The coordinator's part in a halt: it tracks the ranks, chooses how to halt, and drives the table of `halting.protocol`.

    wish ──choose──▶ Open (a directory is made) ──opened──▶ orders ◀─▶ answers ──▶ Seal ──sealed──▶ leave
      a wish: a diagnosis that directs it, an operator, or ranks that stand before a number that is not finite

No socket or disk is touched here: `look` returns what to do, and is told about the results. Ranks that are about to
end, and for which there is no reason to wait, are let go.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from holter import patience
from holter.diagnosis.explain import after_halt
from holter.faults.hangs.endings import LOST_CONNECTION
from holter.faults.numerics.causes import NONFINITE_BACKWARD
from holter.halting import protocol
from holter.halting.plan import HaltPlan, JobShape, NotYet, RankSituation, Wish, choose
from holter.halting.protocol import Course, Gone, HaltEvent, Heard, Seal, Tell
from holter.records import EXIT_CODE, Body, Diagnosis, HaltAnswered, HaltAsked, Halting, Observation, Order, Ordered

AGAIN_NS = 10**9
"""Nanoseconds between two repetitions of unanswered orders."""
ENDING = ("dying", "terminated")
MAX_TRIES = 5
REQUESTED = "requested"
"""Cause that is named if somebody asked for the halt."""
UNEXPLAINED = NONFINITE_BACKWARD.cause
"""Cause that is named if ranks stand and nothing better is known."""


@dataclass(frozen=True)
class Open:
    """Make a directory for a checkpoint of `step` completed steps, then call `opened`."""

    step: int


Act = Open | Tell | Seal


@dataclass(frozen=True)
class View:
    """What the coordinator sees; each part is computed only when it is needed."""

    ranks: Callable[[], Sequence[RankSituation]]
    """Returns the situation of each rank."""
    wish: Callable[[], Wish | None]
    """Returns the halt that the diagnoses ask for; None if they ask for none."""
    suspicion: Callable[[], Wish | None]
    """Returns a halt for a diagnosis that is not certain enough to halt a training run, but explains why ranks
    stand."""
    job: Callable[[], JobShape]


@dataclass(frozen=True)
class Outcome:
    """The result of a halt."""

    name: str
    """completed, incomplete or failed; if the run goes on: called_off, or refused to whoever asked."""
    text: str
    checkpoint: str | None = None
    """Path relative to the run directory."""
    is_halted: bool = True
    """Whether the ranks were told to leave."""
    reason: str = ""
    """The wish's reason."""
    go_on: str = ""
    """One sentence on the checkpoint and step to resume from; empty if there is none."""


@dataclass
class Attempt:
    """One attempt to halt."""

    wish: Wish
    plan: HaltPlan
    halt: protocol.HaltState | None = None
    """State of the protocol; None until the directory exists."""
    course_ns: int = 0
    """When its present course began, in nanoseconds."""
    told_ns: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    """For each rank that did not save, the reason."""

    @property
    def course(self) -> str:
        """The present course, for people."""
        return self.halt.course.value if self.halt is not None else "preparing"


def order_of(attempt: Attempt, number: int, directory: Path, deadline_s: float, base_step: int) -> Order:
    """Return the order with which a halt begins."""
    plan = attempt.plan
    return Order(
        halt=number,
        kind=plan.kind,
        step=plan.step,
        base_step=base_step,
        snapshot=plan.snapshot,
        directory=str(directory),
        savers=plan.savers,
        lost=plan.lost,
        deadline_s=deadline_s + plan.wait_s,
        reason=attempt.wish.reason[:500],
        is_requested=attempt.wish.is_operator,
    )


def patience_ns(halt: protocol.HaltState) -> float:
    """Return the nanoseconds that a halt may stay in its present course."""
    if halt.course is Course.PREPARING:
        return halt.order.deadline_s * 1e9
    keeping = halt.course in (Course.COMMITTED, Course.RESCUING)
    return (halt.order.deadline_s + patience.ANSWER_S) * 1e9 if keeping else float("inf")


def why_off(attempt: Attempt) -> str:
    """Return why the halt was called off, for people."""
    assert attempt.halt is not None
    states = {state for _, state in attempt.halt.answers}
    if "unwilling" in states:
        return "the order came too late for the step"
    if "released" in states:
        return "the ranks went on by themselves"
    return "not every rank could be reached" if attempt.halt.gone else "not every rank came to the step in time"


@dataclass(frozen=True)
class LastWord:
    """The last report of a rank on its state in a halt."""

    halting: Halting
    step: int
    since_ns: int
    """When this state was first reported, in nanoseconds."""


class HaltDriver:
    """All halts of one run, one at a time."""

    def __init__(self, note: Callable[[Body, int], None], deadline_s: float = 300.0) -> None:
        self.attempt: Attempt | None = None
        self.outcomes: Counter[str] = Counter()
        self.outcome: Outcome | None = None
        """How the last finished attempt ended; None if there was none."""
        self.sentences: list[str] = []
        """Messages for the job's own log, until `take_sentences` fetches them."""
        self._note = note
        self._deadline_s = deadline_s
        self._number = 0
        self._last_words: dict[int, LastWord] = {}
        self._asked: Wish | None = None
        self._wished_ns: dict[str, int] = {}
        self._tries: Counter[str] = Counter()
        self._outcomes: dict[str, Outcome] = {}
        """Results of halts by the incident that asked for them."""
        self._heard: list[protocol.Event] = []
        self._gone: frozenset[int] = frozenset()
        self._everyone: frozenset[int] = frozenset()
        self._acts: list[Act] = []

    @property
    def is_busy(self) -> bool:
        """Whether something is being saved or sealed, so that the coordinator must not end."""
        return self.attempt is not None and (self.attempt.halt is None or not self.attempt.halt.is_over)

    @property
    def is_done(self) -> bool:
        """Whether the run is halted."""
        return self.attempt is not None and self.attempt.halt is not None and self.attempt.halt.course is Course.DONE

    @property
    def is_asked(self) -> bool:
        """Whether somebody asked and has no answer yet; one failed attempt is not an answer."""
        return self._asked is not None

    def last_word(self, rank: int) -> LastWord | None:
        """Return a rank's last report and its step; None if there was none."""
        return self._last_words.get(rank)

    def ask(self, by: str, reason: str, now_ns: int) -> str | None:
        """Take in a request for a halt by an operator or a scheduler.

        Returns why that is not possible; None if it will be tried.
        """
        if self.is_done:
            return "the run is halted already"
        if self.is_busy or self._asked is not None:
            return "a halt is under way already"
        asked = HaltAsked(by=by, reason=reason)
        self._asked = _wish_of(asked)
        self._note(asked, now_ns)
        return None

    def hear(self, observation: Observation, now_ns: int) -> None:
        """Take in a rank's report of its state; the reaction follows at the next look."""
        halting, rank = observation.body, observation.rank
        assert isinstance(halting, Halting)
        known = self._last_words.get(rank)
        is_same = known is not None and known.halting.state == halting.state
        self._last_words[rank] = LastWord(halting, observation.step, known.since_ns if known and is_same else now_ns)
        if halting.state == "asking":
            self.ask(f"{halting.why} to rank {rank}", "", now_ns)
        if halting.state == "failed" and self.attempt is not None:
            self.attempt.failures[rank] = halting.why
        self._heard.append(Heard(rank, halting.state, halting.halt, observation.step))

    def take_sentences(self) -> tuple[str, ...]:
        """Return the messages about the halt that nobody has been told yet."""
        told, self.sentences = tuple(self.sentences), []
        return told

    def forget(self, rank: int) -> None:
        """Forget the rank's last report, because it is another process now, or none."""
        self._last_words.pop(rank, None)

    def opened(self, directory: Path, why_not: str, now_ns: int, base_step: int = 0) -> None:
        """Continue after the directory was made, or failed to be made for the reason `why_not`.

        `base_step`: steps of earlier lives, which are not counted here.
        """
        attempt = self.attempt
        if attempt is None or attempt.halt is not None:
            return
        if why_not and attempt.plan.kind == "prepare":
            # All ranks are training, and nothing is lost by going on.
            self._tries[_key(attempt.wish)] = MAX_TRIES
            name = "refused" if attempt.wish.is_operator else "called_off"
            self._end(Outcome(name, f"the run is not halted: {why_not}", is_halted=False), now_ns)
            return
        if why_not:
            # What must stop is stopped all the same: numbers that are not finite, or ranks that hang.
            self.sentences.append(f"nothing can be saved: {why_not}")
        self._number += 1
        order = order_of(attempt, self._number, directory, self._deadline_s, base_step)
        standing = [rank for rank, said in self._last_words.items() if said.halting.state == "held"]
        attempt.halt, tells = protocol.begin(order, self._everyone, standing)
        attempt.course_ns = attempt.told_ns = now_ns
        self._do(attempt, tells, now_ns)

    def named(self, diagnosis: Diagnosis) -> Diagnosis:
        """Add the result of the halt that it asked for to a diagnosis."""
        outcome = self._outcomes.get(diagnosis.id)
        if outcome is None:
            return diagnosis
        reason = diagnosis.action.reason.partition("; halt")[0]
        if outcome.is_halted and diagnosis.action.directive != "halt":
            # The halt had another reason; the diagnosis's own reason says that training goes on.
            reason = outcome.reason.partition("; ")[0]
        action = msgspec.structs.replace(
            diagnosis.action,
            directive="halt" if outcome.is_halted else diagnosis.action.directive,
            reason=f"{reason}; {outcome.text}",
            checkpoint=outcome.checkpoint,
            exit_code=EXIT_CODE if outcome.is_halted else None,
        )
        causes = (
            after_halt(diagnosis.causes, outcome.go_on) if outcome.is_halted and outcome.go_on else diagnosis.causes
        )
        return msgspec.structs.replace(diagnosis, action=action, causes=causes)

    def sealed(self, outcome: Outcome) -> None:
        """Note that the checkpoint has its final name, or that nothing could be kept."""
        self._conclude(outcome)
        self._asked = None
        self._heard.append(HaltEvent.SEALED)

    def look(self, now_ns: int, view: View) -> list[Act]:
        """Return what to do now."""
        if self.attempt is None:
            self._heard.clear()
            self._begin(now_ns, view)
        if self.attempt is None:
            self._let_go(now_ns, view)
        elif self.attempt.halt is not None:
            self._drive(self.attempt, now_ns, view)
        acts, self._acts = self._acts, []
        return acts

    def recall(
        self, orders: Sequence[Ordered], ranks: frozenset[int], now_ns: int, asked: HaltAsked | None = None
    ) -> None:
        """Continue the halt of a former coordinator of this life from its orders, and its request if that is unanswered."""
        self._number = max((ordered.order.halt for ordered in orders), default=0)
        standing = [rank for rank, said in self._last_words.items() if said.halting.state == "held"]
        halt = protocol.recalled([ordered.order for ordered in orders], ranks, standing)
        if asked is not None and (halt is None or halt.course is not Course.DONE):
            self._asked = _wish_of(asked)
        if halt is None or halt.course is Course.CALLED_OFF:
            return
        last, order = orders[-1], halt.order
        wish = Wish(cause=last.cause, reason=order.reason, ranks=last.ranks, incident=last.incident)
        plan = HaltPlan(kind=order.kind, step=order.step, savers=order.savers, lost=order.lost, snapshot=order.snapshot)
        words = {rank: said.halting for rank, said in self._last_words.items()}
        failures = {rank: one.why for rank, one in words.items() if (one.state, one.halt) == ("failed", order.halt)}
        self.attempt = Attempt(wish, plan, halt, now_ns, now_ns, failures)
        self._heard = [event for event in self._heard if not self._is_past(event, order)]

    def _is_past(self, event: protocol.Event, order: Order) -> bool:
        """Whether a report stems from a rank that stood before another step and has gone on since."""
        if not isinstance(event, Heard) or event.state != "held" or event.step == order.step:
            return False
        last = self._last_words.get(event.rank)
        return last is None or (last.halting.state, last.step) != ("held", event.step)

    def _begin(self, now_ns: int, view: View) -> None:
        wish = self._wish(now_ns, view)
        if wish is None or self._tries[_key(wish)] >= MAX_TRIES:
            return
        since_ns = self._wished_ns.setdefault(_key(wish), now_ns)
        stood_ns = [said.since_ns for said in self._last_words.values() if said.halting.state == "held"]
        waited_s = (now_ns - min(stood_ns, default=since_ns)) / 1e9
        ranks = view.ranks()
        self._everyone = frozenset(one.rank for one in ranks)
        wish = self._with_poison(wish)
        plan = choose(wish, ranks, view.job(), waited_s=waited_s, attempt=self._tries[_key(wish)])
        if isinstance(plan, NotYet):
            if wish.is_operator and now_ns - since_ns >= patience.REFUSE_S * 1e9:
                self._refuse(plan.why, now_ns)
            return
        self._tries[_key(wish)] += 1
        self.attempt = Attempt(wish, plan, course_ns=now_ns)
        self._gone = frozenset()
        self.sentences.append(f"halting: {wish.reason}")
        self._acts.append(Open(plan.kept_step))

    def _with_poison(self, wish: Wish) -> Wish:
        """Add bad numbers that only the ranks know of to the wish: a rank that stands reports no step to the detectors."""
        steps = [said.halting.poisoned_step for said in self._last_words.values()]
        known = [wish.first_bad, *(step + 1 for step in steps if step is not None)]
        return replace(wish, first_bad=min((first for first in known if first is not None), default=None))

    def _refuse(self, why: str, now_ns: int) -> None:
        """Refuse the request: nothing has happened to the run, and whoever asked may ask again."""
        self._wished_ns.pop(REQUESTED, None)
        self.outcome = Outcome("refused", f"the run is not halted: {why}", is_halted=False)
        self.outcomes["refused"] += 1
        self.sentences.append(self.outcome.text)
        self._answer(self.outcome, now_ns)

    def _wish(self, now_ns: int, view: View) -> Wish | None:
        for wish in (view.wish(), self._asked):
            # A wish that was tried in vain does not block others.
            if wish is not None and self._tries[_key(wish)] < MAX_TRIES:
                return wish
        stood = self._standing(view)
        if not stood:
            return None
        explained = view.suspicion()
        if explained is not None or now_ns - min(stood)[0] < patience.UNEXPLAINED_S * 1e9:
            return explained
        why = "a rank stands before a step whose gradients are not finite, and nothing more is known of it"
        ranks = tuple(sorted(rank for _, rank in stood if self._last_words[rank].halting.why == "nonfinite"))
        return Wish(cause=UNEXPLAINED, reason=why, ranks=ranks)

    def _standing(self, view: View) -> list[tuple[int, int]]:
        """Return (since when, rank) of those that stand by themselves, as opposed to an agreed halt that was called off."""
        held = {
            rank
            for rank, said in self._last_words.items()
            if said.halting.state == "held" and said.halting.why != "agreed"
        }
        still = {one.rank for one in view.ranks() if one.state == "held"} if held else set()
        return [(self._last_words[rank].since_ns, rank) for rank in held & still]

    def _let_go(self, now_ns: int, view: View) -> None:
        """Let go of ranks that wait before they end, if there is no reason left to wait."""
        ending = {rank: said for rank, said in self._last_words.items() if said.halting.state in ENDING}
        # If all ranks are ending, a scheduler ends them: no peer's death can explain it.
        is_all = bool(ending) and all(one.is_there and one.state in ENDING for one in view.ranks())
        for rank, said in ending.items():
            why = said.halting.why.lower()
            is_own = said.halting.state == "dying" and not any(text in why for text in LOST_CONNECTION)
            is_stopped = is_all and said.halting.state == "terminated"
            if is_own or is_stopped or now_ns - said.since_ns >= patience.KEEP_DYING_S * 1e9:
                self._number += 1
                self._acts.append(Tell(Order(halt=self._number, kind="abort", step=said.step), (rank,)))
                self._last_words[rank] = LastWord(Halting(state="released"), said.step, now_ns)

    def _drive(self, attempt: Attempt, now_ns: int, view: View) -> None:
        missing = frozenset(one.rank for one in view.ranks() if not one.is_there)
        # What was heard happened before the connection ended.
        events = [*self._heard, *(Gone(rank) for rank in sorted(missing - self._gone))]
        self._heard, self._gone = [], missing
        for event in events:
            self._advance(attempt, event, now_ns)
        assert attempt.halt is not None
        if now_ns - attempt.course_ns >= patience_ns(attempt.halt):
            attempt.course_ns = now_ns
            self._advance(attempt, HaltEvent.OVER, now_ns)
        if now_ns - attempt.told_ns >= AGAIN_NS:
            attempt.told_ns = now_ns
            self._advance(attempt, HaltEvent.AGAIN, now_ns)
        is_late = now_ns - attempt.course_ns >= patience.CALLED_OFF_S * 1e9
        # Connections that were all lost at once may come back.
        is_lapsed = attempt.halt.course is Course.LAPSED and is_late
        heard = attempt.halt.heard
        is_known = all(heard.get(rank) in ("released", "unwilling") for rank in attempt.halt.ranks - attempt.halt.gone)
        is_off = attempt.halt.course is Course.CALLED_OFF and (is_late or is_known)
        if is_lapsed or is_off:
            self._end(Outcome("called_off", f"the halt was called off: {why_off(attempt)}", is_halted=False), now_ns)

    def _advance(self, attempt: Attempt, event: protocol.Event, now_ns: int) -> None:
        assert attempt.halt is not None
        before = attempt.halt.course
        attempt.halt, acts = protocol.advance(attempt.halt, event)
        if attempt.halt.course is not before:
            attempt.course_ns = attempt.told_ns = now_ns
        self._do(attempt, acts, now_ns)

    def _do(self, attempt: Attempt, acts: Sequence[protocol.Action], now_ns: int) -> None:
        """Carry out actions; an order is journalled before it is sent."""
        wish = attempt.wish
        for act in acts:
            if isinstance(act, Tell):
                body = Ordered(order=act.order, cause=wish.cause, ranks=wish.ranks, incident=wish.incident)
                self._note(body, now_ns)
            self._acts.append(act)

    def _conclude(self, outcome: Outcome) -> None:
        assert self.attempt is not None
        self.outcome = outcome
        self.outcomes[outcome.name] += 1
        self.sentences.append(outcome.text)
        if self.attempt.wish.incident is not None:
            self._outcomes[self.attempt.wish.incident] = replace(outcome, reason=self.attempt.wish.reason)

    def _end(self, outcome: Outcome, now_ns: int) -> None:
        """End the attempt without a halt; whoever asked is answered if it was the last attempt, and may ask again."""
        self._conclude(outcome)
        self.attempt = None
        if self._asked is not None and self._tries[_key(self._asked)] >= MAX_TRIES:
            self._tries.pop(_key(self._asked))
            self._answer(outcome, now_ns)

    def _answer(self, outcome: Outcome, now_ns: int) -> None:
        """Tell whoever asked that there will be no halt.

        It is journalled, because a restarted coordinator would otherwise take up the request again.
        """
        self._asked = None
        self._note(HaltAnswered(text=outcome.text), now_ns)


def _wish_of(asked: HaltAsked) -> Wish:
    text = f"asked for by {asked.by}" + (f": {asked.reason}" if asked.reason else "")
    return Wish(cause=REQUESTED, reason=text, is_operator=True)


def _key(wish: Wish) -> str:
    return wish.incident or wish.cause
