r"""A rank's side of a halt, as a table: (stand, event) -> next stand and actions.

    TRAINING --prepare--> WILLING --reaches the step--> HELD --commit | abort | patience over--> DECIDING (asks the register)
        \--a number that is not finite------------------/          register: abort  -> TRAINING, the main thread goes on
        \--rescue: a thread saves, the main thread is blocked-\     register: commit -> SAVING -> SAVED --leave--> LEAVING (93)
        \--exception -> DYING, signal -> TERMINATED ------------> SAVING -> SAVED --leave--> LEAVING; else it dies as it would have

Ranks that stand at one step must not be separated by a lost message or a dead coordinator: either all go on or all
leave. So no rank obeys a `commit`, or its own patience, at once. It offers the order to the commit register, which has
one entry for each step in the job's own store; the first order offered there wins, and every rank obeys it. A rank that
has obeyed the register is *bound*: whatever happens, it ends with 93. So is a rank that saves while its main thread is
blocked: random states and buffers were set back for that, and it must not train on with them. A rank that others save
for while its main thread is blocked is *free*: as long as nobody orders `leave`, nothing has happened to its training.

`advance` is pure. The halt agent (`rank.hold.halt_agent`) carries out the returned actions, and reports when
`patience_s` of the new stand is over.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, cast

from holter import patience
from holter.records import Order, RankState


class Stand(StrEnum):
    """Where a rank stands in a halt."""

    TRAINING = "training"
    WILLING = "willing"
    """The rank will hold before the ordered step."""
    HELD = "held"
    """The main thread waits before the optimizer's step."""
    DECIDING = "deciding"
    """The commit register was asked, and its answer is awaited."""
    SAVING = "saving"
    SAVED = "saved"
    """The rank has saved, or could not, or had nothing to save; it waits for the order to leave."""
    DYING = "dying"
    TERMINATED = "terminated"
    LEAVING = "leaving"
    """The rank ends with exit code 93."""
    DEAD = "dead"
    """The rank ends as it would have without holter."""


ENDS = frozenset({Stand.LEAVING, Stand.DEAD})


@dataclass(frozen=True)
class Rank:
    """The state of one rank in the protocol."""

    number: int
    """Global rank."""
    stand: Stand = Stand.TRAINING
    order: Order | None = None
    """The order that is being obeyed, or the last one that was."""
    step: int = -1
    """The step before which the main thread stands, or is to stand; -1 if none."""
    past: int = 0
    """Number of the latest halt that is over for this rank; orders of it and earlier ones come too late."""
    went_on: int = -1
    """The last step before which the rank stood and then went on; it does not stand there again. -1 if none."""
    is_bound: bool = False
    """Whether the rank must end with 93, whatever happens, because it has obeyed the register or saved as an ordered
    saver."""
    is_standing: bool = False
    """Whether the main thread stands in `hold`; otherwise it trains, is blocked elsewhere, or waits to die."""
    ending: Literal["", "exception", "signal"] = ""
    """Why the process is about to end for a reason of its own; empty if it is not."""
    result: Literal["", "saved", "failed"] = ""
    why: str = ""
    """Why the save failed; empty if it did not."""
    has_sidecar: bool = True


@dataclass(frozen=True)
class OrderArrived:
    """The coordinator's order arrived."""

    order: Order
    reached: int = -1
    """The last step before which the main thread has asked whether to stand; a `prepare` for it comes too late."""


@dataclass(frozen=True)
class Reached:
    """The main thread is in `hold` before this step."""

    step: int
    is_agreed: bool = False
    """Whether it holds because of a `prepare`; otherwise because of numbers that are not finite."""
    num_skipped: int = 0
    """Rounds that a loss scaler has skipped since the previous step; they count towards the step of a `prepare`."""


@dataclass(frozen=True)
class Answered:
    """The answer of the commit register: the order that was offered first, of kind `commit`, `rescue` or `abort`."""

    order: Order


@dataclass(frozen=True)
class Saved:
    """The save has ended."""

    halt: int
    """Number of the halt that it belongs to, because a save that was given up may end late."""
    failure: str = ""
    """Why it failed; empty if the save was verified."""


class RankEvent(StrEnum):
    """Events that carry no data."""

    PATIENCE_OVER = "patience over"
    """The rank has been in this stand for `patience_s`."""
    THROWN = "thrown"
    """An exception has left the script's main thread."""
    SIGNALLED = "signalled"
    """A signal asks the process to end."""
    ASKED = "asked"
    """A signal arrived that the user mapped to a halt."""
    INTERRUPTED = "interrupted"
    """Ctrl-C: the process ends now, whatever holter was doing."""
    SIDECAR_LOST = "sidecar lost"


Event = OrderArrived | Reached | Answered | Saved | RankEvent


@dataclass(frozen=True)
class Say:
    """Tell the coordinator a state (`Halting`, with the completed step and whether a step is torn)."""

    state: RankState
    halt: int = 0
    why: str = ""


@dataclass(frozen=True)
class Ask:
    """Offer this order to the register of `step`; the answer arrives as Answered.

    If the register cannot be reached, the answer is the offered order itself.
    """

    step: int
    order: Order


@dataclass(frozen=True)
class SaveState:
    """Save now: in the main thread, standing in `hold`, if every rank does so; otherwise in a thread, without collectives."""

    order: Order
    is_main_thread: bool


class Do(StrEnum):
    """Other actions."""

    RELEASE = "release"
    """The main thread returns from `hold` and trains on."""
    LEAVE = "leave"
    """End with 93: by SystemExit if the main thread stands in `hold`, else by os._exit."""
    DIE = "die"
    """Let the exception, or the signal, take its course."""


Action = Say | Ask | SaveState | Do


class RankCue(StrEnum):
    """An event as the table distinguishes it, by what it means to this rank at this moment."""

    PREPARE = "prepare"
    LATE_PREPARE = "prepare for a step already reached"
    COMMIT = "commit"
    STRAY_COMMIT = "commit for another step"
    RESCUE = "rescue, by this rank, or asked of a rank that stands"
    STAND_BY = "rescue, by others"
    REPEAT = "the order that is being obeyed"
    ABORT = "abort"
    STRAY_ABORT = "abort of something else"
    LEAVE = "leave"
    REACHED = "reached"
    REACHED_AGAIN = "reached a step where it went on, or which nobody wants held"
    REGISTER_COMMIT = "register: commit"
    REGISTER_SAVE = "register: rescue, by this rank"
    REGISTER_WAIT = "register: rescue, by others"
    REGISTER_ABORT = "register: abort"
    SAVED = "save is over"
    BOUND_OVER = "patience over, bound"
    OVER = "patience over"
    THROWN = "thrown"
    SIGNALLED = "signalled"
    BOUND_SIGNALLED = "signalled, bound"
    ASKED = "asked"
    INTERRUPTED = "interrupted"
    SIDECAR_LOST = "sidecar lost"


class RankAct(StrEnum):
    """What a row of the table does; `_word` adds the rank's own data to it."""

    SAY_WILLING = "say willing"
    SAY_UNWILLING = "say unwilling"
    SAY_HELD = "say held"
    SAY_SAVING = "say saving"
    SAY_RESULT = "say result"
    SAY_RELEASED = "say released"
    SAY_DYING = "say dying"
    SAY_TERMINATED = "say terminated"
    SAY_ASKING = "say asking"
    ASK_ORDER = "ask the register for the order"
    ASK_ABORT = "ask the register for an abort"
    SAVE = "save"
    SAVE_IN_MAIN = "save in the main thread"
    RELEASE = "release"
    LEAVE = "leave"
    DIE = "die"


BACK = Stand.TRAINING
"""Goal of a row: whatever the rank would do without holter. That is DEAD if its process is about to end."""

_BEFORE = (Stand.TRAINING, Stand.WILLING)
_ENDING = (Stand.DYING, Stand.TERMINATED)
_STANDING = (Stand.HELD, Stand.DECIDING)
_KEEPING = (Stand.SAVING, Stand.SAVED)
_ALL = tuple(stand for stand in Stand if stand not in ENDS)

Row = tuple[Stand, tuple[RankAct, ...]]


def _rows(
    stands: tuple[Stand, ...], cues: RankCue | tuple[RankCue, ...], goal: Stand | None, *acts: RankAct
) -> dict[tuple[Stand, RankCue], Row]:
    """Return the same row for several stands and cues; without a goal the stand does not change."""
    cues = (cues,) if isinstance(cues, RankCue) else cues
    return {(stand, cue): (stand if goal is None else goal, acts) for stand in stands for cue in cues}


TABLE: dict[tuple[Stand, RankCue], Row] = {
    # An agreed step.
    **_rows(_BEFORE, RankCue.PREPARE, Stand.WILLING, RankAct.SAY_WILLING),
    **_rows(_BEFORE, RankCue.LATE_PREPARE, BACK, RankAct.SAY_UNWILLING),
    **_rows((Stand.WILLING,), RankCue.REPEAT, None, RankAct.SAY_WILLING),
    **_rows((Stand.WILLING,), (RankCue.OVER, RankCue.ABORT), BACK, RankAct.SAY_RELEASED),
    **_rows((Stand.WILLING,), RankCue.SIDECAR_LOST, BACK),
    **_rows((Stand.HELD,), (RankCue.PREPARE, RankCue.LATE_PREPARE, RankCue.REPEAT), None, RankAct.SAY_HELD),
    **_rows(_ENDING, (RankCue.PREPARE, RankCue.LATE_PREPARE), None, RankAct.SAY_UNWILLING),
    # Standing before a step.
    **_rows((*_BEFORE, Stand.TERMINATED), RankCue.REACHED, Stand.HELD, RankAct.SAY_HELD),
    **_rows(_KEEPING, RankCue.REACHED, None),
    **_rows(_ALL, RankCue.REACHED_AGAIN, None, RankAct.RELEASE),
    **_rows((Stand.HELD,), RankCue.COMMIT, Stand.DECIDING, RankAct.ASK_ORDER),
    **_rows((Stand.HELD,), (RankCue.ABORT, RankCue.OVER, RankCue.SIDECAR_LOST), Stand.DECIDING, RankAct.ASK_ABORT),
    **_rows((*_BEFORE, *_ENDING, Stand.HELD), RankCue.STRAY_COMMIT, None, RankAct.SAY_RELEASED),
    **_rows(_STANDING, RankCue.REGISTER_COMMIT, Stand.SAVING, RankAct.SAY_SAVING, RankAct.SAVE_IN_MAIN),
    **_rows(_STANDING, RankCue.REGISTER_SAVE, Stand.SAVING, RankAct.SAY_SAVING, RankAct.SAVE),
    **_rows(_STANDING, RankCue.REGISTER_WAIT, Stand.SAVED, RankAct.SAY_RESULT),
    **_rows(_STANDING, RankCue.REGISTER_ABORT, BACK, RankAct.SAY_RELEASED),
    # The main thread is blocked, or about to die: a thread saves.
    **_rows((*_BEFORE, *_ENDING), RankCue.RESCUE, Stand.SAVING, RankAct.SAY_SAVING, RankAct.SAVE),
    **_rows((*_BEFORE, *_ENDING), RankCue.STAND_BY, Stand.SAVED),
    **_rows((Stand.HELD,), RankCue.RESCUE, Stand.DECIDING, RankAct.ASK_ORDER),
    **_rows((Stand.SAVED,), RankCue.RESCUE, Stand.SAVING, RankAct.SAY_SAVING, RankAct.SAVE),
    **_rows((Stand.SAVING,), RankCue.REPEAT, None, RankAct.SAY_SAVING),
    **_rows((Stand.SAVED,), RankCue.REPEAT, None, RankAct.SAY_RESULT),
    **_rows((Stand.SAVING,), (RankCue.SAVED, RankCue.OVER, RankCue.BOUND_OVER), Stand.SAVED, RankAct.SAY_RESULT),
    **_rows(_KEEPING, RankCue.ABORT, BACK, RankAct.SAY_RELEASED),
    **_rows((Stand.SAVED,), RankCue.OVER, BACK, RankAct.SAY_RELEASED),
    **_rows((Stand.SAVED,), (RankCue.BOUND_OVER, RankCue.BOUND_SIGNALLED), Stand.LEAVING, RankAct.LEAVE),
    # The end.
    **_rows(_ALL, RankCue.LEAVE, Stand.LEAVING, RankAct.LEAVE),
    **_rows((*_BEFORE, Stand.TERMINATED), RankCue.THROWN, Stand.DYING, RankAct.SAY_DYING),
    **_rows(_BEFORE, RankCue.SIGNALLED, Stand.TERMINATED, RankAct.SAY_TERMINATED),
    **_rows(_STANDING, RankCue.SIGNALLED, None, RankAct.SAY_TERMINATED),
    **_rows((*_KEEPING, Stand.DYING), RankCue.SIGNALLED, None),
    **_rows(_KEEPING, RankCue.THROWN, None),
    **_rows(_ENDING, (RankCue.ABORT, RankCue.OVER, RankCue.SIDECAR_LOST), Stand.DEAD, RankAct.DIE),
    **_rows(_BEFORE, RankCue.ASKED, None, RankAct.SAY_ASKING),
    **_rows(_ALL, RankCue.INTERRUPTED, Stand.DEAD, RankAct.DIE),
}
"""The transitions of a rank; a combination without a row changes nothing."""


def advance(
    rank: Rank, event: Event, table: dict[tuple[Stand, RankCue], Row] = TABLE
) -> tuple[Rank, tuple[Action, ...]]:
    """Return the rank after this event, and the actions to take, in order."""
    cue = read(rank, event)
    if rank.stand in ENDS or cue is None:
        return rank, ()
    row = table.get((rank.stand, cue))
    noted = _note(rank, event, cue, has_row=row is not None)
    if row is None:
        return noted, ()
    goal, acts = row
    halt = event.order.halt if isinstance(event, OrderArrived) else noted.order.halt if noted.order is not None else 0
    if goal is BACK and rank.stand is not BACK:
        after, dos = _go_back(noted)
    else:
        after, dos = replace(noted, stand=goal), ()
    return after, (*(_word(noted, act, halt) for act in acts), *dos)


def patience_s(rank: Rank) -> float | None:
    """Return how many seconds the rank may stay in its stand before `PATIENCE_OVER`; None: without limit.

    The time starts again when this value or the stand changes.
    """
    deadline_s = rank.order.deadline_s if rank.order is not None else 0.0
    waits: dict[Stand, float] = {
        Stand.WILLING: deadline_s,
        # Without a sidecar the rank gets no orders: what its peers were told is in the register.
        Stand.HELD: patience.HOLD_S if rank.has_sidecar else 0.0,
        Stand.SAVING: deadline_s,
        Stand.SAVED: patience.LEAVE_S + (deadline_s if rank.has_sidecar else 0.0),
        Stand.DYING: patience.DYING_S,
        Stand.TERMINATED: patience.DYING_S,
    }
    return waits.get(rank.stand)


def read(rank: Rank, event: Event) -> RankCue | None:  # noqa: PLR0911 - one return for each kind of event
    """Return what an event means to this rank now; None if nothing."""
    match event:
        case OrderArrived(order=order):
            return _read_order(rank, order, event.reached)
        case Reached(step=step):
            is_wanted = rank.stand is Stand.WILLING and step + event.num_skipped == rank.step
            is_unwanted = event.is_agreed and not is_wanted
            return RankCue.REACHED_AGAIN if is_unwanted or step == rank.went_on else RankCue.REACHED
        case Answered(order=order):
            if order.kind == "rescue":
                return RankCue.REGISTER_SAVE if rank.number in order.savers else RankCue.REGISTER_WAIT
            return RankCue.REGISTER_COMMIT if order.kind == "commit" else RankCue.REGISTER_ABORT
        case Saved(halt=halt):
            return RankCue.SAVED if rank.order is not None and halt == rank.order.halt else None
        case RankEvent.PATIENCE_OVER:
            return RankCue.BOUND_OVER if rank.is_bound else RankCue.OVER
        case RankEvent.SIGNALLED if rank.is_bound:
            return RankCue.BOUND_SIGNALLED
    return RankCue[event.name]


def _read_order(rank: Rank, order: Order, reached: int) -> RankCue | None:  # noqa: PLR0911 - one for each kind of order
    if order.halt <= rank.past:
        # The rank went on from that halt; the coordinator may not know.
        return RankCue.STRAY_COMMIT if order.kind in {"prepare", "commit", "rescue"} else None
    if order.kind == "leave":
        return RankCue.LEAVE
    if order == rank.order and rank.stand is not Stand.DECIDING:
        return RankCue.REPEAT
    if order.kind == "prepare":
        return RankCue.PREPARE if order.step > reached else RankCue.LATE_PREPARE
    if order.kind == "commit":
        return RankCue.COMMIT if rank.stand is Stand.HELD and order.step == rank.step else RankCue.STRAY_COMMIT
    if order.kind == "rescue":
        if rank.stand is Stand.HELD or rank.number in order.savers:
            return RankCue.RESCUE
        return RankCue.STAND_BY
    is_other = rank.is_bound or (rank.stand is Stand.HELD and order.step != rank.step)
    return RankCue.STRAY_ABORT if is_other else RankCue.ABORT


_IS_PAST = {RankCue.ABORT, RankCue.STRAY_ABORT, RankCue.STRAY_COMMIT, RankCue.LATE_PREPARE, RankCue.REGISTER_ABORT}
"""After these cues the rank is done with the halt that was named."""


def _note(rank: Rank, event: Event, cue: RankCue, *, has_row: bool) -> Rank:  # noqa: C901 - one case an event
    """Return the rank with what it remembers of an event, whatever its next stand."""
    noted = rank
    own = rank.order.halt if rank.order is not None else 0
    match event:
        case OrderArrived(order=order) | Answered(order=order) if cue in _IS_PAST:
            if not rank.is_bound:
                noted = replace(noted, past=max(rank.past, order.halt, own if cue is RankCue.REGISTER_ABORT else 0))
        case OrderArrived(order=order) if has_row and cue is RankCue.PREPARE and rank.stand in _BEFORE:
            noted = replace(noted, order=order, step=order.step)
        case OrderArrived(order=order) if has_row and cue in {RankCue.COMMIT, RankCue.RESCUE, RankCue.STAND_BY}:
            is_saver = cue is RankCue.RESCUE and rank.stand is not Stand.HELD
            noted = replace(noted, order=order, result="", why="", is_bound=rank.is_bound or is_saver)
        case Answered(order=order):
            noted = replace(noted, order=order, is_bound=True, result="", why="")
        case Reached(step=step) if cue is RankCue.REACHED:
            is_self = rank.stand in _BEFORE and step != rank.step
            order_kept = None if is_self else rank.order
            noted = replace(noted, step=step, order=order_kept, is_standing=True)
        case Saved(failure=failure):
            noted = replace(noted, result="failed" if failure else "saved", why=failure)
        case RankEvent.PATIENCE_OVER if rank.stand is Stand.SAVING and rank.order is not None:
            why = f"the save was not over after {rank.order.deadline_s:.0f} s"
            noted = replace(noted, result="failed", why=why)
        case RankEvent.SIDECAR_LOST:
            noted = replace(noted, has_sidecar=False)
        case RankEvent.THROWN:
            noted = replace(noted, ending="exception")
        case RankEvent.SIGNALLED:
            noted = replace(noted, ending=rank.ending or "signal")
    if rank.stand is Stand.WILLING and cue in {RankCue.OVER, RankCue.THROWN, RankCue.SIGNALLED}:
        noted = replace(noted, past=max(noted.past, own))
    return noted


def _go_back(rank: Rank) -> tuple[Rank, tuple[Action, ...]]:
    """Return the rank to what it would do without holter."""
    if rank.ending:
        return replace(rank, stand=Stand.DEAD), (Do.DIE,)
    after = replace(rank, stand=Stand.TRAINING, order=None, step=-1, is_standing=False, result="", why="")
    if rank.is_standing:
        return replace(after, went_on=rank.step), (Do.RELEASE,)
    return after, ()


def _word(rank: Rank, act: RankAct, halt: int) -> Action:
    """Turn an act into an action with the rank's own data."""
    if act is RankAct.ASK_ABORT:
        return Ask(rank.step, Order(halt=halt, kind="abort", step=rank.step))
    if act in {RankAct.ASK_ORDER, RankAct.SAVE, RankAct.SAVE_IN_MAIN}:
        assert rank.order is not None
        if act is RankAct.ASK_ORDER:
            return Ask(rank.step, rank.order)
        return SaveState(rank.order, act is RankAct.SAVE_IN_MAIN)
    if act is RankAct.SAY_RESULT:
        # Others save for this rank: it has no part of its own.
        return Say(rank.result or "saved", halt, rank.why)
    if act.startswith("say "):
        return Say(cast("RankState", act.removeprefix("say ")), halt)
    return Do(act.value)
