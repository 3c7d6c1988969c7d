"""The coordinator's side of a halt, as a table: (course, event) -> next course and actions.

    prepare -> PREPARING --all held--> COMMITTED --all settled--> SEALING --sealed--> DONE (leave)
                   |                       |
                   +--somebody cannot------+--the register said abort--> CALLED_OFF (abort)
    commit  -> COMMITTED        every rank stands before the same step by itself: numbers that are not finite
    rescue  -> RESCUING --savers settled--> SEALING

`halting.rank_protocol` holds the ranks' side, and explains why ranks cannot end up in different states. Two rules
follow for this side. `leave` is ordered only when a rank has said that it saves, or could not: if ranks stood before a
step, this means that the commit register has decided. After a commit, `abort` is ordered only when a rank has said that
it went on: then the commit register has decided, too.

An order is repeated until it is answered, and repeating it changes nothing, so that a lost message only costs time.
Every attempt has a number of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from holter.records import Order, OrderKind, RankState

SETTLED: tuple[RankState, ...] = ("saved", "failed")
KEEPING: tuple[RankState, ...] = ("saving", *SETTLED)
"""States that a rank saves or has saved in; if it stood before a step, it has obeyed the commit register."""
REFUSING: tuple[RankState, ...] = ("unwilling", "released", "dying", "terminated")


class Course(StrEnum):
    """How far a halt has come."""

    PREPARING = "preparing"
    COMMITTED = "committed"
    RESCUING = "rescuing"
    SEALING = "sealing"
    DONE = "done"
    CALLED_OFF = "called off"
    LAPSED = "lapsed"
    """All ranks that could say what the commit register decided are gone; nothing more is ordered."""


@dataclass(frozen=True)
class HaltState:
    """One attempt to halt, as the coordinator sees it."""

    order: Order
    """The order that began the attempt: `prepare`, `commit` or `rescue`."""
    ranks: frozenset[int]
    """All ranks of the job."""
    standing: frozenset[int]
    """Ranks that stood before a step when the order was given; these obey the commit register."""
    course: Course
    answers: tuple[tuple[int, RankState], ...] = ()
    """The last state of this halt that each rank reported, sorted by rank."""
    gone: frozenset[int] = frozenset()
    """Ranks whose process or sidecar has ended; nothing more is heard from them."""

    @property
    def heard(self) -> dict[int, RankState]:
        """The last state that each rank reported, by rank."""
        return dict(self.answers)

    @property
    def awaited(self) -> frozenset[int]:
        """Ranks that are to save."""
        return frozenset(self.order.savers) if self.order.kind == "rescue" else self.ranks

    @property
    def is_decided(self) -> bool:
        """Whether a rank has said that it keeps its state; if ranks stood, the commit register has then decided."""
        heard = self.heard
        return any(heard.get(rank) in KEEPING for rank in (self.standing or self.awaited))

    @property
    def is_over(self) -> bool:
        """Whether the attempt is finished, so that nothing more comes of it."""
        return self.course in {Course.DONE, Course.CALLED_OFF, Course.LAPSED}


@dataclass(frozen=True)
class Heard:
    """A rank reported its state in a halt (`Halting`)."""

    rank: int
    state: RankState
    halt: int
    step: int


@dataclass(frozen=True)
class Gone:
    """A rank's process, or its sidecar, has ended."""

    rank: int


class HaltEvent(StrEnum):
    """Events that carry no data."""

    OVER = "over"
    """The time for this course is over."""
    SEALED = "sealed"
    """The checkpoint has its final name, or it is known that nothing could be kept."""
    AGAIN = "again"
    """It is time to repeat orders that were not answered."""


Event = Heard | Gone | HaltEvent


@dataclass(frozen=True)
class Tell:
    """Send an order to these ranks."""

    order: Order
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Seal:
    """Turn the saved parts into a checkpoint."""

    order: Order


Action = Tell | Seal


class Cue(StrEnum):
    """An event as the table distinguishes it."""

    ALL_HELD = "all held"
    REFUSED = "somebody cannot, or went on"
    SETTLED = "all who save have said how it went"
    LOST = "all who know what was decided are gone"
    FOUND = "one of them is back"
    OVER = "over"
    UNDECIDED_OVER = "over, and nobody has said that it saves"
    SEALED = "sealed"
    AGAIN = "again"


class Act(StrEnum):
    """What a row of the table does."""

    COMMIT = "commit"
    ABORT = "abort"
    LEAVE = "leave"
    SEAL = "seal"
    REPEAT = "repeat"


Row = tuple[Course, tuple[Act, ...]]

TABLE: dict[tuple[Course, Cue], Row] = {
    (Course.PREPARING, Cue.ALL_HELD): (Course.COMMITTED, (Act.COMMIT,)),
    (Course.PREPARING, Cue.REFUSED): (Course.CALLED_OFF, (Act.ABORT,)),
    (Course.PREPARING, Cue.OVER): (Course.CALLED_OFF, (Act.ABORT,)),
    (Course.PREPARING, Cue.UNDECIDED_OVER): (Course.CALLED_OFF, (Act.ABORT,)),
    (Course.PREPARING, Cue.AGAIN): (Course.PREPARING, (Act.REPEAT,)),
    # As long as nobody has reported the register's decision, no order may contradict it: the ranks' own patience ends
    # this course.
    (Course.COMMITTED, Cue.REFUSED): (Course.CALLED_OFF, (Act.ABORT,)),
    (Course.COMMITTED, Cue.SETTLED): (Course.SEALING, (Act.SEAL,)),
    (Course.COMMITTED, Cue.OVER): (Course.SEALING, (Act.SEAL,)),
    (Course.COMMITTED, Cue.AGAIN): (Course.COMMITTED, (Act.REPEAT,)),
    (Course.RESCUING, Cue.REFUSED): (Course.CALLED_OFF, (Act.ABORT,)),
    (Course.RESCUING, Cue.SETTLED): (Course.SEALING, (Act.SEAL,)),
    (Course.RESCUING, Cue.OVER): (Course.SEALING, (Act.SEAL,)),
    (Course.RESCUING, Cue.UNDECIDED_OVER): (Course.CALLED_OFF, (Act.ABORT,)),
    (Course.RESCUING, Cue.AGAIN): (Course.RESCUING, (Act.REPEAT,)),
    (Course.SEALING, Cue.SEALED): (Course.DONE, (Act.LEAVE,)),
    (Course.DONE, Cue.AGAIN): (Course.DONE, (Act.LEAVE,)),
    (Course.CALLED_OFF, Cue.AGAIN): (Course.CALLED_OFF, (Act.REPEAT,)),
    (Course.COMMITTED, Cue.LOST): (Course.LAPSED, ()),
    (Course.RESCUING, Cue.LOST): (Course.LAPSED, ()),
    (Course.LAPSED, Cue.FOUND): (Course.COMMITTED, (Act.REPEAT,)),
}
"""The transitions of a halt; a combination without a row changes nothing."""

_BEGINS: dict[OrderKind, Course] = {"prepare": Course.PREPARING, "commit": Course.COMMITTED, "rescue": Course.RESCUING}


def begin(order: Order, ranks: Iterable[int], standing: Iterable[int] = ()) -> tuple[HaltState, tuple[Action, ...]]:
    """Begin a halt with this order; return its state and the orders to send."""
    everyone = frozenset(ranks)
    halt = HaltState(order, everyone, frozenset(standing), _BEGINS[order.kind])
    return halt, (Tell(order, tuple(sorted(everyone))),)


def recalled(orders: Sequence[Order], ranks: Iterable[int], standing: Iterable[int] = ()) -> HaltState | None:
    """Restore the current halt from the orders in the journal, for a coordinator that was restarted; None if there was none."""
    everyone = frozenset(ranks)
    begun = next((order for order in reversed(orders) if order.kind in _BEGINS), None)
    if begun is None:
        return None
    after = {order.kind for order in orders if order.halt == begun.halt}
    course = Course.DONE if "leave" in after else Course.CALLED_OFF if "abort" in after else _BEGINS[begun.kind]
    return HaltState(begun, everyone, everyone if begun.kind == "commit" else frozenset(standing), course)


def advance(
    halt: HaltState, event: Event, table: dict[tuple[Course, Cue], Row] = TABLE
) -> tuple[HaltState, tuple[Action, ...]]:
    """Return the halt after this event, and the actions to take."""
    noted = _note(halt, event)
    cue = _read(noted, event)
    row = table.get((halt.course, cue)) if cue is not None else None
    if row is None:
        return noted, ()
    after = replace(noted, course=row[0])
    actions: list[Action] = []
    for act in row[1]:
        after, done = _perform(after, act)
        actions.append(done)
    return after, tuple(action for action in actions if not isinstance(action, Tell) or action.ranks)


def _note(halt: HaltState, event: Event) -> HaltState:
    match event:
        case Gone(rank=rank):
            return replace(halt, gone=halt.gone | {rank})
        case Heard() if _is_about(halt, event):
            answers = tuple(sorted({**halt.heard, event.rank: event.state}.items()))
            standing = halt.standing | {event.rank} if event.state == "held" else halt.standing
            return replace(halt, answers=answers, standing=standing, gone=halt.gone - {event.rank})
    return halt


def _is_about(halt: HaltState, heard: Heard) -> bool:
    """Whether a report concerns this halt; a rank that stands by itself does not know the halt's number."""
    if heard.rank not in halt.ranks:
        return False
    is_standing = heard.state == "held" and heard.step == halt.order.step and not halt.is_over
    is_ending = heard.state in {"dying", "terminated"} and heard.halt == 0
    return heard.halt == halt.order.halt or (heard.halt == 0 and (is_standing or is_ending))


def _read(halt: HaltState, event: Event) -> Cue | None:
    match event:
        case HaltEvent.OVER if halt.is_decided:
            return Cue.OVER
        case HaltEvent.OVER:
            is_register_asked = bool(halt.standing) and halt.course is not Course.PREPARING
            return None if is_register_asked else Cue.UNDECIDED_OVER
        case HaltEvent.SEALED | HaltEvent.AGAIN:
            return Cue[event.name]
        case Heard() if not _is_about(halt, event):
            is_elsewhere = event.state == "held" and event.rank in halt.ranks and halt.course is Course.PREPARING
            return Cue.REFUSED if is_elsewhere else None
    readers = {
        Course.PREPARING: _read_preparing,
        Course.COMMITTED: _read_keeping,
        Course.RESCUING: _read_keeping,
        Course.LAPSED: _read_lapsed,
    }
    reader = readers.get(halt.course)
    return reader(halt) if reader is not None else None


def _read_preparing(halt: HaltState) -> Cue | None:
    heard = halt.heard
    if halt.gone or any(state in REFUSING for state in heard.values()):
        return Cue.REFUSED
    return Cue.ALL_HELD if all(heard.get(rank) == "held" for rank in halt.ranks) else None


def _read_keeping(halt: HaltState) -> Cue | None:
    heard = halt.heard
    if not halt.is_decided:
        asked = halt.standing or halt.awaited
        if any(heard.get(rank) in {"unwilling", "released"} for rank in asked):
            return Cue.REFUSED
        return None if not asked <= halt.gone else Cue.LOST if halt.standing else Cue.REFUSED
    if not halt.standing and any(heard.get(rank) == "released" for rank in halt.awaited):
        # No rank stood before a step: the job goes on by itself.
        return Cue.REFUSED
    is_settled = all(
        heard.get(rank) in SETTLED or heard.get(rank) in REFUSING or rank in halt.gone for rank in halt.awaited
    )
    return Cue.SETTLED if is_settled else None


def _read_lapsed(halt: HaltState) -> Cue | None:
    return None if halt.standing <= halt.gone else Cue.FOUND


def _perform(halt: HaltState, act: Act) -> tuple[HaltState, Action]:
    order = halt.order
    if act is Act.SEAL:
        return halt, Seal(order)
    if act is Act.COMMIT:
        halt = replace(halt, order=msgspec.structs.replace(order, kind="commit"))
        return halt, Tell(halt.order, tuple(sorted(halt.ranks)))
    if act is Act.LEAVE:
        leave = msgspec.structs.replace(order, kind="leave")
        return halt, Tell(leave, tuple(sorted(halt.ranks - halt.gone)))
    if act is Act.ABORT:
        return halt, Tell(_abort(order), tuple(sorted(halt.ranks - halt.gone)))
    return halt, _repeated(halt)


def _abort(order: Order) -> Order:
    return msgspec.structs.replace(order, kind="abort", savers=(), lost=())


_ANSWERS: dict[Course, tuple[RankState, ...]] = {
    Course.PREPARING: ("willing", "held"),
    Course.COMMITTED: KEEPING,
    Course.RESCUING: KEEPING,
    Course.CALLED_OFF: ("released", "unwilling"),
}


def _repeated(halt: HaltState) -> Tell:
    """Repeat the current order to the ranks that have not answered it."""
    heard, answers = halt.heard, _ANSWERS[halt.course]
    whom = halt.ranks if halt.course is Course.CALLED_OFF else halt.awaited | halt.standing
    silent = tuple(sorted(rank for rank in whom - halt.gone if heard.get(rank) not in answers))
    return Tell(_abort(halt.order) if halt.course is Course.CALLED_OFF else halt.order, silent)
