"""What a halt must know of the run: where each rank is, how long a step takes, and which diagnosis wishes a halt."""

from typing import Any

import msgspec
import pytest
from tests.coordinator.conftest import RUN_ID, done, exited, seen
from tests.coordinator.halt.test_driver import diagnosis

from holter.coordinator.halt.driver import HaltDriver
from holter.coordinator.halt.situation import job, rank_places, suspicion, wish
from holter.coordinator.roster import Roster
from holter.faults import CAUSES
from holter.faults.window import Delay, Examined, Spread, StepNumbers, Window
from holter.halting.plan import JobShape, RankSituation
from holter.records import (
    Action,
    Diagnosis,
    Directive,
    Exam,
    Finding,
    Halting,
    Overdue,
    Phase,
    ProcessState,
    Snapped,
)
from holter.transport import wire
from made_up import made_window

STILL = Delay(
    step=5,
    at_ns=0,
    overdue=Overdue(tier="overdue", phase=Phase.FORWARD, micro_step=0, waited_s=9.0, deadline_s=3.0, because=""),
)


@pytest.fixture
def roster() -> Roster:
    """Ranks 0 and 1 of three are there, before step 5."""
    made = Roster(3)
    for rank in range(2):
        hello = wire.Hello(
            run_id=RUN_ID, rank=rank, world_size=3, host="h", rank_pid=1, sidecar_pid=2, metrics_address=""
        )
        made.connect(hello)
        made.beat(rank, wire.Heartbeat(5, Phase.FORWARD, 0, 0), 0)
    return made


@pytest.fixture
def halts() -> HaltDriver:
    return HaltDriver(lambda _body, _now_ns: None)


def window(**facts: Any) -> Window:
    return made_window(now_ns=0, world_size=3, attached=frozenset({0, 1}), **facts)


def exam(state: str = "sleeping", *, is_lock_free: bool | None = None) -> tuple[Examined, ...]:
    process = ProcessState(state=state, cpu_s=1.0, cpu_share=0.0)  # type: ignore[arg-type]
    return (Examined(5, 0, Exam(reason="asked", process=process, is_lock_free=is_lock_free)),)


def directed(cause: str, directive: Action = "halt", **about: Any) -> Diagnosis:
    plain = diagnosis()
    first = msgspec.structs.replace(plain.causes[0], cause=cause)
    action = Directive(directive=directive, reason="it is critical")
    return msgspec.structs.replace(plain, causes=(first,), action=action, **about)


def test_every_rank_of_the_job_is_placed_and_who_never_came_is_not_there(roster: Roster, halts: HaltDriver) -> None:
    assert [
        RankSituation(rank=0, step=5),
        RankSituation(rank=1, step=5),
        RankSituation(rank=2, step=None, is_there=False),
    ] == rank_places(roster, window(), halts)


@pytest.mark.parametrize("how", ["exited", "hung up", "silent", "goodbye"])
def test_who_ended_or_is_not_heard_is_not_there(roster: Roster, halts: HaltDriver, how: str) -> None:
    member = roster.members[1]
    match how:
        case "exited":
            roster.observe(exited(1, 5, 1), 0)
        case "hung up":
            roster.disconnect(1, member.line.connection)
        case "silent":
            member.line.is_silent = True
        case "goodbye":
            roster.goodbye(1)
    assert [True, False, False] == [one.is_there for one in rank_places(roster, window(), halts)]


def test_what_a_rank_that_stands_says_of_itself_is_believed_before_its_heartbeat(
    roster: Roster, halts: HaltDriver
) -> None:
    roster.beat(1, wire.Heartbeat(5, Phase.OPTIMIZER, 0, 0), 0)
    assert rank_places(roster, window(), halts)[1].is_torn, "inside the optimizer's step"
    halts.hear(seen(1, 6, Halting(state="held", why="nonfinite")), 0)
    found = rank_places(roster, window(), halts)[1]
    assert (6, "held", False) == (found.step, found.state, found.is_torn)
    halts.hear(seen(1, 6, Halting(state="dying", is_torn=True)), 0)
    assert rank_places(roster, window(), halts)[1].is_torn
    halts.hear(seen(1, 6, Halting(state="released")), 0)
    assert (5, None) == (rank_places(roster, window(), halts)[1].step, rank_places(roster, window(), halts)[1].state)


def test_the_copies_in_memory_are_known(roster: Roster, halts: HaltDriver) -> None:
    for step in (2, 3, 4):
        roster.observe(seen(0, step, Snapped(num_bytes=1, seconds=0.1)), 0)
    assert [(3, 4), (), ()] == [one.snapshots for one in rank_places(roster, window(), halts)]


@pytest.mark.parametrize(
    ("examined", "is_able"),
    [
        ((), True),
        (exam(), True),
        (exam(is_lock_free=True), True),
        (exam(is_lock_free=False), False),
        (exam("stopped"), False),
        (exam("zombie"), False),
        (exam("stopped") + exam(), True),
    ],
)
def test_who_does_not_move_on_can_save_if_its_last_examination_lets_it(
    roster: Roster, halts: HaltDriver, examined: tuple[Examined, ...], *, is_able: bool
) -> None:
    found = rank_places(roster, window(delays={1: STILL}, exams={1: examined}), halts)
    assert [True, is_able] == [one.is_able for one in found[:2]]
    assert rank_places(roster, window(exams={1: examined}), halts)[1].is_able, "it moves"


def test_how_long_a_step_takes_is_told_by_the_last_ones(roster: Roster) -> None:
    assert JobShape(step_s=1.0) == job(window(), roster)
    took = [9.0, 1.0, 1.0, 2.0, 2.0]
    series = [StepNumbers(step, 0, {"seconds": Spread(s, s, s, 0, 0, 2)}) for step, s in enumerate(took)]
    assert 1.5 == job(window(series=tuple(series)), roster).step_s
    sharded = done(1, 4)
    roster.observe(msgspec.structs.replace(sharded, body=msgspec.structs.replace(sharded.body, view="sharded")), 0)
    assert job(window(), roster).is_sharded


def test_the_newest_open_diagnosis_that_directs_a_halt_wishes_it() -> None:
    older, newer = directed("nonfinite_input", id="a"), directed("replica_divergence", id="b", symptom="apart")
    found = wish([older, newer], (), window)
    assert found is not None
    assert ("b", "replica_divergence", (1,), "it is critical; apart") == (
        found.incident,
        found.cause,
        found.ranks,
        found.reason,
    )
    closed = msgspec.structs.replace(newer, closed_at="2026-01-01T00:00:00Z")
    noted = directed("loss_spike", "notify", id="c")
    assert "a" == wish([older, closed, noted], (), window).incident  # type: ignore[union-attr]
    assert wish([closed, noted, msgspec.structs.replace(older, causes=())], (), window) is None


@pytest.mark.parametrize("cause", [name for name, entry in CAUSES.items() if entry.is_hang])
def test_a_hang_wishes_a_halt_as_long_as_ranks_hang(cause: str) -> None:
    found = wish([directed(cause)], (), lambda: window(delays={1: STILL}))
    assert found is not None
    assert found.is_blocked
    assert wish([directed(cause)], (), window) is None, "it is over"


def test_calls_that_did_not_match_in_a_job_that_goes_on_are_no_hang_that_is_over() -> None:
    running = Finding(
        detector="collective_mismatch",
        severity="critical",
        first_step=20,
        detected_step=20,
        ranks=(1,),
        summary="",
        facts={"is_running": True},
    )
    found = wish([directed("rank_missing_from_collective")], [running], window)
    assert found is not None
    assert not found.is_blocked
    other = msgspec.structs.replace(running, ranks=(2,))
    assert wish([directed("rank_missing_from_collective")], [other], window) is None


def test_the_dead_do_not_come_back_and_others_are_not_blocked() -> None:
    dead, nan = wish([directed("rank_dead")], (), window), wish([directed("nonfinite_input")], (), window)
    assert dead is not None
    assert nan is not None
    assert (True, False) == (dead.is_blocked, nan.is_blocked)


def test_the_first_state_that_the_fault_is_in_is_known() -> None:
    found = wish([directed("nonfinite_input")], (), window)
    assert found is not None
    assert 31 == found.first_bad, "the state before step 30 is good"
    applied = Finding(
        detector="nonfinite_values", severity="critical", first_step=20, detected_step=20, ranks=(1,), summary=""
    )
    assert 21 == wish([directed("nonfinite_input")], [applied], window).first_bad  # type: ignore[union-attr]
    assert wish([directed("rank_dead")], (), window).first_bad is None  # type: ignore[union-attr]


def test_a_suspicion_needs_no_directive_but_a_cause_that_makes_ranks_stand() -> None:
    found = suspicion([directed("nonfinite_forward", "notify", id="a")])
    assert found is not None
    assert ("a", "nonfinite_forward", (1,)) == (found.incident, found.cause, found.ranks)
    assert suspicion([directed("rank_dead"), directed("nonfinite_forward", closed_at="t")]) is None
