"""Names the call in which ranks differ and who left the pattern; quiet about everything that may differ."""

import signal
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from holter.diagnosis import rank_causes
from holter.faults import RankExit, StepView
from holter.faults.hangs.collective_mismatch import CollectiveMismatch
from holter.faults.shared.collectives import evidence, last_calls
from holter.faults.window import Arrival, CallCounts, ClassHistory, Delay, Examined, PartedBlock, StepArrivals
from holter.flight import BLOCK_CALLS, analyse
from holter.records import Call, Exam, ExamRequest, Exited, Finding, Flight, Group, Overdue, Phase
from made_up import made_window

SECOND = 1_000_000_000
NOW = 1_000 * SECOND

Program = Sequence[tuple[Any, ...]]
"""(operation, size, dtype), a call each, or a Call."""


def call(number: int, operation: str = "all_reduce", size: int = 100, dtype: str = "float32", **more: Any) -> Call:
    options = {"group": "0", "is_retired": True, "created_ns": NOW - (500 - number) * SECOND // 10} | more
    return Call(sequence=number, operation=operation, sizes=((size,),), dtypes=(dtype,), record=number, **options)


def flight(calls: Sequence[Call], groups: Sequence[Group] = (), taken_ns: int = NOW, ranks: int = 2) -> Flight:
    return Flight(
        groups=list(groups) or [Group("0", "default_pg", tuple(range(ranks)))], calls=list(calls), taken_ns=taken_ns
    )


def steps(num: int, per_step: Program = (("all_reduce", 100), ("all_reduce", 40), ("barrier", 1))) -> list[Call]:
    """A program that repeats."""
    called = [per_step[index % len(per_step)] for index in range(num)]
    return [call(number, *words) for number, words in enumerate(called, start=1)]


def with_last(calls: list[Call], *words: Any, **more: Any) -> list[Call]:
    return [*calls[:-1], call(calls[-1].sequence, *words, **{"is_retired": False} | more)]


def waiting(calls: list[Call]) -> list[Call]:
    last = calls[-1]
    return with_last(calls, last.operation, last.sizes[0][0], last.dtypes[0])


def exam(
    seen: Flight | None, *, reason: Any = "asked", asked_ns: int = NOW, step: int = 20, at_ns: int = NOW
) -> Examined:
    return Examined(step, at_ns, Exam(reason=reason, asked_ns=asked_ns if reason == "asked" else 0, flight=seen))


def ended(rank: int, by: int | None = signal.SIGABRT) -> RankExit:
    exited = Exited(
        pid=1, exit_code=None, signal=by, out_of_memory=False, last_step=20, last_phase=Phase.OTHER, farewell=None
    )
    return RankExit(rank, NOW, exited)


def late(step: int = 20) -> Delay:
    overdue = Overdue(tier="overdue", phase=Phase.FORWARD, micro_step=0, waited_s=9, deadline_s=6, because="")
    return Delay(step, NOW, overdue)


def judge(exams: Mapping[int, Examined | tuple[Examined, ...]], now_ns: int = NOW, **fields: Any) -> list[Finding]:
    known = {rank: seen if isinstance(seen, tuple) else (seen,) for rank, seen in exams.items()}
    ranks = fields.pop("ranks", max([*known, 1]) + 1)
    window = made_window(now_ns=now_ns, world_size=ranks, attached=frozenset(range(ranks)), exams=known, **fields)
    return list(CollectiveMismatch().judge(window))


def flown(programs: Mapping[int, Sequence[Call]]) -> dict[int, Examined]:
    return {rank: exam(flight(calls, ranks=len(programs))) for rank, calls in programs.items()}


def cause(finding: Finding) -> str:
    return rank_causes(finding)[0].cause


@pytest.mark.parametrize(
    ("words", "expected", "fact"),
    [
        (("all_reduce", 200), "collective_shape_mismatch", "is_shape"),
        (("all_reduce", 100, "int32"), "collective_dtype_mismatch", "is_dtype"),
        (("broadcast", 100), "collective_order_mismatch", "is_order"),
    ],
)
@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_one_of_four_that_calls_something_else_is_named(
    words: tuple[Any, ...], expected: str, fact: str, culprit: int
) -> None:
    usual = waiting(steps(31))
    programs = {rank: with_last(usual, *words) if rank == culprit else usual for rank in range(4)}
    (finding,) = judge(flown(programs), delays=dict.fromkeys(range(4), late()))
    assert (culprit,) == finding.ranks
    assert expected == cause(finding)
    assert finding.facts[fact] is True
    assert [True] == [
        value for name, value in finding.facts.items() if name in {"is_order", "is_shape", "is_dtype"} and value
    ]
    assert finding.facts["is_culprit_clear"] is True
    assert finding.collective is not None
    assert ("default_pg", 31, "all_reduce") == (
        finding.collective.group,
        finding.collective.sequence,
        finding.collective.operation,
    )
    assert "critical" == finding.severity
    assert (20, 20) == (finding.first_step, finding.detected_step)


def test_both_sizes_are_in_the_summary_and_in_the_evidence() -> None:
    usual = waiting(steps(31))
    (finding,) = judge(flown({0: usual, 1: with_last(usual, "all_reduce", 200), 2: usual}))
    assert (
        "Rank 1 called all_reduce float32 [200] where ranks 0 and 2 called all_reduce float32 [100]" in finding.summary
    )
    assert "number 31 of group default_pg" in finding.summary
    first = finding.evidence[0]
    assert [[[100]], [[200]]] == [side["sizes"] for side in first.values["sides"]]
    assert [[0, 2], [1]] == [side["ranks"] for side in first.values["sides"]]
    assert {0, 1, 2} == {one.values["rank"] for one in finding.evidence if one.kind == "last_collectives"}


def test_of_two_ranks_the_one_that_left_the_pattern_is_named() -> None:
    usual = waiting(steps(31))
    (finding,) = judge(flown({0: usual, 1: with_last(usual, "all_reduce", 200)}), delays={0: late(), 1: late()})
    assert (1,) == finding.ranks
    assert finding.facts["is_culprit_clear"] is True


def test_two_ranks_without_a_history_are_both_named() -> None:
    first = [call(1, is_retired=False)]
    (finding,) = judge(flown({0: first, 1: [call(1, "all_reduce", 200, is_retired=False)]}))
    assert (0, 1) == finding.ranks
    assert finding.facts["is_culprit_clear"] is False
    assert "[100]" in finding.summary
    assert "[200]" in finding.summary
    assert "collective_shape_mismatch" == cause(finding)
    assert rank_causes(finding)[0].confidence >= 0.9


def test_a_mismatch_that_fails_nowhere_is_said_to_run_on() -> None:
    usual = steps(40)
    odd = [call(c.sequence, "all_reduce", 100, "int32") if c.sequence == 31 else c for c in usual]
    views = tuple(StepView(step, NOW - (30 - step) * SECOND, 3, ()) for step in range(30))
    (finding,) = judge(flown({0: usual, 1: odd, 2: usual}), steps=views)
    assert finding.facts["is_running"] is True
    assert "the job goes on" in finding.summary
    assert "collective_dtype_mismatch" == cause(finding)
    # It was called 46.9 s ago: before the first step that is remembered had ended.
    assert (0, 29) == (finding.first_step, finding.detected_step)


def test_the_first_step_is_that_in_which_it_was_called() -> None:
    usual = steps(499)
    odd = [call(c.sequence, "all_reduce", 7) if c.sequence == 401 else c for c in usual]
    views = tuple(StepView(step, NOW - (30 - step) * SECOND, 3, ()) for step in range(30))
    exams = {rank: exam(flight(odd if rank == 1 else usual, ranks=3), step=29) for rank in range(3)}
    (finding,) = judge(exams, steps=views)
    assert 21 == finding.first_step
    shown = [one.values["calls"] for one in finding.evidence if one.kind == "last_collectives"]
    assert 3 == len(shown)
    assert all("#401 " in calls[-1] for calls in shown)


def test_the_exam_of_an_aborted_rank_and_that_of_its_survivor_tell_together() -> None:
    usual = waiting(steps(31))
    exams = {
        0: exam(flight(usual), reason="death", at_ns=NOW + 2 * SECOND),
        1: exam(flight(with_last(usual, "all_reduce", 200)), reason="last_breath"),
    }
    (finding,) = judge(exams, now_ns=NOW + 3 * SECOND, exits=(ended(1), ended(0, by=None)))
    assert (1,) == finding.ranks
    assert finding.facts["is_dead"] is True
    assert "collective_shape_mismatch" == cause(finding)


def test_when_a_rank_crashes_its_peers_are_read_while_they_are_there() -> None:
    usual = steps(20)
    breath = exam(flight(waiting(usual)), reason="last_breath")
    (question,) = judge({0: breath, 1: exam(flight(usual[:9]), reason="death", at_ns=NOW - SECOND)})
    assert (ExamRequest(NOW, "quick", (1,)),) == question.needs
    peer = exam(flight(with_last(usual, "all_reduce", 200)))
    (finding,) = judge({0: breath, 1: peer})
    assert "collective_shape_mismatch" == cause(finding)
    assert [] == judge({0: breath, 1: exam(None)}, exits=(ended(0),), now_ns=NOW + SECOND), "asked, and nothing found"
    assert [] == judge({0: breath}, now_ns=NOW + 10 * SECOND), "too late to ask"


def test_the_newest_copy_of_a_rank_counts() -> None:
    usual = waiting(steps(31))
    old = exam(flight(steps(28), taken_ns=NOW - 5 * SECOND), at_ns=NOW - 5 * SECOND)
    last = exam(flight(with_last(usual, "all_reduce", 200)), reason="last_breath")
    (finding,) = judge({0: (exam(flight(usual)),), 1: (old, last)}, exits=(ended(1),))
    assert (1,) == finding.ranks


def test_a_survivor_that_left_its_own_pattern_is_named_if_the_other_side_is_lost() -> None:
    odd = with_last(steps(31), "all_reduce", 200)
    exams = {0: exam(flight(odd), reason="death"), 1: exam(flight(steps(28), taken_ns=NOW - SECOND), reason="death")}
    (finding,) = judge(exams, exits=(ended(1),))
    assert (0,) == finding.ranks
    assert finding.facts["is_seen_on_both_sides"] is False
    first, second, *_ = rank_causes(finding)
    assert ("collective_shape_mismatch", "rank_dead") == (first.cause, second.cause)
    assert first.confidence < 0.7
    assert "all_reduce float32 [100]" in finding.summary
    assert "all_reduce float32 [200]" in finding.summary


def test_an_aborted_rank_that_left_its_own_pattern_is_named_if_its_peers_copies_are_too_old() -> None:
    odd = with_last(steps(31), "all_reduce", 50)
    exams = {
        0: exam(flight(steps(28), taken_ns=NOW - SECOND), reason="death"),
        1: exam(flight(odd), reason="last_breath"),
    }
    (finding,) = judge(exams, exits=(ended(1), ended(0, by=None)))
    assert (1,) == finding.ranks
    assert "collective_shape_mismatch" == cause(finding)
    assert "all_reduce float32 [100]" in finding.summary
    assert "all_reduce float32 [50]" in finding.summary


def test_timed_calls_tell_the_step_better_than_reports() -> None:
    usual = steps(499)
    odd = [call(c.sequence, "all_reduce", 7) if c.sequence == 401 else c for c in usual]
    late_ones = [Arrival(0, 0.1, "0", 16 * step + 3, 0.0, 0.0) for step in range(30)]
    arrivals = tuple(StepArrivals(step, NOW, 3, 1, (one,), 0.0, 0.0) for step, one in enumerate(late_ones))
    exams = {rank: exam(flight(odd if rank == 1 else usual, ranks=3), step=29) for rank in range(3)}
    (finding,) = judge(exams, arrivals=arrivals)
    assert 24 == finding.first_step


@pytest.mark.parametrize(
    ("survivor", "by"),
    [
        (waiting(steps(31)), signal.SIGABRT),
        (with_last(steps(31), "all_reduce", 200), signal.SIGKILL),
        (with_last(steps(31), "broadcast", 100), signal.SIGABRT),
        (waiting([call(n, "all_reduce", n) for n in range(1, 32)]), signal.SIGABRT),
    ],
    ids=["usual call", "killed", "another part of the script", "sizes vary from step to step"],
)
def test_a_death_alone_is_no_mismatch(survivor: list[Call], by: int) -> None:
    dead = [call(c.sequence, c.operation, c.sizes[0][0]) for c in survivor[:28]]
    exams = {0: exam(flight(survivor), reason="death"), 1: exam(flight(dead, taken_ns=NOW - SECOND), reason="death")}
    assert [] == judge(exams, exits=(ended(1, by),))


def test_a_call_left_out_of_which_a_rank_died_is_named() -> None:
    usual = waiting(steps(31))
    skipped = [*usual[:-1], call(31, "all_reduce", 40, is_retired=False)]
    exams = {0: exam(flight(usual), reason="death"), 1: exam(flight(skipped), reason="last_breath")}
    (finding,) = judge(exams, exits=(ended(0), ended(1, by=None)))
    assert (1,) == finding.ranks
    assert "rank_missing_from_collective" == cause(finding)
    assert [] == [one for one in judge(exams, delays={0: late(), 1: late()}) if not one.needs]


def test_ranks_that_wait_for_each_other_in_two_groups_called_in_another_order() -> None:
    groups = [Group("a", "first", (0, 1, 2)), Group("b", "second", (0, 1, 2))]
    programs = {rank: [call(1, group="b" if rank == 1 else "a", is_retired=False)] for rank in range(3)}
    exams = {rank: exam(flight(calls, groups)) for rank, calls in programs.items()}
    (finding,) = judge(exams, delays=dict.fromkeys(range(3), late()))
    assert (1,) == finding.ranks
    assert "collective_order_mismatch" == cause(finding)
    assert "of group first" in finding.summary
    assert "of group second" in finding.summary
    assert [] == judge(exams)


def test_two_orders_of_which_none_is_known_to_be_right_are_a_mismatch_when_somebody_is_overdue() -> None:
    exams = flown({0: [call(1, is_retired=False)], 1: [call(1, "broadcast", is_retired=False)]})
    assert [] == judge(exams)
    (finding,) = judge(exams, delays={0: late()})
    assert ("collective_order_mismatch", (0, 1)) == (cause(finding), finding.ranks)
    (finding,) = judge(exams, exits=(ended(1),))
    assert "collective_order_mismatch" == cause(finding)


STEP = (("all_reduce", 100), ("all_reduce", 40), ("barrier", 1))


def timed(*last: tuple[str, int]) -> list[Call]:
    """Twenty steps with a long pause at their beginnings, and what came then; the very last is not over."""
    made = [*STEP * 20, *last]
    return [
        call(n, *words, created_ns=NOW - (90 - n // 3) * SECOND + n % 3 * SECOND // 100, is_retired=n < len(made) - 1)
        for n, words in enumerate(made)
    ]


def test_two_calls_that_are_merely_swapped_are_an_order_mismatch_and_a_call_left_out_is_considered() -> None:
    programs = {0: timed(STEP[0], STEP[1]), 1: timed(STEP[0], STEP[2])}
    (finding,) = judge(flown(programs), delays={0: late(), 1: late()})
    assert (1,) == finding.ranks
    first, second = rank_causes(finding)
    assert ("collective_order_mismatch", "rank_missing_from_collective") == (first.cause, second.cause)
    assert first.confidence >= 0.9
    assert second.confidence < 0.6


def counted(num_steps: int, left_out: int) -> tuple[CallCounts, ...]:
    """One call a step; rank 1 leaves one out."""
    return tuple(
        CallCounts(step, {step: (0, 1)} if step < left_out else {step: (0,), step - 1: (1,)})
        for step in range(num_steps)
    )


def test_a_lone_call_left_out_long_ago_is_found_when_the_programs_end() -> None:
    alike = [call(n) for n in range(50)]
    programs = {0: [*alike, call(50, is_retired=False)], 1: [*alike, call(50, "barrier", is_retired=False)]}
    delays = {0: late(50), 1: late(50)}
    (finding,) = judge(flown(programs), delays=delays, counts={"0": counted(50, left_out=25)})
    assert ("rank_missing_from_collective", (1,), 25) == (cause(finding), finding.ranks, finding.first_step)
    assert "Rank 1 left out one call of group default_pg in step 25" in finding.summary
    assert "all_reduce" == finding.collective.operation
    # The same end, with as many calls up to there: it went another way only now.
    (finding,) = judge(flown(programs), delays=delays, counts={"0": counted(50, left_out=99)})
    assert "collective_order_mismatch" == cause(finding)


def test_a_round_left_out_long_ago_is_the_same_fault_when_the_programs_end() -> None:
    alike = [call(n) for n in range(500, 600)]
    programs = {0: [*alike, call(600, is_retired=False)], 1: [*alike, call(600, "barrier", is_retired=False)]}
    told = rounds(38, left_out=25)
    # A rank that was held meanwhile.
    told = (*told, CallCounts(38, {577: (0,), 570: (1,)}), CallCounts(39, {600: (0,), 585: (1,)}))
    (finding,) = judge(flown(programs), delays={0: late(40), 1: late(40)}, counts={"0": told})
    assert ("rank_missing_from_collective", (1,), 25) == (cause(finding), finding.ranks, finding.first_step)


def parted_at(step: int) -> dict[str, Any]:
    """Gradients that were equal after each reduction, up to one step."""
    view = StepView(step, NOW, 2, (), roots={"gradients": {1: (0,), 2: (1,)}})
    return {"steps": (view,), "classes": {"gradients": ClassHistory(0, True, step - 1, step, step, 1)}}


def rounds(num_steps: int, left_out: int, per_step: int = 15) -> tuple[CallCounts, ...]:
    """So many calls a step; rank 1 leaves a whole step's out, and tells nothing of that step."""
    return tuple(
        CallCounts(
            step,
            {per_step * (step + 1): (0, 1)}
            if step < left_out
            else {per_step * (step + 1): (0,)} | ({per_step * step: (1,)} if step > left_out else {}),
        )
        for step in range(num_steps)
    )


def test_a_whole_round_left_out_is_found_by_its_count_where_replicas_part_with_it() -> None:
    told, parted = {"0": rounds(28, left_out=25)}, parted_at(25)
    (question,) = judge({}, counts=told, **parted)
    assert (ExamRequest(NOW, "quick", (0, 1)),) == question.needs
    exams = flown(
        {0: [call(n, size=n % 15 + 1) for n in range(300, 405)], 1: [call(n, size=n % 15 + 1) for n in range(300, 390)]}
    )
    (finding,) = judge(exams, counts=told, **parted)
    top = rank_causes(finding)[0]
    assert ("rank_missing_from_collective", (1,), 25) == (top.cause, top.ranks, finding.first_step)
    assert top.confidence > 0.9
    assert ("default_pg", 376, "all_reduce") == (
        finding.collective.group, finding.collective.sequence, finding.collective.operation,
    )  # fmt: skip
    assert "Rank 1 left out 15 calls of group default_pg in step 25" in finding.summary
    assert "Nothing failed: the job goes on" in finding.summary


@pytest.mark.parametrize(
    ("told", "parted"),
    [
        # Counts alone: calls may be counted to another step here than there.
        (rounds(40, left_out=25), {}),
        # Replicas that had parted before.
        (rounds(40, left_out=25), parted_at(20)),
        # All called as many.
        (rounds(40, left_out=99), parted_at(25)),
        # Nobody left anything out: rank 0 called twice as many in one step.
        (tuple(CallCounts(n, {n: (0, 1)} if n < 25 else {n + 1: (0,), n: (1,)}) for n in range(40)), parted_at(25)),
    ],
)
def test_counts_that_prove_nothing_left_out_say_nothing(told: tuple[CallCounts, ...], parted: dict[str, Any]) -> None:
    assert [] == judge({}, counts={"0": told}, **parted)


def test_the_step_of_a_call_that_has_passed_is_told_by_the_counts() -> None:
    usual = steps(90)
    odd = [call(c.sequence, "all_reduce", 100, "int32") if c.sequence == 31 else c for c in usual]
    told = tuple(CallCounts(step, {3 * step + 2: (0, 1, 2)}) for step in range(25))
    (finding,) = judge(flown({0: usual, 1: odd, 2: usual}), counts={"0": told})
    assert 10 == finding.first_step


def test_a_message_whose_ends_differ_names_both() -> None:
    def end(operation: str, size: int) -> list[Call]:
        return [call(n, operation, 64 if n < 9 else size, group="pp", is_p2p=True) for n in range(1, 10)]

    groups = [Group("pp", "pipeline", (0, 1))]
    exams = {0: exam(flight(end("send 0->1", 64), groups)), 1: exam(flight(end("recv 1<-0", 32), groups))}
    (finding,) = judge(exams)
    assert (0, 1) == finding.ranks
    assert "collective_shape_mismatch" == cause(finding)
    assert [[0], [1]] == [side["ranks"] for side in finding.evidence[0].values["sides"]]


def healthy() -> dict[str, dict[int, list[Call]]]:
    def varied(operation: str, *, uneven: bool) -> dict[int, list[Call]]:
        return {rank: [call(n, operation, n * 7 % 13 + (rank + 1) * uneven) for n in range(1, 40)] for rank in range(4)}

    messages = {
        rank: [
            call(n, "send 0->1" if rank % 2 else "recv 1<-0", 10 + rank, is_p2p=True, group="pp") for n in range(1, 40)
        ]
        for rank in range(4)
    }
    own = {
        rank: [
            call(n, ("all_reduce", "broadcast", "all_gather", "barrier")[rank], group=f"own{rank}") for n in range(40)
        ]
        for rank in range(4)
    }
    return {
        "uneven all_to_all": varied("all_to_all", uneven=True),
        "gather": varied("gather", uneven=True),
        "scatter": varied("scatter", uneven=True),
        "messages": messages,
        "a group for each rank": own,
        "copies of different moments": {rank: steps(20 + 5 * rank) for rank in range(4)},
        "recorders that begin elsewhere": {rank: steps(60)[10 * rank :] for rank in range(4)},
        "sizes that vary alike": varied("all_reduce", uneven=False),
    }


@pytest.mark.parametrize("what", healthy())
def test_what_may_differ_is_not_a_mismatch(what: str) -> None:
    programs = healthy()[what]
    names = sorted({one.group for calls in programs.values() for one in calls})
    exams = {
        rank: exam(flight(calls, [Group(n, n) for n in names if any(one.group == n for one in calls)]))
        for rank, calls in programs.items()
    }
    assert [] == judge(exams)
    assert [] == judge(exams, delays={1: late()})


def test_a_rank_that_has_not_entered_yet_is_no_mismatch() -> None:
    exams = flown({0: waiting(steps(31)), 1: steps(30), 2: waiting(steps(31))})
    assert [] == judge(exams, delays=dict.fromkeys(range(3), late()))


def test_groups_of_one_name_and_other_members_are_not_compared() -> None:
    exams = {}
    for rank in range(4):
        group = Group("7", "tp", (0, 1) if rank < 2 else (2, 3))
        calls = [call(n, "all_reduce", 100 if rank < 2 else 64, group="7") for n in range(1, 30)]
        exams[rank] = exam(flight(calls, [group]))
    assert [] == judge(exams)


def test_copies_of_another_time_are_not_compared() -> None:
    usual = waiting(steps(31))
    old = exam(flight(with_last(usual, "all_reduce", 200), taken_ns=NOW - 500 * SECOND), at_ns=NOW - 500 * SECOND)
    assert [] == judge({0: exam(flight(usual)), 1: old})
    assert [] == judge({0: exam(flight(usual)), 1: exam(flight(with_last(usual, "all_reduce", 200)))}, now_ns=2 * NOW)


PARTED = PartedBlock("0", 0, NOW - SECOND, {5: (0, 2), 9: (1,)})


def test_digests_that_differ_ask_for_the_recorders_of_all_ranks() -> None:
    (finding,) = judge({}, parted=(PARTED,), ranks=3)
    assert (ExamRequest(NOW - SECOND, "quick", (0, 1, 2)),) == finding.needs


def test_of_many_ranks_some_of_each_digest_are_asked_for() -> None:
    parted = PartedBlock("0", 0, NOW, {5: tuple(range(64)), 9: (900, 901), 11: (77,)})
    (finding,) = judge({}, parted=(parted,), ranks=1000)
    (request,) = finding.needs
    assert isinstance(request, ExamRequest)
    assert 64 == len(set(request.ranks))
    assert {77, 900, 901} <= set(request.ranks)


def test_a_dead_rank_is_not_asked_for() -> None:
    (finding,) = judge({}, parted=(PARTED,), ranks=3, exits=(ended(2, by=None),))
    assert (0, 1) == finding.needs[0].ranks


def test_recorders_that_were_read_show_the_call_behind_the_digests() -> None:
    usual = steps(80)
    odd = [call(c.sequence, "all_reduce", 100, "int32") if c.sequence == 31 else c for c in usual]
    (finding,) = judge(flown({0: usual, 1: odd, 2: usual}), parted=(PARTED,))
    assert () == finding.needs
    assert (1,) == finding.ranks
    assert "digest" in {one.kind for one in finding.evidence}


def test_digests_of_calls_that_nobody_holds_any_more_are_a_warning_with_all_three_causes() -> None:
    late_calls = steps(400)[300:]
    exams = {rank: exam(flight(late_calls, ranks=3), asked_ns=PARTED.at_ns) for rank in range(3)}
    (finding,) = judge(exams, parted=(PARTED,))
    assert ("warning", (1,)) == (finding.severity, finding.ranks)
    assert 3 == len(rank_causes(finding))
    assert all(one.confidence < 0.7 for one in rank_causes(finding))
    assert f"calls 0 to {BLOCK_CALLS - 1} of group default_pg" in finding.summary


def test_what_was_read_when_the_digests_parted_counts_after_the_recorders_have_gone_on() -> None:
    usual = steps(80)
    odd = [call(c.sequence, "all_reduce", 100, "int32") if c.sequence == 31 else c for c in usual]
    then = {rank: exam(flight(odd if rank == 1 else usual, ranks=3), asked_ns=PARTED.at_ns) for rank in range(3)}
    later = exam(flight(steps(400)[300:], ranks=3), reason="death")
    (before,) = judge(then, parted=(PARTED,))
    (after,) = judge({rank: (seen, later) for rank, seen in then.items()}, parted=(PARTED,))
    assert (before.ranks, before.collective, cause(before)) == (after.ranks, after.collective, cause(after))
    # Nobody knows any more whether they were read in time.
    assert [] == judge(dict.fromkeys(range(3), later), parted=(PARTED,), unexamined=dict.fromkeys(range(3), NOW))


def test_digests_of_groups_that_are_not_one_say_nothing() -> None:
    parted = PartedBlock("7", 0, NOW - SECOND, {5: (0, 1), 9: (2, 3)})
    exams = {
        rank: exam(flight(steps(400)[300:], [Group("7", "tp", (0, 1) if rank < 2 else (2, 3))]), asked_ns=parted.at_ns)
        for rank in range(4)
    }
    assert [] == judge(exams, parted=(parted,))


def test_digests_that_the_recorders_refute_say_nothing() -> None:
    exams = {rank: exam(flight(steps(80), ranks=3), asked_ns=PARTED.at_ns) for rank in range(3)}
    assert [] == judge(exams, parted=(PARTED,))


def test_a_rank_that_cannot_be_examined_is_not_waited_for() -> None:
    usual = steps(80)
    odd = [call(c.sequence, "all_reduce", 9) if c.sequence == 31 else c for c in usual]
    exams = flown({0: usual, 1: odd})
    (finding,) = judge(exams, parted=(PARTED,), unexamined={2: NOW}, ranks=3)
    assert () == finding.needs


@pytest.mark.parametrize(("field", "value"), [("together_s", 0), ("memory_s", -1), ("max_examined", 1)])
def test_a_setting_that_cannot_be_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"collective_mismatch.{field}"):
        CollectiveMismatch(**{field: value})


def test_last_calls_are_lines_with_the_newest_at_the_bottom() -> None:
    shown = last_calls(1, flight(waiting(steps(31))), limit=2)
    assert "last_collectives" == shown.kind
    assert "rank 1" in shown.summary
    assert "not over" in shown.summary
    first, second = shown.values["calls"]
    assert first.startswith("default_pg  #30")
    assert "barrier" in first
    assert second.startswith("default_pg  #31")
    assert "all_reduce float32 [100]" in second
    assert "  open  -46.9 s" in second
    assert last_calls(0, flight([])).values == {"rank": 0, "calls": []}


def test_who_waits_for_whom_is_told_first_and_last_calls_follow() -> None:
    flights = {rank: flight(steps(30) if rank == 1 else waiting(steps(31)), ranks=4) for rank in range(4)}
    first, *rest = evidence(analyse(flights, 4), (1,), flights)
    assert (
        "ranks 0, 2 and 3 wait in all_reduce float32 [100], number 31 of group default_pg; rank 1 has not entered it"
        == first.summary
    )
    assert [1] == first.values["absent"]
    assert ["last_collectives"] == [one.kind for one in rest]


def test_each_side_s_own_line_in_the_script_is_shown():
    mine, theirs = ("/home/me/train.py:41 in total", "/home/me/train.py:80 in main"), ("/home/me/train.py:45 in best",)
    calls = {
        0: waiting(steps(30)),
        1: with_last(steps(30), "broadcast", 1),
    }
    lined = {
        rank: [*called[:-1], msgspec.structs.replace(called[-1], lines=mine if rank == 0 else theirs)]
        for rank, called in calls.items()
    }
    # The newest copy of a rank that has ended has none.
    exams = {rank: (exam(flight(lined[rank])), exam(flight(calls[rank]), at_ns=NOW + 1)) for rank in calls}
    (finding,) = judge(exams, delays={0: late(), 1: late()})
    sites = [proof for proof in finding.evidence if proof.kind == "script_line"]
    assert [
        "rank 0 called barrier float32 [1] at /home/me/train.py:41 in total, called from /home/me/train.py:80 in main",
        "rank 1 called broadcast float32 [1] at /home/me/train.py:45 in best",
    ] == [proof.summary for proof in sites]
    assert ("/home/me/train.py", 41) == (sites[0].values["file"], sites[0].values["line"])
