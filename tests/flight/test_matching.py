"""Who waits for whom, by hand: recorded NCCL traces, nested groups, copies of different age, circles, scale."""

import json
import time
from pathlib import Path

import msgspec
import pytest
from tests.flight.simulator import Job, Planned, programs

from holter.flight import analyse, from_json, trimmed, with_members
from holter.records import Call, Flight, Group

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "nccl_traces"
SECOND_NS = 1_000_000_000


def call(group: str, sequence: int, *, over: bool = True, size: int = 10, at_s: float = 1.0, record: int = -1) -> Call:
    record = sequence if record < 0 else record
    return Call(group, sequence, "all_reduce", ((size,),), ("float32",), int(at_s * SECOND_NS), over, record=record)


def flight(*calls: Call, groups: dict[str, tuple[int, ...]] | None = None, taken_s: float = 100.0) -> Flight:
    listed = groups if groups is not None else {"0": ()}
    return Flight(
        groups=[Group(name, "default_pg" if name == "0" else "", ranks) for name, ranks in listed.items()],
        calls=list(calls),
        taken_ns=int(taken_s * SECOND_NS),
    )


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"recorded NCCL traces are not at {TRACES}")
@pytest.mark.parametrize("is_trimmed", [False, True])
@pytest.mark.parametrize("scenario", ["gpu_error_2nd", "lock_gil_1st"])
def test_exactly_the_faulty_ranks_of_a_recorded_megatron_job(scenario, is_trimmed):
    truth = json.loads((TRACES / scenario / "truth.json").read_text())
    flights = {
        rank: from_json((TRACES / scenario / f"rank_{rank:02}.json").read_bytes(), 0)
        for rank in range(truth["world_size"])
    }
    if is_trimmed:
        flights = {rank: trimmed(flight, rank) for rank, flight in flights.items()}
    analysis = analyse(flights, truth["world_size"])
    assert analysis.culprits == tuple(truth["faulty_ranks"])
    assert analysis.deviations == ()
    assert analysis.victims == tuple(sorted(set(range(16)) - {9, 14}))
    assert analysis.blocking is not None
    assert (analysis.blocking.description, analysis.blocking.absent) == ("EXPERT_MODEL_PARALLEL_GROUP", (9, 14))


def test_the_rank_that_has_not_entered_what_the_others_are_in():
    waiting = flight(call("0", 1), call("0", 2, over=False, at_s=5))
    analysis = analyse({0: waiting, 1: flight(call("0", 1)), 2: waiting}, 3)
    assert (analysis.culprits, analysis.victims, analysis.matched) == ((1,), (0, 2), {"0": 1})
    assert analysis.blocking is not None
    assert (analysis.blocking.sequence, analysis.blocking.operation) == (2, "all_reduce")
    assert (analysis.blocking.entered, analysis.blocking.absent) == ((0, 2), (1,))


def test_waits_are_followed_through_nested_groups():
    """Ranks 0 and 1 wait for 2, which waits for 3 in another group, which waits for nobody."""
    outer, inner = {"0": (), "7": (2, 3)}, {"0": ()}
    analysis = analyse(
        {
            0: flight(call("0", 1, over=False), groups=inner),
            1: flight(call("0", 1, over=False), groups=inner),
            2: flight(call("7", 1, over=False), groups=outer),
            3: flight(groups=outer),
        },
        4,
    )
    assert (analysis.culprits, analysis.victims) == ((3,), (0, 1, 2))
    assert {wait.absent for wait in analysis.waits} == {(2, 3), (3,)}


def test_a_rank_without_a_recorder_is_unknown_and_named_only_if_nobody_else_is():
    waiting = flight(call("0", 1, over=False))
    assert analyse({0: waiting, 1: waiting}, 3).culprits == (2,)
    analysis = analyse({0: waiting, 1: flight(call("0", 0))}, 3)
    assert (analysis.culprits, analysis.unknown) == ((1,), (2,))


def test_a_rank_is_not_called_absent_for_what_it_may_have_entered_after_its_last_copy():
    waiting = flight(call("0", 1), call("0", 2, over=False, at_s=50))
    dead = flight(call("0", 1), taken_s=40)
    analysis = analyse({0: waiting, 1: dead, 2: flight(call("0", 1))}, 3)
    assert (analysis.culprits, analysis.outdated) == ((2,), (1,))
    alone = analyse({0: waiting, 1: dead, 2: waiting}, 3)
    assert (alone.culprits, alone.outdated, alone.deviations) == ((1,), (1,), ())


def test_a_dead_ranks_old_copy_is_compared_as_far_as_it_goes():
    living = flight(*(call("0", number, size=number % 3) for number in range(40)))
    dead = flight(*(call("0", number, size=number % 3) for number in range(30)), taken_s=40)
    assert analyse({0: living, 1: dead}, 2).deviations == ()
    other = flight(*(call("0", number, size=9 if number == 29 else number % 3) for number in range(30)), taken_s=40)
    (deviation,) = analyse({0: living, 1: other}, 2).deviations
    assert (deviation.kind, deviation.ranks, deviation.sequence) == ("shape", (1,), 29)


def test_recorders_that_hold_different_ranges_are_compared_where_both_hold_calls():
    job = Job({"0": (0, 1, 2)}, programs({"0": (0, 1, 2)}, [Planned("0", size=size) for size in range(5)], 20))
    job.run()
    flights = {rank: job.flight(rank, newest=newest) for rank, newest in ((0, 100), (1, 10), (2, 3))}
    analysis = analyse(flights, 3)
    assert (analysis.deviations, analysis.matched) == ((), {"0": 100})


def test_members_that_nobody_says_are_those_who_call_in_the_group():
    """As on gloo, where only the default group is everyone's."""
    both, one = {"0": (), "4": ()}, {"0": ()}
    waiting = flight(call("0", 1), call("4", 1, over=False), groups=both)
    coming = flight(call("0", 1), call("4", 0), groups=both)
    analysis = analyse({0: waiting, 1: coming, 2: flight(call("0", 1), groups=one)}, 3)
    assert [wait.absent for wait in analysis.waits] == [(1,)]


def test_a_rank_that_never_came_to_its_group_is_missed_if_somebody_says_that_it_belongs_to_it():
    """As on gloo: only who has called in a group lists it."""
    waiting = flight(call("0", 1), call("4", 0, over=False), groups={"0": (), "4": ()})
    others = {rank: flight(call("0", 1), groups={"0": ()}) for rank in (0, 2, 3)}
    assert analyse({1: waiting, **others}, 4).culprits == ()
    told = with_members(waiting, {"4": Group("4", "pair", (1, 2)), "5": Group("5", "", (1, 3))})
    analysis = analyse({1: told, **others}, 4)
    assert (analysis.culprits, analysis.victims) == ((2,), (1,))
    assert [group.name for group in told.groups] == ["0", "4", "5"]


def test_what_a_recorder_itself_says_of_a_group_counts():
    known = flight(call("4", 0), groups={"4": (0, 1)})
    assert with_members(known, {"4": Group("4", "", (0, 2))}) == known
    assert with_members(known, {}) is known


def namesakes(**last: int) -> dict[int, Flight]:
    """Ranks 0,1 and 2,3 are groups of one name; each rank is in the call that `rN` says, or past it if that is negative."""
    return {
        int(rank[1:]): flight(
            *(call("7", number, over=number < abs(number_of) or number_of < 0) for number in range(abs(number_of) + 1)),
            groups={"7": (0, 1) if rank < "r2" else (2, 3)},
        )
        for rank, number_of in last.items()
    }


def test_groups_of_one_name_are_told_apart_by_their_members():
    analysis = analyse(namesakes(r0=5, r1=-4, r2=-40, r3=-40), 4)
    assert (analysis.culprits, analysis.victims) == ((1,), (0,))
    assert [(wait.group, wait.sequence, wait.absent) for wait in analysis.waits] == [("7", 5, (1,))]
    assert (analysis.blocking.group, analysis.matched) == ("7", {"7": 4})
    assert analyse(namesakes(r0=-5, r1=-5, r2=-40, r3=-40), 4).culprits == ()


def test_a_deviation_in_one_of_two_namesakes_is_of_its_own_ranks():
    flights = namesakes(r0=-9, r1=-9, r2=-9, r3=-9)
    odd = [msgspec.structs.replace(one, sizes=((11,),)) if one.sequence == 6 else one for one in flights[3].calls]
    flights[3] = msgspec.structs.replace(flights[3], calls=odd)
    (deviation,) = analyse(flights, 4).deviations
    assert (deviation.group, deviation.ranks, deviation.others) == ("7", (3,), (2,))


def test_one_majority_two_deviating_ranks_each_in_its_own_place():
    plain = [call("0", number) for number in range(9)]
    flights = {rank: flight(*plain) for rank in range(5)}
    flights[1] = flight(*plain[:3], call("0", 3, size=11), *plain[4:])
    flights[4] = flight(*plain[:6], msgspec.structs.replace(plain[6], dtypes=("int32",)), *plain[7:])
    first, second = analyse(flights, 5).deviations
    assert (first.kind, first.ranks, first.sequence, first.others) == ("shape", (1,), 3, (0, 2, 3, 4))
    assert (second.kind, second.ranks, second.sequence, second.others) == ("dtype", (4,), 6, (0, 2, 3))
    assert (second.expected, second.seen) == ("all_reduce float32 [10]", "all_reduce int32 [10]")


def test_calls_that_are_made_as_one_are_compared_as_one():
    together = flight(call("0", 1, size=1), call("0", 1, size=2), call("0", 2))
    other = flight(call("0", 1, size=1), call("0", 1, size=3), call("0", 2))
    assert analyse({0: together, 1: together}, 2).deviations == ()
    (deviation,) = analyse({0: together, 1: together, 2: other}, 3).deviations
    assert (deviation.ranks, deviation.sequence) == ((2,), 1)


def stepping(*last: str) -> Flight:
    """Ten steps of a long pause and three calls, the last of them of these; the very last is not over."""
    made = [*("gradients", "all_reduce", "broadcast") * 10, *last]
    calls = [
        Call("0", n, name, ((10,),), ("float32",), int((n // 3 + n % 3 / 100) * SECOND_NS), n < len(made) - 1, record=n)
        for n, name in enumerate(made)
    ]
    return Flight(groups=[Group("0", "default_pg")], calls=calls, taken_ns=100 * SECOND_NS)


@pytest.mark.parametrize(
    ("called", "was_to_call", "kind", "alternative"),
    [
        # Within a step: two swapped, or one left out, but more likely swapped.
        (("gradients", "broadcast"), ("gradients", "all_reduce"), "order", "missing"),
        (("gradients", "broadcast", "all_reduce"), ("gradients", "all_reduce"), "order", None),
        # The next step begun: what was left of the last one was left out.
        (("gradients", "all_reduce", "gradients"), ("gradients", "all_reduce", "broadcast"), "missing", "order"),
        # It went on for more than one call: left out.
        (("gradients", "broadcast", "gradients"), ("gradients", "all_reduce"), "missing", None),
        (("barrier",), ("gradients",), "order", None),
    ],
)
def test_swapped_or_left_out(called, was_to_call, kind, alternative):
    (deviation,) = analyse({0: stepping(*was_to_call), 1: stepping(*called)}, 2).deviations
    assert (deviation.ranks, deviation.is_clear) == ((1,), True)
    assert (deviation.kind, deviation.alternative) == (kind, alternative)


def circle(lasting_s: float) -> dict[int, Flight]:
    """Rank 0 is in group 8, rank 1 in group 9; both belong to both. Before, each had called 8 and then 9 four times."""
    groups = {"8": (0, 1), "9": (0, 1)}
    history = [call(name, number, record=2 * number + (name == "9")) for number in range(4) for name in ("8", "9")]
    at_s = 100 - lasting_s
    return {
        0: flight(*history, call("8", 4, over=False, at_s=at_s, record=8), groups=groups),
        1: flight(*history, call("9", 4, over=False, at_s=at_s, record=9), groups=groups),
    }


def test_ranks_that_wait_for_each_other_and_the_one_that_left_its_program():
    analysis = analyse(circle(lasting_s=10), 2)
    (deviation,) = analysis.deviations
    assert (deviation.kind, deviation.ranks, deviation.others) == ("missing", (1,), (0,))
    assert (deviation.group, deviation.sequence, deviation.is_clear) == ("8", 4, True)
    assert (analysis.culprits, analysis.victims) == ((1,), (0,))


def test_ranks_that_seem_to_wait_for_each_other_for_a_moment_are_on_their_way():
    analysis = analyse(circle(lasting_s=0.1), 2)
    assert (analysis.deviations, analysis.culprits) == ((), ())


def test_a_circle_without_history_has_two_sides():
    bare = {rank: Flight(groups=one.groups, calls=one.calls[-1:], taken_ns=0) for rank, one in circle(10).items()}
    (deviation,) = analyse(bare, 2).deviations
    assert (deviation.kind, deviation.ranks, deviation.is_clear) == ("order", (0, 1), False)


def test_a_rank_held_up_behind_anothers_wait_is_no_culprit():
    """Rank 0 is in group 6 with rank 1, which is stuck in group 7 in front of it; rank 3 waits for rank 0, but rank 2 is to blame."""
    groups = {0: {"6": (0, 1), "5": (0, 3)}, 1: {"6": (0, 1), "7": (1, 2)}, 2: {"7": (1, 2)}, 3: {"5": (0, 3)}}
    analysis = analyse(
        {
            0: flight(call("6", 1, over=False, record=0), groups=groups[0]),
            1: flight(call("7", 1, over=False, record=0), call("6", 1, over=False, record=1), groups=groups[1]),
            2: flight(groups=groups[2]),
            3: flight(call("5", 1, over=False, record=0), groups=groups[3]),
        },
        4,
    )
    assert (analysis.culprits, analysis.victims) == ((2,), (0, 1, 3))


def test_no_flights_are_nothing_to_say():
    analysis = analyse({}, 2)
    assert (analysis.culprits, analysis.waits, analysis.unknown) == ((), (), (0, 1))
    assert analyse({0: flight(groups={})}).culprits == ()


def big_job(num: int, stuck: int) -> dict[int, Flight]:
    """Tensor parallel groups of eight, data parallel groups across them, and everyone; one rank stops eight calls before the end."""
    flights = {}
    for rank in range(num):
        tensor, data = f"t{rank // 8}", f"d{rank % 8}"
        members = {
            tensor: tuple(range(rank // 8 * 8, rank // 8 * 8 + 8)),
            data: tuple(range(rank % 8, num, 8)),
            "0": (),
        }
        counts = dict.fromkeys(members, 0)
        calls = []
        for number in range(256):
            group = (tensor, data, tensor, "0")[number % 4]
            is_late = number >= 248
            if is_late and rank == stuck:
                break
            counts[group] += 1
            calls.append(call(group, counts[group], over=not is_late, size=number % 7, record=number))
            if is_late:
                break
        whole = Flight(
            groups=[Group(name, "default_pg" if name == "0" else "", ranks) for name, ranks in members.items()],
            calls=calls,
            taken_ns=100 * SECOND_NS,
        )
        flights[rank] = trimmed(whole, rank)
    return flights


@pytest.mark.slow
@pytest.mark.release
def test_the_cost_grows_with_the_ranks_and_not_with_their_square():
    seconds = {}
    for num in (496, 2000):
        flights = big_job(num, stuck=num // 2 + 1)
        began = time.process_time()
        analysis = analyse(flights, num)
        seconds[num] = time.process_time() - began
        assert analysis.culprits == (num // 2 + 1,)
    few, many = seconds.values()
    # 0.15 s and 0.6 s; a square would be sixteen times as much.
    assert many < 20
    assert many < 10 * max(few, 0.1)


def queued(first_open: int, last: int = 50) -> Flight:
    """A rank on NCCL: what is over, one call that runs, and what it has queued behind it."""
    states = {
        number: "completed" if number < first_open else "started" if number == first_open else "scheduled"
        for number in range(30, last + 1)
    }
    calls = [
        msgspec.structs.replace(call("0", number, over=state == "completed", at_s=number / 1000), state=state)
        for number, state in states.items()
    ]
    return flight(*calls, groups={"0": (0, 1, 2, 3)}, taken_s=0.050)


@pytest.mark.parametrize("last", [44, 50, 57])
@pytest.mark.parametrize("stopped", [(3,), (0,), (1, 2)])
def test_ranks_in_a_call_that_others_have_completed_have_stopped_however_much_they_queued(stopped, last):
    found = analyse({rank: queued(40, last) if rank in stopped else queued(42) for rank in range(4)})
    assert stopped == found.culprits
    assert found.blocking is not None
    assert (40, stopped, True) == (found.blocking.sequence, found.blocking.absent, found.blocking.is_stopped)


def test_a_call_that_all_are_in_has_stopped_nobody():
    assert () == analyse({rank: queued(42) for rank in range(4)}).culprits


def test_ranks_that_hand_nothing_into_a_scatter_called_what_its_root_called():
    """Two scatters of other dtypes in a row, as scatter_object_list makes them: only the root has inputs."""

    def scatters(*, is_root: bool) -> Flight:
        calls = [
            Call(
                "0",
                number,
                "scatter",
                ((4, 1),) if is_root else (),
                (dtype,) if is_root else (),
                number,
                True,
                output_dtypes=(dtype,),
            )
            for number, dtype in enumerate(("uint8", "int64"))
        ]
        return flight(*calls)

    analysis = analyse({rank: scatters(is_root=rank == 0) for rank in range(4)})
    assert not analysis.deviations
