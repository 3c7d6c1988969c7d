"""Plan a halt from the situation of the ranks: which order begins it, who saves, and for which step. Pure.

    every rank stands before the same step      commit    main threads save, together
    ranks are blocked, dead, or about to be     rescue    side threads save, on ranks with a consistent state
    every rank is training                      prepare   at a step that no rank has reached

A rank that is inside an optimizer's step, or between two of one round, has weights that are partly new; a rank that is
stopped can do nothing. Neither can save. If ranks stand at several steps, those of the most common step are chosen, the
latest of several; replicas need only one. Replicas that are one step apart resume from the rank that is behind: how its
step began is known from the others too, each of which shows its last two.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holter import patience
from holter.records import OrderKind, RankState

MIN_AHEAD = 2
AHEAD_S = 0.5
"""The agreed step is at least this far ahead, in steps and in seconds, so that the order reaches every rank in time."""


@dataclass(frozen=True, kw_only=True)
class RankSituation:
    """The last known situation of one rank."""

    rank: int
    step: int | None
    """Completed optimizer steps; None if not known."""
    state: RankState | None = None
    """What the rank last reported of a halt of its own: held, dying or terminated. None otherwise."""
    is_torn: bool = False
    is_there: bool = True
    """Whether its process lives and the coordinator hears from it."""
    has_ended: bool = False
    """Whether its process was seen to end."""
    is_able: bool = True
    """Whether one of its threads can run: it is not stopped, and its interpreter answers."""
    snapshots: tuple[int, ...] = ()
    """Completed steps of the copies that it has in memory."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A request to halt the run, with its reason."""

    cause: str
    reason: str
    ranks: tuple[int, ...] = ()
    """The culprits; other ranks are preferred for saving."""
    incident: str | None = None
    is_blocked: bool = False
    """Whether ranks cannot continue by themselves."""
    is_operator: bool = False
    """Whether an operator asked. Then nothing is halted unless something can be saved."""
    first_bad: int | None = None
    """Completed steps of the first state that contains the fault; None if it spoiled no state."""


@dataclass(frozen=True, kw_only=True)
class JobShape:
    """What is known of the job as a whole."""

    step_s: float
    """Duration of a step in seconds."""
    is_sharded: bool = False
    """Whether no rank holds the whole state, so that the part of every rank is needed."""


@dataclass(frozen=True, kw_only=True)
class HaltPlan:
    """The first order of a halt, with its details."""

    kind: OrderKind
    """`prepare`, `commit` or `rescue`."""
    step: int
    savers: tuple[int, ...]
    lost: tuple[int, ...] = ()
    snapshot: int = -1
    """Completed steps of the snapshot to save instead of the live state; -1: save the live state."""
    wait_s: float = 0.0
    """Seconds until every rank has certainly come to the step."""

    @property
    def kept_step(self) -> int:
        """Completed steps in the state that is saved."""
        return self.step if self.snapshot < 0 else self.snapshot


@dataclass(frozen=True)
class NotYet:
    """Nothing is ordered at this moment, for this reason."""

    why: str


def choose(  # noqa: PLR0911  one line a situation
    wish: Wish, ranks: Sequence[RankSituation], job: JobShape, *, waited_s: float, attempt: int = 0
) -> HaltPlan | NotYet:
    """Choose how to begin the halt.

    `waited_s`: seconds since a rank first stood or the wish came. `attempt`: number of prepares that have come too late
    so far.
    """
    able = [one for one in ranks if one.is_there and one.is_able]
    if not able:
        return NotYet("no rank is left that could save")
    lost = tuple(sorted({one.rank for one in ranks} - {one.rank for one in able}))
    standing = [one for one in able if one.state == "held"]
    if standing:
        steps = {one.step for one in standing}
        if len(standing) == len(ranks) and len(steps) == 1 and standing[0].step is not None:
            return _commit(wish, ranks, standing[0].step)
        if len(standing) < len(able) and not lost and waited_s < patience.STAND_S:
            return NotYet(f"{len(standing)} of {len(ranks)} ranks stand, the others are waited for")
        return _rescue(wish, able, lost, job)
    is_ending = any(one.has_ended for one in ranks) or any(one.state in ("dying", "terminated") for one in able)
    if wish.is_blocked or is_ending:
        return _rescue(wish, able, lost, job)
    if lost:
        # They may well train on with the others: a moving state cannot be rescued, and these ranks cannot be asked.
        return NotYet(f"rank {', '.join(map(str, lost[:4]))} cannot be reached, though it was not seen to end")
    return _prepare(able, job.step_s, attempt)


def _commit(wish: Wish, ranks: Sequence[RankSituation], step: int) -> HaltPlan:
    # All ranks save together. In a framework's own function its first process writes what they share, and the rank that
    # wrote it reads it back.
    savers = tuple(sorted(one.rank for one in ranks))
    # With several optimizers, one may have been applied before the next one's numbers were seen; the rank then reports
    # that it is torn.
    is_torn = any(one.is_torn for one in ranks)
    snapshot = _snapshot(ranks, before=wish.first_bad) if is_torn or _is_spoiled(wish, step) else -1
    return HaltPlan(kind="commit", step=step, savers=savers, snapshot=snapshot)


def _rescue(wish: Wish, able: Sequence[RankSituation], lost: tuple[int, ...], job: JobShape) -> HaltPlan:
    whole = [one for one in able if not one.is_torn and one.step is not None]
    step = _commonest(one.step for one in whole if one.step is not None)
    behind = min((one.step for one in whole if one.step is not None), default=None)
    if step is not None and behind == step - 1 and not job.is_sharded and max(one.step or 0 for one in whole) == step:
        step = behind
    is_apart = len(whole) < len(able) or len({one.step for one in whole}) > 1
    if step is None or _is_spoiled(wish, step) or (job.is_sharded and is_apart):
        snapshot = _snapshot(able, before=wish.first_bad)
        if snapshot >= 0:
            at = max(one.step for one in able if one.step is not None)
            everyone = _ordered((one.rank for one in able), wish.ranks)
            return HaltPlan(kind="rescue", step=at, savers=everyone, lost=lost, snapshot=snapshot)
    if step is None:
        # No rank has a whole state: the rank that is asked will report that, and the run ends all the same.
        known = [one for one in able if one.step is not None] or list(able)
        return HaltPlan(kind="rescue", step=known[0].step or 0, savers=(known[0].rank,), lost=lost)
    savers = _ordered((one.rank for one in whole if one.step == step), wish.ranks)
    return HaltPlan(kind="rescue", step=step, savers=savers, lost=lost)


def _prepare(able: Sequence[RankSituation], step_s: float, attempt: int) -> HaltPlan | NotYet:
    steps = [one.step for one in able if one.step is not None]
    if len(steps) < len(able):
        return NotYet("not every rank has said where it is")
    ahead = MIN_AHEAD + int(AHEAD_S / max(step_s, 1e-3)) * 4**attempt
    savers = tuple(sorted(one.rank for one in able))
    return HaltPlan(kind="prepare", step=max(steps) + ahead, savers=savers, wait_s=2 * (ahead + 1) * step_s)


def _is_spoiled(wish: Wish, step: int) -> bool:
    return wish.first_bad is not None and wish.first_bad <= step


def _snapshot(ranks: Iterable[RankSituation], *, before: int | None) -> int:
    """Return the steps of the newest snapshot that all ranks have and that is from before the fault; -1 if there is none."""
    common = set.intersection(*(set(one.snapshots) for one in ranks))
    return max((step for step in common if before is None or step < before), default=-1)


def _commonest(steps: Iterable[int]) -> int | None:
    counted = Counter(steps)
    return max(counted, key=lambda step: (counted[step], step), default=None)


def _ordered(ranks: Iterable[int], culprits: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks, culprits last."""
    return tuple(sorted(ranks, key=lambda rank: (rank in culprits, rank)))
