"""Random programs of collectives over random groups, one rank deviates: it is found, whatever it did, or nobody could have told."""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.flight.simulator import Groups, Job, Planned, Program, deviated, programs

from holter.flight import Analysis, Deviation, analyse
from holter.flight.deviations import MIN_CONTEXT

STEPS = 5
FAULTS = ["skip", "extra", "shape", "dtype", "swap", "stop"]
KINDS = {"skip": "missing", "extra": "extra", "shape": "shape", "dtype": "dtype", "swap": "order"}

thorough = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
brief = settings(thorough, max_examples=50)


@dataclass(frozen=True)
class Case:
    groups: Groups
    step: Program
    rank: int
    at: int
    fault: str
    extra: Planned
    seed: int
    mismatch_hangs: bool

    @property
    def healthy(self) -> dict[int, Program]:
        return programs(self.groups, self.step, STEPS)

    def step_length(self, rank: int, group: str = "") -> int:
        return len([one for one in self.step if rank in self.groups[one.group] and group in {"", one.group}])


@st.composite
def cases(draw: st.DrawFn, low: int = 2, high: int = 8) -> Case:
    everyone = tuple(range(draw(st.integers(low, high))))
    subsets = (
        st.lists(st.sampled_from(everyone), min_size=2, max_size=len(everyone), unique=True).map(sorted).map(tuple)
    )
    groups = {"0": everyone, **{str(9 + i): subset for i, subset in enumerate(draw(st.lists(subsets, max_size=3)))}}
    planned = st.builds(
        Planned,
        group=st.sampled_from(sorted(groups)),
        operation=st.sampled_from(["all_reduce", "all_gather", "broadcast"]),
        size=st.sampled_from([1, 100, 2000]),
        dtype=st.sampled_from(["float32", "int64"]),
    )
    step = draw(st.lists(planned, min_size=1, max_size=6))
    rank = draw(st.sampled_from(sorted({rank for one in step for rank in groups[one.group]})))
    length = len(programs(groups, step, STEPS)[rank])
    own = st.sampled_from([name for name, members in groups.items() if rank in members])
    return Case(
        groups=groups,
        step=step,
        rank=rank,
        at=draw(st.integers(0, length - 1)),
        fault=draw(st.sampled_from(FAULTS)),
        extra=Planned(draw(own), draw(st.sampled_from(["all_reduce", "all_gather"])), draw(st.sampled_from([1, 333]))),
        seed=draw(st.integers(0, 1000)),
        mismatch_hangs=draw(st.booleans()),
    )


def ended(case: Case) -> Job:
    """The job as it stands when nothing moves any more."""
    ranks = case.healthy
    ranks[case.rank] = deviated(ranks[case.rank], case.fault, case.at, case.extra)
    job = Job(case.groups, ranks, case.seed, mismatch_hangs=case.mismatch_hangs)
    job.run()
    return job


def mismatches(job: Job) -> list[tuple[str, int]]:
    """Calls in which ranks did different things."""
    return sorted(
        (call for call, present in job.present.items() if len(set(present.values())) > 1), key=lambda call: call[1]
    )


def has_history(num_before: int, period: int) -> bool:
    """Two whole steps, so that the third can be foretold."""
    return num_before >= 2 * period and num_before - period >= MIN_CONTEXT


def is_decidable(case: Case, job: Job, deviation: Deviation) -> bool:
    """The records tell who deviated: the others are more, or the calls before make a history."""
    if mismatches(job):
        first = next(call for call in mismatches(job) if call[0] == deviation.group)
        period = case.step_length(case.rank, deviation.group)
        return len(job.present[first]) > 2 or has_history(first[1] - 1, period)
    return all(
        has_history(len(job.ranks[rank].calls) - 1, case.step_length(rank))
        for rank in deviation.ranks + deviation.others
    )


def possible_kinds(case: Case, job: Job, group: str = "") -> set[str]:
    """Every single fault that would have left these very records of the rank behind, in one group or over all."""
    # As if the job had gone on: the records do not say which step was to be the last.
    planned = [one for one in case.healthy[case.rank] * 3 if group in {"", one.group}]
    program = deviated(case.healthy[case.rank], case.fault, case.at, case.extra)
    seen = [one for one in program[: job.ranks[case.rank].position] if group in {"", one.group}]
    at = next((i for i, pair in enumerate(zip(seen, planned, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return set()
    called, rest = seen[at:], planned[at:]

    def fits(some: Program, other: Program) -> bool:
        num = min(len(some), len(other))
        return num > 0 and some[:num] == other[:num]

    kinds = {"missing" for by in range(1, len(rest)) if fits(called, rest[by:])}
    kinds |= {"extra" for by in range(1, len(called)) if fits(called[by:], rest)}
    if called[:2] == rest[1::-1][: len(called)] and (len(called) <= 2 or fits(called[2:], rest[2:])):
        kinds.add("order")
    if len(called) == 1 or called[1:] == rest[1 : len(called)]:
        same = called[0].operation == rest[0].operation and called[0].group == rest[0].group
        kinds.add("order" if not same else "dtype" if called[0].dtype != rest[0].dtype else "shape")
    if len(called) == 1:
        kinds.add(KINDS[case.fault])
    return kinds


def check_found(case: Case, job: Job, analysis: Analysis) -> None:
    for deviation in analysis.deviations:
        if deviation.is_clear:
            assert deviation.ranks == (case.rank,)
        else:
            assert case.rank in deviation.ranks
            assert not is_decidable(case, job, deviation)
    clear = [deviation for deviation in analysis.deviations if deviation.is_clear]
    if not analysis.deviations:
        assert analysis.culprits == (case.rank,)
    for deviation in clear:
        if is_decidable(case, job, deviation) and has_history(
            job_position(case, job, deviation), period(case, deviation)
        ):
            kinds = possible_kinds(case, job, deviation.group) | possible_kinds(case, job)
            assert deviation.kind in kinds


def job_position(case: Case, job: Job, deviation: Deviation) -> int:
    return deviation.sequence - 1 if mismatches(job) else job.ranks[case.rank].position - 1


def period(case: Case, deviation: Deviation) -> int:
    return case.step_length(case.rank, deviation.group)


def is_ahead_unseen(case: Case, job: Job) -> bool:
    """All calls were alike, and the rank is in one more, in which it waits for ranks that are through: it might as well be early."""
    inside = job.ranks[case.rank].inside
    if case.fault != "extra" or mismatches(job) or inside is None:
        return False
    return set(job.groups[inside[0]]) - job.present[inside].keys() <= job.finished


@thorough
@given(cases())
def test_the_deviating_rank_is_found(case):
    job = ended(case)
    analysis = analyse(job.flights(), len(job.ranks))
    if job.finished == set(job.ranks) and not mismatches(job):
        assert (analysis.deviations, analysis.culprits, analysis.waits) == ((), (), ())
    elif is_ahead_unseen(case, job):
        assert analysis.blocking is not None
        assert case.rank in analysis.blocking.entered
        assert set(analysis.culprits) == set(analysis.blocking.absent) <= job.finished
        assert analysis.deviations == ()
    else:
        check_found(case, job, analysis)


@pytest.mark.slow
@thorough
@given(cases(), st.integers(0, 400), st.data())
def test_nothing_deviates_at_any_moment_of_a_healthy_run(case, num_moves, data):
    job = Job(case.groups, case.healthy, case.seed)
    job.run(num_moves)
    flights = {}
    for rank in data.draw(st.permutations(sorted(job.ranks))):
        flights[rank] = job.flight(rank)
        job.run(data.draw(st.integers(0, 5)))
    analysis = analyse(flights, len(flights))
    assert analysis.deviations == ()
    if job.finished == set(job.ranks):
        assert analyse(job.flights(), len(flights)).culprits == ()


@brief
@given(cases(2, 2))
def test_two_ranks_without_history_are_both_possible(case):
    """In the first step of a program that calls nothing twice, a difference has two sides and no majority."""
    step = [Planned("0", size=size) for size in range(1, 6)]
    bare = Case({"0": (0, 1)}, step, case.rank, case.at % 5, "shape", case.extra, case.seed, case.mismatch_hangs)
    (deviation,) = analyse(ended(bare).flights(), 2).deviations
    assert (deviation.is_clear, deviation.ranks, deviation.others) == (False, (0, 1), ())
    assert (deviation.kind, deviation.sequence) == ("shape", bare.at + 1)


@brief
@given(cases(2, 2))
def test_two_ranks_with_a_history_are_not(case):
    step = [Planned("0", size=size) for size in range(1, 6)]
    bare = Case({"0": (0, 1)}, step, case.rank, 10 + case.at % 5, "skip", case.extra, case.seed, case.mismatch_hangs)
    (deviation,) = analyse(ended(bare).flights(), 2).deviations
    assert (deviation.is_clear, deviation.ranks, deviation.others) == (True, (case.rank,), (1 - case.rank,))
    assert (deviation.kind, deviation.sequence, deviation.operation) == ("missing", bare.at + 1, "all_reduce")
