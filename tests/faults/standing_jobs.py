"""A job that stands still, played through time: what its sidecars would say, judged four times a second."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holter.coordinator.judge import pending
from holter.coordinator.window.assembly import ProgressBook
from holter.faults import ExamKey, RankExit, Window
from holter.faults.hangs.stalled_rank import StalledRank
from holter.records import (
    Call,
    Exam,
    Exited,
    Farewell,
    Finding,
    Flight,
    Frame,
    Group,
    Link,
    Observation,
    Overdue,
    Phase,
    ProcessState,
    ThreadStack,
    Unexamined,
)
from made_up import made_window

SECOND = 1_000_000_000
START_S = 1000.0
"""Of the play, on the wall clock."""
SITE = "/venv/lib/python3.11/site-packages"

MAIN = Frame("main", "/home/u/train.py", 88)
SPIN = (Frame("spin", "/home/u/train.py", 41), MAIN)
WAIT = (Frame("all_reduce", f"{SITE}/torch/distributed/distributed_c10d.py", 3000), MAIN)
LOADING = (Frame("_try_get_data", f"{SITE}/torch/utils/data/dataloader.py", 1294), MAIN)
SAVING = (
    Frame("_save", f"{SITE}/torch/serialization.py", 1211),
    Frame("save", f"{SITE}/torch/serialization.py", 900),
    MAIN,
)
COMPILING = (Frame("compile_to_fn", f"{SITE}/torch/_inductor/graph.py", 2300), MAIN)
UPLOADING = (Frame("urlopen", f"{SITE}/urllib3/connectionpool.py", 700), MAIN)
LOCKED = (Frame("burn_forever", "/home/u/native.so", 0, is_native=True), Frame("step", "/home/u/train.py", 52), MAIN)


def calls(last: int, *, is_last_open: bool = False, first: int = 1, now_s: float = 0.0, group: str = "0") -> Flight:
    """A recorder that holds the all_reduces up to a number, ten a second."""
    made = [
        Call(
            group=group,
            sequence=number,
            operation="all_reduce",
            sizes=((10,),),
            dtypes=("float32",),
            created_ns=int((now_s - 5 - (last - number) / 10) * SECOND),
            is_retired=number < last or not is_last_open,
            record=number,
        )
        for number in range(first, last + 1)
    ]
    return Flight(groups=[Group(name=group, description="default_pg")], calls=made, taken_ns=int(now_s * SECOND))


@dataclass
class Actor:
    """One rank: where it stands, since when, and what a look at it shows. Times are seconds of the play."""

    step: int = 20
    phase: Phase = Phase.BACKWARD
    since_s: float = 0.0
    """When it last moved."""
    until_s: float = 1e9
    """When it moves on."""
    deadline_s: float = 6.0
    suspect_s: float | None = None
    """None: half of the deadline."""
    because: str = "longest of 43 was 0.06 s"
    has_evaluated: bool = False
    frames: Sequence[Frame] = WAIT
    last_call: int = 812
    is_in_call: bool = True
    flight: Callable[[float], Flight | None] | None = None
    """Of the moment; else by `last_call` and `is_in_call`."""
    state: str = "sleeping"
    stopped_since_s: float | None = None
    cpu_share: float = 0.02
    is_lock_free: bool | None = True
    owns_lock: bool = False
    answers_after_s: float | None = 0.3
    """None: never."""
    silent_since_s: float | None = None
    ends_s: float | None = None
    exit_code: int | None = 0
    signal: int | None = None
    farewell: Farewell | None = None

    def exam(self, key: ExamKey, now_s: float) -> Exam:
        """What its sidecar sees."""
        is_over = now_s >= self.until_s or now_s < (self.stopped_since_s or 0.0)
        stopped_s = now_s - self.stopped_since_s if self.stopped_since_s is not None and not is_over else 0.0
        wall_s = START_S + now_s
        flight = (
            self.flight(wall_s) if self.flight else calls(self.last_call, is_last_open=self.is_in_call, now_s=wall_s)
        )
        stack = ThreadStack("MainThread", True, self.owns_lock, self.cpu_share > 0.5, list(self.frames))
        return Exam(
            reason="asked",
            asked_ns=key.asked_ns,
            depth=key.depth,
            phase=self.phase,
            waited_s=now_s - self.since_s,
            process=ProcessState(
                state="sleeping" if is_over else self.state, cpu_s=10.0, cpu_share=self.cpu_share, stopped_s=stopped_s
            ),
            stacks=[stack] if self.frames else [],
            stack_error="" if self.frames else "Permission denied",
            is_lock_free=self.is_lock_free,
            flight=flight,
        )

    def waited_s(self, now_s: float) -> float:
        """Since it last moved."""
        return now_s - self.since_s

    def end(self, rank: int) -> RankExit:
        """How it ended."""
        exited = Exited(
            pid=4000 + rank,
            exit_code=self.exit_code,
            signal=self.signal,
            out_of_memory=False,
            last_step=self.step,
            last_phase=self.phase,
            farewell=self.farewell,
        )
        return RankExit(rank, int((START_S + (self.ends_s or 0.0)) * SECOND), exited)


@dataclass
class Play:
    """The judgements of a play."""

    confirmed: list[tuple[float, Finding]] = field(default_factory=list)
    asked: list[tuple[float, ExamKey]] = field(default_factory=list)
    window: Window | None = None

    @property
    def first(self) -> tuple[float, Finding]:
        """When it was known, and what."""
        return self.confirmed[0]


def play(
    actors: dict[int, Actor], until_s: float = 30.0, tick_s: float = 0.25, failing: dict[int, float] | None = None
) -> Play:
    """Judge at every quarter of a second; examinations are answered as the actors answer. `failing`: when a rank says that an exception ends it."""
    judge, book, done = StalledRank(), ProgressBook(), Play()
    said: dict[int, str] = {}
    waiting: list[tuple[float, ExamKey]] = []
    known: set[ExamKey] = set()
    for tick in range(int(until_s / tick_s) + 1):
        now_s = tick * tick_s
        now_ns = int((START_S + now_s) * SECOND)
        for rank, actor in actors.items():
            _report(book, rank, actor, said, now_s)
        for due_s, key in [one for one in waiting if one[0] <= now_s]:
            waiting.remove((due_s, key))
            actor = actors[key.rank]
            if (actor.ends_s is None or now_s < actor.ends_s) and actor.silent_since_s is None:
                book.add(_seen(key.rank, actor.step, now_ns, actor.exam(key, now_s)), now_ns)
        ends = (actor.end(rank) for rank, actor in actors.items() if actor.ends_s is not None and actor.ends_s <= now_s)
        window = done.window = made_window(
            now_ns=now_ns,
            world_size=len(actors),
            attached=frozenset(actors),
            exits=tuple(sorted(ends, key=lambda end: end.at_ns)),
            hosts={rank: f"node{rank}" for rank in actors},
            delays=dict(book.delays),
            exams=dict(book.exams),
            unexamined=dict(book.unexamined),
            links=dict(book.links),
            failing={rank: int((START_S + at_s) * SECOND) for rank, at_s in (failing or {}).items() if at_s <= now_s},
        )
        for finding in judge.judge(window):
            if not finding.needs:
                done.confirmed.append((now_s, finding))
            for key in pending(finding, window):
                assert isinstance(key, ExamKey)
                if key not in known:
                    known.add(key)
                    done.asked.append((now_s, key))
                    after_s = actors[key.rank].answers_after_s
                    if after_s is None:
                        missed = Unexamined(asked_ns=key.asked_ns)
                        book.add(_seen(key.rank, -1, now_ns, missed), now_ns)
                    else:
                        waiting.append((now_s + after_s, key))
    return done


def _report(book: ProgressBook, rank: int, actor: Actor, said: dict[int, str], now_s: float) -> None:
    """What its sidecar would say of its own accord."""
    now_ns = int((START_S + now_s) * SECOND)
    if actor.ends_s is not None and now_s >= actor.ends_s:
        return
    if actor.silent_since_s is not None and now_s >= actor.silent_since_s:
        if said.get(rank) != "silent":
            said[rank] = "silent"
            book.add(_seen(rank, -1, now_ns, Link(state="silent")), now_ns)
        return
    waited_s = actor.waited_s(now_s)
    suspect_s = actor.deadline_s / 2 if actor.suspect_s is None else actor.suspect_s
    tier = "overdue" if waited_s >= actor.deadline_s else "suspect" if waited_s >= suspect_s else ""
    is_held = actor.stopped_since_s is not None and actor.state != "uninterruptible"
    if is_held and now_s >= (actor.stopped_since_s or 0.0) and not tier:
        tier = "suspect"
    if now_s >= actor.until_s:
        tier = "moved"
    if tier and said.get(rank, "moved") != tier:
        said[rank] = tier
        body = Overdue(
            tier=tier,
            phase=actor.phase,
            micro_step=0,
            waited_s=waited_s,
            deadline_s=actor.deadline_s if tier == "overdue" else suspect_s,
            because=actor.because,
            num_steps=actor.step,
            has_evaluated=actor.has_evaluated,
        )
        book.add(_seen(rank, actor.step, now_ns, body), now_ns)


def _seen(rank: int, step: int, at_ns: int, body: Overdue | Exam | Link | Unexamined) -> Observation:
    return Observation(rank=rank, step=step, at_ns=at_ns, body=body)
