"""Turns observations of many ranks into one window; pure, incremental, bounded. The coordinator and `holter replay` use it.

    rank 0  step 40  41  42            step 42: reported by rank 0, missing rank 1 (named, never waited for)
    rank 1  step 40  41                step 41: complete, so its classes are compared

Any interleaving of the ranks' observations gives the same window, as long as each rank's own order is kept. A step is
complete when every attached, living rank has reported it or a later one. Only the newest steps are kept, fewer the more
ranks there are; their numbers stay longer. Stalled ranks, results of examinations and states of connections
(`ProgressBook`) are the facts by which a hang is judged.
"""

from collections.abc import Mapping
from typing import get_args

from holter.coordinator.window.arrivals import ArrivalBook
from holter.coordinator.window.calls import CallBlockBook, CallCountBook
from holter.coordinator.window.census import CensusBook
from holter.coordinator.window.rare_notes import RareNotes
from holter.coordinator.window.steps import MAX_NUMBERED, NumberBook, StepLedger, extend_histories
from holter.faults.window import (
    CallView,
    ClassHistory,
    Delay,
    Examined,
    LinkView,
    ModelView,
    Note,
    ProcessView,
    RankExit,
    StepArrivals,
    StepNumbers,
    StepView,
    TableKey,
    TensorView,
    Window,
)
from holter.records import (
    Attached,
    Census,
    Exam,
    Exited,
    Halting,
    Link,
    Logged,
    Observation,
    Origin,
    Overdue,
    Rare,
    StepDone,
    StepsDone,
    Table,
    Traffic,
    Unavailable,
    Unexamined,
    Vitals,
)
from holter.records.joined import apart, full, root_name

MAX_RECORDS = 200_000
"""Largest number of step records remembered in all: steps times ranks."""
MIN_STEPS, MAX_STEPS = 8, 1024
HISTORIES = ("parameters", "state")
"""Kinds of tensors whose roots are reported both before a step and after it."""
MAX_TABLES = 1024
"""Largest number of tables that are kept; further ones count as not available."""
MAX_UNAVAILABLE = 65_536
MAX_ORIGINS = 1024
MAX_CENSUSES = 64
"""Largest number of different censuses that a status is made of."""
MAX_NONFINITE = 20_000
"""Largest number of tensors kept of one step, shared among the ranks."""

_RARE = get_args(Rare)
_Judged = tuple[tuple[StepView, ...], dict[str, ClassHistory], tuple[StepNumbers, ...]]


MAX_ASKED, MAX_UNASKED = 3, 2
"""Number of examinations kept of each rank: requested ones, in addition to the last one with native frames; and those
it left when it died."""
SAME_S = 1.0
"""Two messages concern the same standstill if they agree within so many seconds on when it began."""


class Assembly:
    """The state of all ranks: `add` observations, and look at it with `window`."""

    def __init__(self, world_size: int = 0) -> None:
        self._world_size = world_size
        self._attached: dict[int, tuple[int, int]] = {}
        """For each rank, its pid and the step at which it attached."""
        self._last: dict[int, int] = {}
        """For each rank, the last step it reported."""
        self._left: dict[int, tuple[int, Mapping[str, int]]] = {}
        """For each rank, a step and the roots of its parameters after that step, by scope."""
        self._exits: dict[int, RankExit] = {}
        self._signalled: dict[int, int] = {}
        """For each rank, when it first reported that a signal asks it to end."""
        self._failing: dict[int, int] = {}
        """For each rank, when it reported that an exception is about to end it."""
        self._ledgers: dict[int, StepLedger] = {}
        self._floor = 0
        """Steps below this one are forgotten for good."""
        self._forgotten: dict[str, ClassHistory] = {}
        self._tables: dict[TableKey, Table] = {}
        self._unavailable: set[TableKey] = set()
        self._origins: dict[tuple[int, int], Origin] = {}
        self._census = CensusBook()
        self._numbers = NumberBook()
        self._notes = RareNotes()
        self._hosts: dict[int, str] = {}
        self._offsets: dict[int, int] = {}
        """For each rank, the nanoseconds to add to its host's clock to get the coordinator's."""
        self._progress = ProgressBook()
        self._arrivals = ArrivalBook()
        self._blocks = CallBlockBook()
        self._counts = CallCountBook()
        self._judged: _Judged | None = None

    def add(self, observation: Observation, received_ns: int) -> None:
        """Take in an observation that was received at this moment of the coordinator's clock."""
        rank, body = observation.rank, observation.body
        match body:
            case StepDone():
                self._add_step(rank, observation.step, body, received_ns)
            case Attached():
                self._attach(rank, observation.step, body)
            case Exited():
                self._exits[rank] = RankExit(rank, self._happened_ns(observation, received_ns), body)
                self._judged = None
            case Census():
                self._census.add(rank, observation.step, body)
            case Logged():
                self._log(rank, observation.step, body)
            case Table():
                self._add_table((body.tensor_class, observation.step, rank), body)
            case Origin() if len(self._origins) < MAX_ORIGINS:
                self._origins[rank, observation.step] = body
            case Unavailable():
                self.mark_unavailable((body.tensor_class, observation.step, rank))
            case _:
                self._add_watched(observation, received_ns)

    def _happened_ns(self, observation: Observation, received_ns: int) -> int:
        """Return when it happened by the coordinator's clock.

        Hosts' clocks differ, and nothing can happen after it was received.
        """
        return min(observation.at_ns + self._offsets.get(observation.rank, 0), received_ns)

    def _add_watched(self, observation: Observation, received_ns: int) -> None:
        rank, body = observation.rank, observation.body
        match body:
            case StepsDone():
                self._add_joined(observation.step, body, received_ns)
            case Overdue() | Exam() | Unexamined() | Link():
                self._progress.add(observation, received_ns)
            case Halting(state="terminated"):
                self._signalled.setdefault(rank, self._happened_ns(observation, received_ns))
            case Halting(state="dying"):
                self._failing.setdefault(rank, self._happened_ns(observation, received_ns))
            case Traffic():
                self._offsets[rank] = body.clock_offset_ns
                self._arrivals.add(rank, body, received_ns)
                self._blocks.add(rank, body.blocks, received_ns)
                self._counts.add(rank, body.steps)
            case _ if isinstance(body, _RARE):
                self._notes.add(Note(rank, observation.step, received_ns, body), observation.at_ns)

    def mark_unavailable(self, key: TableKey) -> None:
        """Note that this table was asked for and cannot be had."""
        if len(self._unavailable) >= MAX_UNAVAILABLE:
            self._unavailable.discard(min(self._unavailable, key=lambda known: known[1]))
        self._unavailable.add(key)

    def window(self, now_ns: int) -> Window:
        """Return everything as of now, frozen; the cost depends on what changed since the last call."""
        steps, classes, series = self._steps_judged()
        return Window(
            now_ns=now_ns,
            world_size=self._world_size,
            attached=frozenset(self._attached),
            steps=steps,
            series=series,
            notes=self._notes.notes(),
            tensors=TensorView(classes, dict(self._tables), frozenset(self._unavailable), dict(self._origins)),
            models=ModelView(dict(self._census.joined), dict(self._census.steps), self._census.changes()),
            processes=ProcessView(
                exits=tuple(sorted(self._exits.values(), key=lambda ended: (ended.at_ns, ended.rank))),
                signalled=dict(self._signalled),
                failing=dict(self._failing),
                delays=dict(self._progress.delays),
                exams=dict(self._progress.exams),
                unexamined=dict(self._progress.unexamined),
                links=dict(self._progress.links),
                hosts=dict(self._hosts),
            ),
            calls=CallView(self._arrivals.arrivals(), self._blocks.parted(), self._counts.counts()),
        )

    def arrivals(self) -> tuple[StepArrivals, ...]:
        """Return how ranks came to the collectives of each step; the same object as long as nothing changed."""
        return self._arrivals.arrivals()

    def series(self) -> tuple[StepNumbers, ...]:
        """Return the numbers of each complete step; the same object as long as nothing changed."""
        return self._steps_judged()[2]

    def classes(self) -> Mapping[str, ClassHistory]:
        """Return when ranks agreed on each class of tensors, and when not."""
        return self._steps_judged()[1]

    def censuses(self) -> list[Census]:
        """Return the censuses of the ranks' models, equal ones once; only the first few if there are many."""
        return list({id(census): census for census in self._census.joined.values()}.values())[:MAX_CENSUSES]

    def newest_vitals(self) -> list[Vitals]:
        """Return the vitals of the last step at which any rank sent some."""
        return self._notes.newest_vitals()

    @property
    def num_steps_kept(self) -> int:
        """Largest number of steps that are remembered at this number of ranks."""
        num_ranks = max(1, self._world_size, len(self._attached), len(self._last))
        return max(MIN_STEPS, min(MAX_STEPS, MAX_RECORDS // num_ranks))

    def _attach(self, rank: int, step: int, body: Attached) -> None:
        self._world_size = max(self._world_size, body.world_size)
        known = self._attached.get(rank)
        if known is not None and known[0] == body.pid:
            return
        if known is not None:
            self._begin_again(rank, step)
        self._attached[rank] = (body.pid, step)
        self._hosts[rank] = body.host
        self._judged = None

    def _begin_again(self, rank: int, step: int) -> None:
        """Start a rank anew, because it attached from a new process: the former one's work from this step on is void."""
        self._exits.pop(rank, None)
        self._signalled.pop(rank, None)
        self._failing.pop(rank, None)
        self._left.pop(rank, None)
        self._last.pop(rank, None)
        for later in [known for known in self._ledgers if known >= step]:
            del self._ledgers[later]
        self._numbers.take_back(step)
        self._notes.take_back(rank, step)
        self._progress.forget(rank)
        self._arrivals.take_back(rank, step)
        self._blocks.forget(rank)
        self._counts.clear()
        self._census.take_back(rank, step)
        self._floor = min(self._floor, step)
        self._forgotten.clear()

    def _add_step(self, rank: int, step: int, done: StepDone, received_ns: int) -> None:
        self._judged = None
        self._last[rank] = max(step, self._last.get(rank, -1))
        if step < self._floor:
            return
        ledger = self._ledger(step, received_ns)
        # A second record of a rank replaces the first; its numbers are the same or cannot be trusted.
        if rank not in ledger.reported:
            self._numbers.add(step, rank, done)
        num_ranks = max(1, self._world_size, len(self._attached))
        ledger.add(rank, done, received_ns, tensor_limit=max(4, MAX_NONFINITE // num_ranks))
        before, after = _by_scope(done, "before"), _by_scope(done, "after")
        self._note_history(rank, ledger, before, after)
        self._forget_oldest()

    def _add_joined(self, step: int, joined: StepsDone, received_ns: int) -> None:
        """Take in one step of several ranks column by column; one by one if any of them has reported it before."""
        ledger = self._ledger(step, received_ns) if step >= self._floor else None
        if ledger is None or not ledger.reported.isdisjoint(joined.ranks):
            for rank, _, done in apart(joined):
                self._add_step(rank, step, done, received_ns)
            return
        self._judged = None
        for rank in joined.ranks:
            self._last[rank] = max(step, self._last.get(rank, -1))
        self._numbers.add_joined(step, joined)
        ledger.add_joined(joined, received_ns)
        num = len(joined.ranks)
        before = full(_scopes(joined, "before"), num)
        after = full(_scopes(joined, "after"), num)
        for rank, former, left in zip(joined.ranks, before, after, strict=True):
            self._note_history(rank, ledger, former, left)
        self._forget_oldest()

    def _ledger(self, step: int, received_ns: int) -> StepLedger:
        ledger = self._ledgers.get(step)
        if ledger is None:
            ledger = self._ledgers[step] = StepLedger(step, received_ns)
        return ledger

    def _note_history(self, rank: int, ledger: StepLedger, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        left = self._left.get(rank)
        if before and left is not None and left[0] == ledger.step - 1 and (common := before.keys() & left[1].keys()):
            # Compare its parameters and optimizer state before this step with what the previous step had left.
            is_kept = before == left[1] or all(before[scope] == left[1][scope] for scope in common)
            (ledger.kept if is_kept else ledger.broke).add(rank)
        if after:
            self._left[rank] = (ledger.step, after)

    def _forget_oldest(self) -> None:
        while len(self._ledgers) > self.num_steps_kept:
            oldest = min(self._ledgers)
            ledger = self._ledgers.pop(oldest)
            is_complete = not self._missing(oldest, self._lagging())
            extend_histories(self._forgotten, oldest, ledger.verdicts(is_complete=is_complete))
            if is_complete:
                self._numbers.keep(oldest, ledger.first_seen_ns)
            self._numbers.forget_until(oldest)
            self._floor = oldest + 1

    def _log(self, rank: int, step: int, body: Logged) -> None:
        """Take in what a script logged; values of an incomplete step wait for it."""
        self._judged = None
        if step >= self._floor or self._numbers.has(step):
            self._numbers.log(step, rank, body.values)

    def _add_table(self, key: TableKey, table: Table) -> None:
        if key not in self._tables and len(self._tables) >= MAX_TABLES:
            self.mark_unavailable(key)
            return
        self._tables[key] = table
        self._unavailable.discard(key)

    def _steps_judged(self) -> _Judged:
        if self._judged is None:
            self._judged = self._judge_steps()
        return self._judged

    def _judge_steps(self) -> _Judged:
        views, classes, lagging = [], dict(self._forgotten), self._lagging()
        series = list(self._numbers.remembered())
        for step, ledger in sorted(self._ledgers.items()):
            missing = self._missing(step, lagging)
            extend_histories(classes, step, ledger.verdicts(is_complete=not missing))
            views.append(ledger.view(missing))
            if not missing:
                series.append(self._numbers.entry(step, ledger.first_seen_ns))
        return tuple(views), classes, tuple(series[-MAX_NUMBERED:])

    def _lagging(self) -> list[tuple[int, int, int]]:
        """Return (last reported step, step of attaching, rank) of the living ranks that are behind, furthest behind first."""
        newest = max(self._ledgers, default=0)
        return sorted(
            (self._last.get(rank, attached_at - 1), attached_at, rank)
            for rank, (_, attached_at) in self._attached.items()
            if rank not in self._exits and self._last.get(rank, attached_at - 1) < newest
        )

    @staticmethod
    def _missing(step: int, lagging: list[tuple[int, int, int]]) -> tuple[int, ...]:
        """Return the ranks that have not reported this step; a rank that joined late is expected from its first step on."""
        return tuple(sorted(rank for last, attached_at, rank in lagging if last < step and attached_at <= step))


def _by_scope(done: StepDone, moment: str) -> dict[str, int]:
    """Return the roots of what no step may change between two steps, by kind and by what they are compared over."""
    return {
        kind + told[len(name) :]: root
        for told, root in done.roots.items()
        for kind in HISTORIES
        if told.startswith(name := f"{kind}_{moment}")
    }


def _scopes(joined: StepsDone, moment: str) -> list[dict[str, int]]:
    """Return such roots for several ranks; a single entry if all are equal."""
    columns = [
        (kind + root.name[len(name) :], root)
        for root in joined.roots
        for kind in HISTORIES
        if root.name.startswith(name := f"{kind}_{moment}")
    ]
    num = 1 if all(len(root.subgroups) == len(root.values) == 1 for _, root in columns) else len(joined.ranks)
    told = [(scope, full(root.subgroups, num), full(root.values, num)) for scope, root in columns]
    return [
        {root_name(scope, subgroups[index]): values[index] for scope, subgroups, values in told} for index in range(num)
    ]


class ProgressBook:
    """The newest report on every rank's progress."""

    def __init__(self) -> None:
        self.delays: dict[int, Delay] = {}
        self.exams: dict[int, tuple[Examined, ...]] = {}
        self.unexamined: dict[int, int] = {}
        self.links: dict[int, LinkView] = {}

    def add(self, observation: Observation, received_ns: int) -> None:
        """Take in an observation."""
        rank, step = observation.rank, observation.step
        match observation.body:
            case Overdue(tier="moved"):
                self.delays.pop(rank, None)
            case Overdue() as overdue:
                told = Delay(step, received_ns, overdue)
                if not _is_repeated(self.delays.get(rank), told):
                    self.delays[rank] = told
            case Exam() as exam:
                self.exams[rank] = _bounded(
                    (*self.exams.get(rank, ()), Examined(step, received_ns, exam, observation.at_ns))
                )
            case Unexamined() as missed:
                self.unexamined[rank] = max(missed.asked_ns, self.unexamined.get(rank, 0))
            case Link() as link:
                self.links[rank] = LinkView(link.state, received_ns)
                if link.state == "closed":
                    # Nobody would report that it moves on; a sidecar that comes back reports again whether it stalls.
                    self.delays.pop(rank, None)

    def forget(self, rank: int) -> None:
        """Forget a rank that runs in a new process."""
        for known in (self.delays, self.exams, self.unexamined):
            known.pop(rank, None)


def _is_repeated(known: Delay | None, told: Delay) -> bool:
    """Whether it repeats the same tier of the same standstill, as a sidecar does at every connection."""
    place = (told.step, told.overdue.tier, told.overdue.phase)
    if known is None or (known.step, known.overdue.tier, known.overdue.phase) != place:
        return False
    return abs(known.waited_s(told.at_ns) - told.overdue.waited_s) < SAME_S


def _bounded(seen: tuple[Examined, ...]) -> tuple[Examined, ...]:
    """Return the newest examinations of each kind, in the order in which they came."""
    kept: list[Examined] = []
    room = {True: MAX_ASKED, False: MAX_UNASKED}
    is_native_kept = False
    for one in reversed(seen):
        is_asked = one.exam.reason == "asked"
        is_native = is_asked and one.exam.depth == "native"
        if room[is_asked] or (is_native and not is_native_kept):
            room[is_asked] = max(0, room[is_asked] - 1)
            is_native_kept = is_native_kept or is_native
            kept.append(one)
    return tuple(reversed(kept))
