"""What makes judging urgent, and what a sidecar may not say."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.coordinator.conftest import RUN_ID, attached, done, exited, seen
from tests.coordinator.halt.test_driver import diagnosis
from tests.coordinator.window.test_assembly import feed_note

from holter import clock
from holter.coordinator.halt.driver import HaltDriver
from holter.coordinator.http import status
from holter.coordinator.identity import RunSettings
from holter.coordinator.recovery import journal, rebuilt_run
from holter.coordinator.roster import Roster
from holter.coordinator.run import Run, job_shape, rank_places, suspicion, wish
from holter.exporters.webhook import Pager
from holter.faults import CAUSES, Window
from holter.faults.window import Delay, Examined, Spread, StepNumbers
from holter.halting.plan import JobShape, RankSituation
from holter.records import (
    Action,
    Body,
    Diagnosis,
    Directive,
    Exam,
    ExamRequest,
    Finding,
    Halting,
    Inspection,
    Judged,
    Link,
    Logged,
    Nonfinite,
    Overdue,
    Phase,
    ProcessState,
    Skipped,
    Snapped,
    StepDone,
    Swapped,
    Table,
    Unavailable,
    Vitals,
)
from holter.transport import wire
from made_up import made_window

HELLO = wire.Hello(run_id=RUN_ID, rank=0, world_size=1, host="h", rank_pid=1, sidecar_pid=2, metrics_address="")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(RunSettings(tmp_path, RUN_ID, "http://127.0.0.1:1"))
    made.intake.connect(HELLO, 0)
    return made


def hear(run: Run, *bodies: Body) -> bool:
    said = [seen(0, 3, body) for body in bodies]
    return run.intake.hear(0, wire.Report(heartbeat=None, observations=said, dropped=0), 5)


def skipped(in_a_row: int) -> Skipped:
    return Skipped(in_a_row=in_a_row, scale=1.0, lowest_scale=1.0, first_scale=65536.0, loss=1.0)


@pytest.mark.parametrize(
    ("body", "is_urgent"),
    [
        (skipped(16), True),
        (skipped(15), False),
        (feed_note(0, 0), True),
        (feed_note(0, 0, is_end=True), False),
        (Swapped(distance=0.1, is_input_equal=True, is_output_equal=True, num_times=1), True),
        (Inspection(reason="first", autocast_dtype="", witnesses=[], num_modules=1), True),
        (exited(0, 3).body, True),
        (Vitals(view="local", modules=[], num_trainable=1), False),
        (Logged(values={"kl": 1.0}), False),
        (done(0, 3).body, False),
    ],
)
def test_what_cannot_wait_is_urgent(run: Run, body: Body, is_urgent: bool) -> None:  # noqa: FBT001
    assert is_urgent is hear(run, body)


def test_a_sidecar_cannot_speak_for_the_coordinator(run: Run) -> None:
    hear(run, Judged(), Unavailable(tensor_class="gradients"), Link(state="silent"))
    assert 3 == run.intake.strangers
    assert "connected" == run.assembly.window(0).processes.links[0].state
    assert frozenset() == run.assembly.window(0).tensors.unavailable


def test_a_time_that_cannot_be_does_not_reach_a_judge(run: Run) -> None:
    odd = Overdue(tier="suspect", phase=Phase.FORWARD, micro_step=0, waited_s=math.nan, deadline_s=3.0, because="")
    assert not hear(run, odd)
    assert (1, {}) == (run.intake.strangers, run.assembly.window(0).processes.delays)


def test_what_was_asked_long_ago_is_forgotten(tmp_path: Path) -> None:
    class Restless:
        """Wants another examination at every judgement."""

        name = "restless"

        def judge(self, window: Window) -> Iterator[Finding]:
            needs = (ExamRequest(window.now_ns, "quick", (0,)),)
            yield Finding(
                detector="restless", severity="info", first_step=0, detected_step=0, ranks=(0,), summary="", needs=needs
            )

    run = Run(RunSettings(tmp_path, RUN_ID, "http://127.0.0.1:1"), [Restless()])
    run.intake.connect(HELLO, 0)
    for second in range(1, 4000):
        run.intake.hear(0, EMPTY, second * S)
        assert 1 == len(run.judge(second * S).exams)
    assert len(run.intake._asked) < 1000


def test_an_incident_is_in_the_journal_as_soon_as_it_is_in_the_database(tmp_path: Path) -> None:
    class Certain:
        name = "dead_rank"

        def judge(self, _: Window) -> Iterator[Finding]:
            yield Finding(
                detector="dead_rank", severity="critical", first_step=0, detected_step=0, ranks=(0,), summary="it is"
            )

    run = Run(RunSettings(tmp_path, RUN_ID, "http://127.0.0.1:1"), [Certain()])
    run.intake.connect(HELLO, 0)
    made = run.judge(5 * S).fresh
    assert 1 == len(made)
    run.disk.close(5.0)  # As SIGKILL finds it a moment later: nothing else was flushed.
    bodies = [entry.observation.body for entry in journal.read(tmp_path / "journal")]
    assert [True] == [body.is_news for body in bodies if isinstance(body, Judged)]


@pytest.mark.parametrize("has_ended", [False, True])
def test_who_comes_after_a_crash_pages_again_and_a_resumed_run_does_not(tmp_path: Path, has_ended: bool) -> None:  # noqa: FBT001
    settings = RunSettings(tmp_path, RUN_ID, "http://127.0.0.1:1")
    former = Run(settings)
    former.intake.connect(HELLO, clock.wall_ns())
    bad = Nonfinite(where="input", name="x", nans=1, infs=0, numel=4)
    said = [attached(0, 1), done(0, 0), done(0, 1, nonfinite=[bad])]
    former.intake.hear(0, wire.Report(heartbeat=None, observations=said, dropped=0), clock.wall_ns())
    former.judge(clock.wall_ns(), is_final=True)
    former.intake.write_down()
    if has_ended:
        former.intake.end(clock.wall_ns())
        former.close(5.0)
    else:
        former.disk.close(5.0)
    (told,) = Pager("http://127.0.0.1:1", "http://runbooks").look(former.incidents.standing(), "")
    later = Run(settings)
    rebuilt_run.recall(later, clock.wall_ns())
    (known,) = later.incidents.all()
    assert has_ended == (known.closed_at is not None)
    pager = Pager("http://127.0.0.1:1", "http://runbooks")
    pager.remember(later.left_open)
    (again,) = pager.look(later.incidents.standing(), "")
    assert ("resolved" if has_ended else "firing") == again["status"]
    assert told["alerts"][0]["fingerprint"] == again["alerts"][0]["fingerprint"]


def test_what_a_former_life_left_open_is_over_in_the_files_too_and_counts_as_a_strike(tmp_path: Path) -> None:
    settings = RunSettings(tmp_path, RUN_ID, "http://127.0.0.1:1")
    bad = Nonfinite(where="input", name="x", nans=1, infs=0, numel=4)
    for now_ns in (S, 60 * S):
        run = Run(settings)
        rebuilt_run.recall(run, now_ns)
        run.intake.connect(HELLO, now_ns)
        said = [attached(0, 1), done(0, 0), done(0, 1, nonfinite=[bad])]
        run.intake.hear(0, wire.Report(heartbeat=None, observations=said, dropped=0), now_ns)
        run.judge(now_ns, is_final=True)
        run.intake.end(now_ns)
        run.close(5.0)
    written = [msgspec.json.decode(path.read_bytes()) for path in tmp_path.glob("incidents/*/diagnosis.json")]
    assert {(1, False), (2, True)} == {(one["strikes"], one["closed_at"] is None) for one in written}


@pytest.mark.parametrize("by", ["an operator", "a signal"])
@pytest.mark.parametrize("is_answered", [False, True])
def test_a_request_that_was_noted_is_taken_up_after_a_crash_unless_it_has_its_answer(
    tmp_path: Path,
    by: str,
    is_answered: bool,  # noqa: FBT001
) -> None:
    settings = RunSettings(tmp_path, RUN_ID, "http://127.0.0.1:1")
    former, now_ns = Run(settings), clock.wall_ns()
    former.intake.connect(HELLO, now_ns)
    said = [attached(0, 1), *([seen(0, 3, Halting(state="asking", why="SIGUSR1"))] if by == "a signal" else [])]
    former.intake.hear(0, wire.Report(heartbeat=None, observations=said, dropped=0), now_ns)
    if by == "an operator":
        assert former.halts.ask("me", "wrong data", now_ns) is None
    assert former.halts.is_asked
    if is_answered:
        former.intake.disconnect(0, 1, now_ns, is_closed=True)
        former.judge(now_ns)
        former.judge(now_ns + 11 * S)
        assert not former.halts.is_asked
    former.intake.write_down()
    former.disk.close(5.0)
    later = Run(settings)
    rebuilt_run.recall(later, clock.wall_ns())
    assert later.halts.is_asked != is_answered


@pytest.mark.parametrize("part", ["norms", "sums", "marks"])
def test_a_table_that_does_not_add_up_counts_as_none(run: Run, part: str) -> None:
    beside = {"norms": [], part: [1]}
    table = Table(tensor_class="g", root=1, names=["a", "b"], fingerprints=[1, 2], **beside)
    run.intake.hear_table(("g", 3, 0), seen(0, 3, table), 5)
    window = run.assembly.window(0)
    assert ({}, {("g", 3, 0)}) == (window.tensors.tables, window.tensors.unavailable)


def test_the_journal_says_when_it_was_judged_and_what_could_not_be_had(run: Run, tmp_path: Path) -> None:
    hear(run, done(0, 3).body)
    run.judge(6)
    run.judge(7)
    run.intake.hear_table(("g", 3, 0), None, 8)
    run.judge(9)
    run.intake.end(10)
    run.close(5.0)
    bodies = [entry.observation.body for entry in journal.read(tmp_path / "journal")]
    assert [Link, StepDone, Judged, Unavailable, Judged] == [type(body) for body in bodies], (
        "nothing new, nothing written"
    )


S = 10**9
EMPTY = wire.Report(heartbeat=None, observations=[], dropped=0)


def links(tmp_path: Path) -> list[str]:
    entries = journal.read(tmp_path / "journal")
    return [entry.observation.body.state for entry in entries if isinstance(entry.observation.body, Link)]


def judge_for(run: Run, first_s: int, last_s: int) -> None:
    for quarter in range(first_s * 4, last_s * 4 + 1):
        run.judge(quarter * S // 4)


def test_a_line_that_falls_silent_is_in_the_window_and_in_the_journal(run: Run, tmp_path: Path) -> None:
    judge_for(run, 0, 7)
    view = run.assembly.window(7 * S).processes.links[0]
    assert "silent" == view.state
    assert 5 * S < view.since_ns <= 7 * S
    assert "silent" == status.status(run, 7 * S)["ranks"][0]["sidecar"]
    assert ["rank 0 on h: its sidecar is silent, and nobody closed its line"] == run.blind()
    run.intake.hear(0, EMPTY, 8 * S)
    assert ("connected", []) == (run.assembly.window(8 * S).processes.links[0].state, run.blind())
    run.intake.disconnect(0, 1, 9 * S, is_closed=True)
    assert "closed" == run.assembly.window(9 * S).processes.links[0].state
    run.intake.connect(HELLO, 10 * S)
    run.intake.end(11 * S)
    run.close(5.0)
    assert ["connected", "silent", "connected", "closed", "connected"] == links(tmp_path)


def test_an_ordinary_end_of_a_line_is_no_news(run: Run, tmp_path: Path) -> None:
    run.intake.goodbye(0)
    run.intake.disconnect(0, 1, 2 * S, is_closed=True)
    judge_for(run, 2, 20)
    run.intake.end(21 * S)
    run.close(5.0)
    assert ["connected"] == links(tmp_path)


class Curious:
    """A detector that wants rank 0 examined."""

    name = "curious"

    def judge(self, window: Window) -> Iterator[Finding]:
        assert window.world_size <= 1
        yield Finding(
            detector=self.name,
            severity="info",
            first_step=0,
            detected_step=0,
            ranks=(0,),
            summary="x",
            needs=(ExamRequest(asked_ns=1, depth="quick", ranks=(0,)),),
        )


def test_a_silent_sidecar_is_not_asked(tmp_path: Path) -> None:
    run = Run(RunSettings(tmp_path, RUN_ID, "http://127.0.0.1:1"), [Curious()])
    run.intake.connect(HELLO, 0)
    asked = [judgement.exams for second in range(8) if (judgement := run.judge(second * S))]
    assert (1, 0) == (len(asked[0]), sum(map(len, asked[1:])))
    assert {0: 1} == run.assembly.window(0).processes.unexamined


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
    assert JobShape(step_s=1.0) == job_shape(window(), roster)
    took = [9.0, 1.0, 1.0, 2.0, 2.0]
    series = [StepNumbers(step, 0, {"seconds": Spread(s, s, s, 0, 0, 2)}) for step, s in enumerate(took)]
    assert 1.5 == job_shape(window(series=tuple(series)), roster).step_s
    sharded = done(1, 4)
    roster.observe(msgspec.structs.replace(sharded, body=msgspec.structs.replace(sharded.body, view="sharded")), 0)
    assert job_shape(window(), roster).is_sharded


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


def test_a_fault_that_leads_to_numbers_that_are_not_finite_gives_the_halt_its_name() -> None:
    later = directed("learning_rate_too_high", "notify", id="b", first_step=67, severity="critical")
    first = directed("exploding_gradients", "notify", id="a", first_step=66, severity="critical")
    found = suspicion([later, first])
    assert found is not None
    assert ("exploding_gradients", "a") == (found.cause, found.incident)
    found = suspicion([first, directed("nonfinite_backward", "notify", id="c", first_step=71)])
    assert found is not None
    assert "c" == found.incident
    assert suspicion([directed("exploding_gradients", "notify", severity="warning")]) is None
