"""Where the wall time goes: the parts are the wall time, whatever was told and in whatever order."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holter.coordinator.window.wall_time import LATE_NS, MAX_KEPT, RanksSeen, WallTime, divide
from holter.faults.window import Arrival, StepArrivals
from holter.records import Attached, Exited, Farewell, Halting, Observation, Overdue, Phase, StepDone
from holter.records.goodput import PARTS, Life, goodput, in_words
from holter.records.joined import join

SECOND = 10**9
START = 1_700_000_000 * SECOND


def step_done(seconds: float, **phases: float) -> StepDone:
    return StepDone(
        seconds=seconds,
        phase_seconds=phases,
        micro_steps=1,
        loss=1.0,
        gradient_norm=1.0,
        learning_rate=0.1,
        batch=1,
        roots={},
        nonfinite=[],
        overhead_ratio=0.0,
        check_interval=1,
    )


def exited(exit_code: int | None = 0, signal: int | None = None) -> Exited:
    said = Farewell(kind="end", text="", where="") if exit_code == 0 else None
    return Exited(
        pid=1,
        exit_code=exit_code,
        signal=signal,
        out_of_memory=False,
        last_step=0,
        last_phase=Phase.OTHER,
        farewell=said,
    )


def attached(pid: int) -> Attached:
    return Attached(pid=pid, host="a", world_size=2, local_rank=0, command=[], versions={})


def overdue(tier: Any, waited_s: float = 0.0, phase: Phase = Phase.BACKWARD) -> Overdue:
    return Overdue(tier=tier, phase=phase, micro_step=0, waited_s=waited_s, deadline_s=5.0, because="")


@dataclass
class Job:
    """Two ranks, and whose clocks are ahead of the coordinator's by so much."""

    ahead_s: float = 0.0
    base_step: int = 0
    now_s: float = 0.0
    phases: set[Phase] = field(default_factory=lambda: {Phase.ATTACH})
    has_ended: bool = False
    arrivals: tuple[StepArrivals, ...] = ()
    step: int = 0
    book: WallTime = field(init=False)

    def __post_init__(self) -> None:
        self.book = WallTime(START, lambda: self.base_step)

    @property
    def now_ns(self) -> int:
        return START + round(self.now_s * SECOND)

    def tell(self, rank: int, body: Any, step: int = 0) -> None:
        at_ns = self.now_ns + round(self.ahead_s * SECOND)
        self.book.hear(Observation(rank=rank, step=step, at_ns=at_ns, body=body), self.now_ns)

    def go(self, seconds: float) -> None:
        """Time passes, and the coordinator looks."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + 0.5)
            seen = RanksSeen(self.phases, 0 if self.has_ended else 2, True, self.has_ended)
            self.book.look(self.now_ns, lambda seen=seen: seen, lambda: self.arrivals)

    def take(self, seconds: float, other: dict[str, float] | None = None, **phases: float) -> None:
        """One step of both ranks; `other` are the phases of rank 1 where they differ."""
        self.go(seconds)
        self.tell(0, step_done(seconds, **phases), self.step)
        self.tell(1, step_done(seconds, **(phases if other is None else other)), self.step)
        self.step += 1

    def end(self) -> None:
        for rank in (0, 1):
            self.tell(rank, exited())
        self.has_ended = True
        self.go(1.0)

    def parts(self) -> dict[str, float]:
        found = self.book.goodput(self.now_ns)
        assert math.isclose(found.wall_s, sum(found.parts.values()))
        return {name: round(seconds, 3) for name, seconds in found.parts.items() if round(seconds, 3)}


def started(**about: Any) -> Job:
    """Ten seconds of start, a first step of 6 s, then nine of 2 s."""
    job = Job(**about)
    job.go(10)
    job.phases = {Phase.FORWARD}
    job.go(6)
    for rank in (0, 1):
        job.tell(rank, step_done(14.0, attach=8.0), 0)
    job.step = 1
    for _ in range(9):
        job.take(2.0)
    return job


def test_a_start_and_the_first_steps_have_parts_of_their_own():
    job = started()
    assert {"start": 10.0, "compile": 4.0, "progress": 20.0} == job.parts()
    assert math.isclose(20 / 34, job.book.goodput(job.now_ns).ratio or 0.0)


def test_a_clock_that_is_ahead_changes_nothing():
    assert started().parts() == started(ahead_s=30.0).parts()


def test_what_happened_before_the_coordinator_was_there_counts():
    """On a busy machine it comes up ten seconds after its ranks, and is told of their steps all at once."""
    job = Job()
    job.book.hear(Observation(rank=0, step=0, at_ns=START - 10 * SECOND, body=attached(1)), START)
    job.go(1)
    for step, at_s in enumerate((-4.0, -3.0, -2.0, -1.0)):
        for rank in (0, 1):
            body = step_done(3.0, attach=1.0, other=1.0) if step == 0 else step_done(1.0)
            told = Observation(rank=rank, step=step, at_ns=START + round(at_s * SECOND), body=body)
            job.book.hear(told, job.now_ns)
    found = job.book.goodput(job.now_ns)
    assert 11.0 == round(found.wall_s, 3)
    assert 5.0 == round(found.parts["start"], 3)


def test_before_the_first_step_is_told_it_is_a_start_and_then_compiling():
    job = Job()
    job.go(10)
    assert {"start": 10.0} == job.parts()
    job.phases = {Phase.FORWARD}
    job.go(5)
    assert {"start": 10.0, "compile": 5.0} == job.parts()


def test_what_the_slowest_rank_waited_for_counts_though_the_other_waited_elsewhere():
    job = started()
    job.take(5.0, data=3.0, other={"backward": 4.0})
    job.take(9.0, checkpoint=4.0, other={"evaluation": 2.0})
    parts = job.parts()
    assert (3.0, 4.0, 2.0) == (parts["data"], parts["checkpoint"], parts["evaluation"])
    assert 25.0 == parts["progress"]


def test_a_policy_that_generates_at_every_step_evaluates_nothing_but_its_evaluation_is_one():
    job = started()
    for _ in range(20):
        job.take(3.0, evaluation=2.0)
    before = job.parts()
    assert before["evaluation"] <= 22.0, "until it is known what most steps do"
    job.take(3.0, evaluation=2.0)
    job.take(9.0, evaluation=8.0)
    assert before["evaluation"] + 6.0 == job.parts()["evaluation"]
    assert before["progress"] + 3.0 + 3.0 == job.parts()["progress"]


def test_a_step_that_takes_long_is_not_hung():
    job = started()
    job.take(60.0)
    assert 80.0 == job.parts()["progress"]
    assert "hung" not in job.parts()


def test_a_hang_counts_from_when_the_rank_last_moved_and_ends_when_it_moves():
    job = started()
    job.go(10)
    job.tell(1, overdue("overdue", waited_s=8.0))
    assert 8.0 == job.parts()["hung"]
    job.go(30)
    assert 38.0 == job.parts()["hung"]
    job.tell(1, overdue("moved"))
    job.tell(0, overdue("moved"))
    job.go(2)
    assert 38.0 == job.parts()["hung"]
    for rank in (0, 1):
        job.tell(rank, step_done(42.0), job.step)
    assert 38.0 == job.parts()["hung"]
    assert 24.0 == job.parts()["progress"]


def test_a_loader_that_gives_nothing_is_a_lack_of_data_for_those_too_that_wait_elsewhere():
    job = started()
    job.go(10)
    job.tell(1, overdue("overdue", waited_s=10.0, phase=Phase.DATA))
    job.tell(0, overdue("overdue", waited_s=9.0, phase=Phase.BACKWARD))
    job.go(10)
    assert (20.0, None) == (job.parts()["data"], job.parts().get("hung"))
    for rank in (0, 1):
        job.tell(rank, overdue("moved"))
    job.go(1)
    job.tell(0, step_done(21.0, backward=20.0), job.step)
    job.tell(1, step_done(21.0, data=20.0), job.step)
    assert (20.0, None) == (job.parts()["data"], job.parts().get("hung"))


def test_a_halt_is_held_until_the_ranks_end_and_then_down_until_they_come_back_and_redo():
    first = started()
    first.tell(0, Halting(state="held"))
    first.go(5)
    first.end()
    former = first.book.goodput(first.now_ns)
    assert (5.0, 10) == (round(former.parts["held"], 3), former.lives[0].steps)
    second = Job(base_step=8)
    second.now_s = first.now_s + 100.0
    second.book = WallTime(second.now_ns, lambda: 8)
    second.book.recall(former.lives)
    second.go(4)
    second.phases = {Phase.FORWARD}
    for _ in range(8):
        second.take(2.0)
    parts = second.parts()
    assert 100.0 == parts["down"]
    assert 4.0 == parts["redone"], "two steps of 2 s were done before"
    assert 2 == len(second.book.goodput(second.now_ns).lives)


def test_a_hang_that_ends_in_a_halt_is_hung_first_and_held_then():
    job = started()
    job.go(20)
    job.tell(1, overdue("overdue", waited_s=20.0))
    job.tell(0, Halting(state="held"))
    job.go(5)
    assert (20.0, 5.0) == (job.parts()["hung"], job.parts()["held"])


def test_who_waits_for_a_dead_rank_is_hung():
    job = started()
    job.tell(1, exited(None, 9))
    job.go(7)
    assert 7.0 == job.parts()["hung"]


def test_what_the_others_waited_for_the_latest_rank_is_told_later_and_moved_once():
    job = started()
    late = Arrival(rank=1, lag_s=1.5, group="default_pg", sequence=1, data_s=0.5, others_data_s=0.0)
    said = {"at_ns": 0, "num_ranks": 2, "num_calls": 1, "spread_s": 0.0, "error_s": 0.0, "usual_s": 0.0}
    job.arrivals = (StepArrivals(step=9, latest=(late,), **said),)
    job.go(4)
    parts = job.parts()
    assert 1.0 == parts["stragglers"], "what it spent on data is not told twice"
    assert 23.0 == parts["progress"]


def test_from_the_last_step_to_the_last_rank_it_is_the_end_and_then_nothing_counts():
    job = started()
    job.phases = {Phase.OTHER}
    job.go(3)
    job.end()
    whole = job.parts()
    assert 4.0 == whole["end"]
    job.go(50)
    assert whole == job.parts(), "a coordinator that lingers is no part of the run"


def test_ranks_that_come_anew_under_the_same_coordinator_are_another_life():
    job = started()
    for rank in (0, 1):
        job.tell(rank, attached(100 + rank))
    job.go(2)
    job.tell(0, attached(200))
    job.tell(1, attached(201))
    job.phases, job.step = {Phase.ATTACH}, 0
    job.go(5)
    job.phases = {Phase.FORWARD}
    for _ in range(3):
        job.take(2.0)
    parts, lives = job.parts(), job.book.goodput(job.now_ns).lives
    assert 2 == len(lives)
    assert parts["redone"] > 0


def test_a_coordinator_that_takes_over_goes_on_with_the_same_life():
    job = started()
    known = job.book.goodput(job.now_ns).lives
    again = Job()
    again.now_s, again.step, again.phases = job.now_s + 5, job.step, {Phase.FORWARD}
    again.book = WallTime(again.now_ns, lambda: 0)
    again.book.recall(known, is_same=True)
    again.take(2.0)
    found = again.book.goodput(again.now_ns)
    assert 1 == len(found.lives)
    assert math.isclose(41.0, found.wall_s, abs_tol=0.3)
    assert {"start": 10.0, "compile": 4.0} == {name: again.parts()[name] for name in ("start", "compile")}


def test_a_rank_that_says_nothing_is_not_waited_for():
    job = started()
    job.go(2)
    job.tell(0, step_done(2.0, data=1.0), job.step)
    assert "data" not in job.parts()
    job.go(LATE_NS / SECOND + 2)
    assert 1.0 == job.parts()["data"]


@pytest.mark.parametrize("seconds", [math.nan, -5.0, math.inf])
def test_times_that_cannot_be_are_no_times(seconds):
    job = started()
    job.take(2.0, data=seconds)
    parts = job.parts()
    assert all(0 <= value < 100 for value in parts.values())


def test_memory_does_not_grow_with_the_steps():
    job = started()
    for _ in range(MAX_KEPT * 2):
        job.now_s += 0.1
        for rank in (0, 1):
            job.tell(rank, step_done(0.1), job.step)
        job.step += 1
    assert len(job.book._kept) <= MAX_KEPT
    assert not job.book._open


BODIES = st.one_of(
    st.builds(
        step_done,
        st.floats(0, 20),
        attach=st.floats(0, 20),
        data=st.floats(0, 20),
        checkpoint=st.floats(0, 20),
        evaluation=st.floats(0, 20),
    ),
    st.builds(overdue, st.sampled_from(["suspect", "overdue", "moved"]), st.floats(0, 60), st.sampled_from(Phase)),
    st.builds(Halting, state=st.sampled_from(["held", "saving", "released", "asking"])),
    st.builds(exited, st.sampled_from([0, 1])),
    st.builds(attached, st.integers(1, 3)),
)
EVENTS = st.tuples(st.floats(0, 15), st.integers(0, 3), st.integers(0, 12), BODIES, st.sets(st.sampled_from(Phase)))


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENTS, max_size=40), st.booleans())
def test_the_parts_are_the_wall_time_whatever_is_told(events, has_ended):
    """Every second is in one part: by construction at each step, and together over lives and pauses."""
    job = Job()
    for pause_s, rank, step, body, phases in events:
        job.phases = phases
        job.go(pause_s)
        job.tell(rank, body, step)
        found = job.book.goodput(job.now_ns)
        assert math.isclose(job.now_s, sum(found.parts.values()), rel_tol=1e-6, abs_tol=1e-3)
        assert all(-1e-6 <= seconds for seconds in found.parts.values())
        assert set(PARTS) == set(found.parts)
    if has_ended:
        job.has_ended = True
        job.go(2)
        over = job.book.goodput(job.now_ns)
        job.go(30)
        assert over == job.book.goodput(job.now_ns)


@given(st.floats(0, 1e6), st.dictionaries(st.sampled_from(sorted(PARTS)), st.floats(allow_nan=True), max_size=5))
def test_a_stretch_is_divided_without_a_rest(took_s, lost):
    assert math.isclose(took_s, math.fsum(divide(took_s, lost, "progress").values()), rel_tol=1e-9, abs_tol=1e-9)


def test_in_words():
    lives = [
        Life(started_ns=0, until_ns=4000 * SECOND, steps=9, parts={"progress": 3000.0, "data": 990.0, "held": 10.0}),
        Life(started_ns=4000 * SECOND, until_ns=5000 * SECOND, parts={"progress": 1000.0}),
    ]
    assert "80 % of 1 h 23 min made progress (data 20 %)" == in_words(goodput(lives))
    assert "" == in_words(goodput([]))


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.0, 9.0), st.floats(0.0, 9.0)), min_size=4, max_size=4),
        min_size=1,
        max_size=5,
    ),
    order=st.permutations(range(4)),
    unsound=st.booleans(),
)
def test_steps_that_an_agent_joined_are_divided_as_the_ranks_own(
    steps: list[list[tuple[float, float, float]]],
    order: list[int],
    unsound: bool,  # noqa: FBT001
) -> None:
    by_itself, by_agent = WallTime(START), WallTime(START)
    for step, ranks in enumerate(steps):
        now_ns = START + (step + 1) * 30 * SECOND
        told = [
            (rank, now_ns - rank, step_done(seconds, data=a, other=b)) for rank, (seconds, a, b) in enumerate(ranks)
        ]
        told = [told[rank] for rank in order]
        if unsound:
            told[0] = (told[0][0], told[0][1], step_done(math.nan, data=1.0, other=0.0))
        for rank, at_ns, done in told:
            by_itself.hear(Observation(rank=rank, step=step, at_ns=at_ns, body=done), now_ns)
        by_agent.hear_joined(step, join(told), now_ns)
        for tally in (by_itself, by_agent):
            tally.look(now_ns, lambda: RanksSeen({Phase.DATA}, 4, is_complete=True, has_ended=False), is_final=True)
    assert by_itself.life(now_ns) == by_agent.life(now_ns)
