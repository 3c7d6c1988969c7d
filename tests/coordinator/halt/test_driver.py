"""The coordinator's part in a halt, look by look: what it wishes, orders, hears, repeats and gives up. No clock, no socket, no disk."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holter.coordinator.halt.driver import MAX_TRIES, Act, HaltDriver, Open, Outcome, View
from holter.halting.plan import JobShape, RankSituation, Wish
from holter.halting.protocol import Course, Seal, Tell
from holter.records import (
    Body,
    Directive,
    HaltAnswered,
    HaltAsked,
    Halting,
    Observation,
    Order,
    Ordered,
    RankState,
)
from made_up import diagnosis

SECOND_NS = 10**9
DIRECTORY = Path("/run/checkpoints/.30.partial")
NAN = Wish(cause="nonfinite_input", reason="a NaN of a batch", ranks=(1,), incident="i-1")
HANG = Wish(cause="rank_stuck_in_python", reason="rank 1 hangs", ranks=(1,), incident="i-2", is_blocked=True)
KEPT = Outcome("completed", "halted after 30 steps; checkpoint checkpoints/30, verified, healthy", "checkpoints/30")
LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:4321"


@dataclass
class Scene:
    """Two ranks of a run, and what the coordinator sees of them."""

    halts: HaltDriver = field(init=False)
    ranks: dict[int, RankSituation] = field(init=False)
    wish: Wish | None = None
    suspicion: Wish | None = None
    notes: list[Body] = field(default_factory=list)
    now_ns: int = 1_700_000_000 * SECOND_NS

    def __post_init__(self) -> None:
        self.halts = HaltDriver(lambda body, _: self.notes.append(body), deadline_s=60.0)
        self.ranks = {rank: RankSituation(rank=rank, step=30) for rank in range(2)}

    def place(self, rank: int, **where: Any) -> None:
        self.ranks[rank] = replace(self.ranks[rank], **where)

    def say(
        self, state: RankState, *ranks: int, halt: int = 0, step: int = 30, why: str = "", poisoned: int | None = None
    ) -> None:
        """By these ranks, or by both."""
        for rank in ranks or self.ranks:
            if state in ("held", "dying", "terminated"):
                self.place(rank, state=state, step=step)
            body = Halting(state=state, halt=halt, why=why, poisoned_step=poisoned)
            self.halts.hear(Observation(rank=rank, step=step, at_ns=self.now_ns, body=body), self.now_ns)

    def look(self, after_s: float = 0.0) -> list[Act]:
        self.now_ns += int(after_s * SECOND_NS)
        view = View(
            ranks=lambda: list(self.ranks.values()),
            wish=lambda: self.wish,
            suspicion=lambda: self.suspicion,
            job=lambda: JobShape(step_s=0.1),
        )
        return self.halts.look(self.now_ns, view)

    def open(self, why_not: str = "") -> list[Act]:
        """The directory is there, or not; what is ordered then."""
        self.halts.opened(DIRECTORY, why_not, self.now_ns)
        return self.look()

    def settle(self, halt: int = 1) -> list[Act]:
        self.say("saving", halt=halt)
        self.say("saved", halt=halt)
        return self.look()

    @property
    def course(self) -> Course:
        assert self.halts.attempt is not None
        assert self.halts.attempt.halt is not None
        return self.halts.attempt.halt.course


@pytest.fixture
def scene() -> Scene:
    return Scene()


def held_by_nan() -> Scene:
    """A NaN was seen, both ranks stand, the directory is there, and a commit is ordered."""
    scene = Scene(wish=NAN)
    scene.say("held", why="nonfinite")
    assert [Open(30)] == scene.look()
    assert [("commit", (0, 1))] == told(scene.open())
    return scene


def told(acts: list[Act]) -> list[tuple[str, tuple[int, ...]]]:
    assert all(isinstance(act, Tell) for act in acts), acts
    return [(act.order.kind, act.ranks) for act in acts if isinstance(act, Tell)]


def test_a_diagnosis_with_all_ranks_held_is_committed_saved_sealed_and_left() -> None:
    scene = held_by_nan()
    (ordered,) = [note for note in scene.notes if isinstance(note, Ordered)]
    assert (NAN.cause, (1,), "i-1") == (ordered.cause, ordered.ranks, ordered.incident), (
        "written down before it is told"
    )
    order = ordered.order
    assert (1, 30, (0, 1), str(DIRECTORY), 60.0) == (
        order.halt,
        order.step,
        order.savers,
        order.directory,
        order.deadline_s,
    )
    assert scene.halts.is_busy
    scene.say("saving", halt=1)
    scene.say("saved", 0, halt=1)
    assert [] == scene.look(), "one still saves"
    scene.say("saved", 1, halt=1)
    assert [Seal(order)] == scene.look()
    scene.halts.sealed(KEPT)
    assert [("leave", (0, 1))] == told(scene.look())
    assert (False, True) == (scene.halts.is_busy, scene.halts.is_done)
    assert {"completed": 1} == scene.halts.outcomes
    assert [f"halting: {NAN.reason}", KEPT.text] == scene.halts.sentences


def test_leave_is_repeated_every_second_to_those_who_are_not_gone() -> None:
    scene = held_by_nan()
    scene.settle()
    scene.halts.sealed(KEPT)
    scene.look()
    assert [] == scene.look(0.9)
    assert [("leave", (0, 1))] == told(scene.look(0.2))
    scene.place(0, is_there=False)
    assert [] == scene.look(0.5)
    assert [("leave", (1,))] == told(scene.look(0.6))
    scene.place(1, is_there=False)
    assert [] == scene.look(5.0)
    assert "the run is halted already" == scene.halts.ask("me", "", scene.now_ns)


def test_an_operators_halt_is_prepared_at_a_step_ahead_and_committed_when_all_stand(scene: Scene) -> None:
    assert scene.halts.ask("me@host", "wrong data", scene.now_ns) is None
    assert [HaltAsked(by="me@host", reason="wrong data")] == scene.notes
    assert "a halt is under way already" == scene.halts.ask("another", "", scene.now_ns)
    (opening,) = scene.look()
    assert isinstance(opening, Open)
    assert 30 < opening.step
    assert "a halt is under way already" == scene.halts.ask("another", "", scene.now_ns)
    (prepare,) = scene.open()
    assert isinstance(prepare, Tell)
    assert ("prepare", opening.step, (0, 1)) == (prepare.order.kind, prepare.order.step, prepare.ranks)
    assert "asked for by me@host: wrong data" == prepare.order.reason
    scene.say("willing", halt=1)
    scene.say("held", 0, halt=1, step=opening.step)
    assert [] == scene.look()
    scene.say("held", 1, halt=1, step=opening.step)
    assert [("commit", (0, 1))] == told(scene.look())
    assert [msgspec.structs.replace(prepare.order, kind="commit")] == [
        act.order for act in scene.settle() if isinstance(act, Seal)
    ]
    scene.halts.sealed(KEPT)
    assert [("leave", (0, 1))] == told(scene.look())


def test_a_signal_that_a_rank_was_told_to_take_for_it_asks_for_a_halt(scene: Scene) -> None:
    scene.say("asking", 1, why="SIGUSR1")
    assert [HaltAsked(by="SIGUSR1 to rank 1")] == scene.notes
    assert [Open] == [type(act) for act in scene.look()]


def test_an_order_that_is_not_answered_is_repeated_to_whom_it_concerns(scene: Scene) -> None:
    scene.halts.ask("me", "", scene.now_ns)
    scene.look()
    scene.open()
    scene.say("willing", 0, halt=1)
    assert [] == scene.look(0.5)
    assert [("prepare", (1,))] == told(scene.look(0.6))


def test_one_that_comes_too_late_is_called_off_and_tried_further_ahead_five_times_at_most(scene: Scene) -> None:
    scene.halts.ask("me", "", scene.now_ns)
    steps = []
    for number in range(1, MAX_TRIES + 1):
        (opening,) = scene.look(0.25)
        assert isinstance(opening, Open)
        steps.append(opening.step)
        scene.open()
        scene.say("willing", 0, halt=number)
        scene.say("unwilling", 1, halt=number, step=opening.step + 1)
        assert [("abort", (0, 1))] == told(scene.look())
        assert Course.CALLED_OFF is scene.course
        scene.say("released", 0, halt=number)
        assert [] == scene.look()
        assert scene.halts.attempt is None
        assert scene.halts.is_asked == (number < MAX_TRIES), "whoever waits is not told the outcome of one try"
    assert MAX_TRIES == 5
    assert sorted(set(steps)) == steps
    assert [] == scene.look(0.25)
    assert {"called_off": 5} == scene.halts.outcomes
    assert scene.halts.outcome is not None
    assert "the halt was called off: the order came too late for the step" == scene.halts.outcome.text
    assert scene.halts.ask("me", "again", scene.now_ns) is None, "it may be asked for again"
    assert [Open] == [type(act) for act in scene.look()]


def test_a_rank_that_does_not_answer_an_abort_is_told_again_and_not_for_ever(scene: Scene) -> None:
    scene.halts.ask("me", "", scene.now_ns)
    scene.look()
    scene.open()
    scene.say("unwilling", 0, halt=1)
    scene.look()
    assert [("abort", (1,))] == told(scene.look(1.1))
    assert [] == scene.look(0.2)
    scene.look(4.0)
    assert scene.halts.attempt is None


def test_one_whose_ranks_do_not_come_to_the_step_is_called_off(scene: Scene) -> None:
    scene.halts.ask("me", "", scene.now_ns)
    scene.look()
    scene.open()
    scene.say("willing", halt=1)
    scene.look(59.0)
    assert Course.PREPARING is scene.course
    assert ("abort", (0, 1)) in told(scene.look(30.0))
    scene.look(5.1)
    assert scene.halts.outcome is not None
    assert "the halt was called off: not every rank came to the step in time" == scene.halts.outcome.text


def test_ranks_that_stand_unexplained_are_halted_all_the_same_after_eight_seconds(scene: Scene) -> None:
    scene.say("held", 1, why="nonfinite")
    scene.say("held", 0, why="a peer stands")
    assert [] == scene.look()
    assert [] == scene.look(7.9)
    assert [Open(30)] == scene.look(0.2)
    scene.open()
    (ordered,) = [note for note in scene.notes if isinstance(note, Ordered)]
    assert ("nonfinite_backward", (1,), None) == (ordered.cause, ordered.ranks, ordered.incident)
    assert "nothing more is known" in ordered.order.reason


def test_a_suspicion_explains_at_once_why_ranks_stand_and_halts_nothing_that_trains(scene: Scene) -> None:
    scene.suspicion = NAN
    assert [] == scene.look()
    scene.say("held")
    assert [Open(30)] == scene.look()
    scene.open()
    assert ["i-1"] == [note.incident for note in scene.notes if isinstance(note, Ordered)]


def test_who_says_the_same_again_stands_since_the_first_time(scene: Scene) -> None:
    scene.say("held")
    scene.look(5.0)
    scene.say("held")
    assert [Open(30)] == scene.look(3.1)


def test_who_dies_of_an_exception_of_its_own_is_let_go_at_once(scene: Scene) -> None:
    scene.say("dying", 1, why="ValueError: no such file")
    assert [("abort", (1,))] == told(scene.look())
    assert [] == scene.look(5.0), "once"


@pytest.mark.parametrize(("state", "why"), [("dying", LOST), ("terminated", "SIGTERM")])
def test_who_may_have_lost_a_peer_is_kept_four_seconds_and_then_let_go(
    scene: Scene, state: RankState, why: str
) -> None:
    scene.say(state, 1, why=why)
    assert [] == scene.look()
    assert [] == scene.look(3.9)
    assert [("abort", (1,))] == told(scene.look(0.2))
    assert [] == scene.look(5.0)


def test_who_was_kept_saves_when_the_peers_death_is_explained(scene: Scene) -> None:
    scene.say("dying", 0, why=LOST)
    scene.place(1, is_there=False)
    assert [] == scene.look()
    scene.wish = replace(HANG, cause="rank_dead")
    assert [Open(30)] == scene.look(1.0)
    (rescue, *_) = scene.open()
    assert isinstance(rescue, Tell)
    assert ("rescue", (0,), (1,)) == (rescue.order.kind, rescue.order.savers, rescue.order.lost)


def test_what_lets_go_and_what_halts_have_different_numbers(scene: Scene) -> None:
    scene.say("dying", 1, why="ValueError")
    (let_go,) = scene.look()
    scene.place(1, is_there=False)
    scene.wish = HANG
    scene.look()
    (rescue,) = scene.open()
    assert isinstance(let_go, Tell)
    assert isinstance(rescue, Tell)
    assert [1, 2] == [let_go.order.halt, rescue.order.halt]


def test_where_no_directory_can_be_made_an_operators_halt_is_refused_and_training_goes_on(scene: Scene) -> None:
    scene.halts.ask("me", "", scene.now_ns)
    scene.look()
    assert [] == scene.open("No space left on device")
    assert [HaltAsked, HaltAnswered] == [type(note) for note in scene.notes], "nobody was ordered anything"
    assert Outcome("refused", "the run is not halted: No space left on device", is_halted=False) == scene.halts.outcome
    assert [] == scene.look(10.0)
    assert scene.halts.ask("me", "the disk is free now", scene.now_ns) is None
    assert [Open] == [type(act) for act in scene.look()]


def test_where_no_directory_can_be_made_a_nan_is_halted_all_the_same() -> None:
    scene = Scene(wish=NAN)
    scene.say("held")
    scene.look()
    assert [("commit", (0, 1))] == told(scene.open("No space left on device"))
    assert "nothing can be saved: No space left on device" in scene.halts.sentences


def test_a_diagnosis_that_was_tried_in_vain_is_in_no_operators_way(scene: Scene) -> None:
    scene.wish = replace(NAN, cause="replica_divergence")
    scene.look()
    scene.open("No space left on device")
    assert {"called_off": 1} == scene.halts.outcomes
    assert [] == scene.look(1.0)
    assert scene.halts.ask("me", "the disk is free now", scene.now_ns) is None
    assert [Open] == [type(act) for act in scene.look()]
    scene.open()
    assert ["requested"] == [note.cause for note in scene.notes if isinstance(note, Ordered)]


def test_a_rank_that_moves_on_after_a_rescue_began_calls_it_off() -> None:
    scene = Scene(wish=HANG)
    assert [Open(30)] == scene.look()
    assert [("rescue", (0, 1))] == told(scene.open())
    scene.say("saving", 0, halt=1)
    scene.say("released", 1, halt=1)
    assert [("abort", (0, 1))] == told(scene.look())
    scene.wish = None
    scene.say("released", 0, halt=1)
    scene.look()
    assert scene.halts.attempt is None
    assert scene.halts.outcome is not None
    assert ("called_off", "the halt was called off: the ranks went on by themselves", False) == (
        scene.halts.outcome.name,
        scene.halts.outcome.text,
        scene.halts.outcome.is_halted,
    )


def test_what_was_heard_came_before_the_end_of_the_line() -> None:
    scene = held_by_nan()
    scene.say("saving", halt=1)
    scene.look()
    scene.say("saved", 0, halt=1)
    scene.say("saved", 1, halt=1)
    for rank in (0, 1):
        scene.place(rank, is_there=False)
    assert [Seal] == [type(act) for act in scene.look()]
    assert {0: "saved", 1: "saved"} == scene.halts.attempt.halt.heard  # type: ignore[union-attr]


def test_only_who_said_that_it_saves_makes_a_halt_of_one_whose_ranks_are_gone() -> None:
    scene = held_by_nan()
    scene.say("saving", 0, halt=1)
    for rank in (0, 1):
        scene.place(rank, is_there=False)
    assert [Seal] == [type(act) for act in scene.look()], "what they left is sealed"


def test_lines_that_are_all_lost_may_come_back_before_it_lapses() -> None:
    scene = held_by_nan()
    for rank in (0, 1):
        scene.place(rank, is_there=False)
    assert [] == scene.look()
    assert Course.LAPSED is scene.course
    for rank in (0, 1):
        scene.place(rank, is_there=True)
    scene.say("saving", halt=1)
    scene.look(2.0)
    assert Course.COMMITTED is scene.course
    scene.say("saved", halt=1)
    assert [Seal] == [type(act) for act in scene.look()]


def test_lines_that_stay_lost_end_it() -> None:
    scene = held_by_nan()
    for rank in (0, 1):
        scene.place(rank, is_there=False)
    scene.look()
    scene.look(5.1)
    assert scene.halts.attempt is None
    assert scene.halts.outcome is not None
    assert "the halt was called off: not every rank could be reached" == scene.halts.outcome.text


def test_who_is_gone_is_gone_for_the_next_try_too(scene: Scene) -> None:
    scene.halts.ask("me", "", scene.now_ns)
    scene.look()
    scene.open()
    scene.place(1, is_there=False, has_ended=True)
    assert [("abort", (0,))] == told(scene.look())
    scene.say("released", 0, halt=1)
    scene.look()
    scene.look(0.1)
    scene.open()
    scene.say("saved", 0, halt=2)
    scene.look()
    scene.halts.sealed(KEPT)
    assert [("leave", (0,))] == told(scene.look())


def test_a_save_without_an_end_is_sealed_as_far_as_it_came() -> None:
    scene = held_by_nan()
    scene.say("saving", halt=1)
    scene.look()
    scene.say("saved", 0, halt=1)
    assert not any(isinstance(act, Seal) for act in scene.look(69.0))
    assert any(isinstance(act, Seal) for act in scene.look(2.0))


def test_why_a_rank_could_not_save_is_kept_for_the_checkpoint() -> None:
    scene = held_by_nan()
    scene.say("saving", halt=1)
    scene.say("failed", 1, halt=1, why="No space left on device")
    scene.say("saved", 0, halt=1)
    assert [Seal] == [type(act) for act in scene.look()]
    assert {1: "No space left on device"} == scene.halts.attempt.failures  # type: ignore[union-attr]


def test_the_outcome_is_in_the_action_of_its_incident_and_of_no_other() -> None:
    scene = held_by_nan()
    assert diagnosis() == scene.halts.named(diagnosis())
    scene.settle()
    scene.halts.sealed(KEPT)
    action = scene.halts.named(diagnosis()).action
    assert ("halt", "checkpoints/30", 93) == (action.directive, action.checkpoint, action.exit_code)
    assert f"critical: halt; {KEPT.text}" == action.reason
    named = scene.halts.named(diagnosis())
    assert named == scene.halts.named(named), "said once"
    other = msgspec.structs.replace(diagnosis(), id="i-9")
    assert other == scene.halts.named(other)


def test_a_halt_that_its_diagnosis_was_not_sure_enough_for_is_not_said_to_go_on() -> None:
    scene = held_by_nan()
    scene.settle()
    scene.halts.sealed(KEPT)
    unsure = Directive(directive="notify", reason="it rests on inference: reported, training goes on")
    named = scene.halts.named(msgspec.structs.replace(diagnosis(), action=unsure))
    assert ("halt", f"a NaN of a batch; {KEPT.text}") == (named.action.directive, named.action.reason)
    assert named == scene.halts.named(named)


def test_a_halt_that_was_called_off_leaves_the_action_as_it_was() -> None:
    scene = Scene(wish=replace(HANG, incident="i-1"))
    scene.look()
    scene.open()
    scene.say("released", halt=1)
    scene.look()
    action = scene.halts.named(diagnosis()).action
    assert (None, None) == (action.checkpoint, action.exit_code)
    assert action.reason.endswith("; the halt was called off: the ranks went on by themselves")


def orders(*kinds: str, step: int = 30) -> list[Ordered]:
    return [
        Ordered(
            order=Order(halt=3, kind=kind, step=step, savers=(0, 1), directory=str(DIRECTORY), deadline_s=60.0),  # type: ignore[arg-type]
            cause=NAN.cause,
            ranks=(1,),
            incident="i-1",
        )
        for kind in kinds
    ]


def recalled(scene: Scene, *kinds: str, step: int = 30) -> None:
    scene.halts.recall(orders(*kinds, step=step), frozenset({0, 1}), scene.now_ns)


def test_a_coordinator_that_is_started_again_goes_on_with_a_commit(scene: Scene) -> None:
    scene.say("held")
    scene.say("saving", halt=3)
    scene.say("failed", 1, halt=3, why="No space left on device")
    recalled(scene, "prepare", "commit")
    assert [] == scene.look()
    assert Course.COMMITTED is scene.course
    scene.say("saved", 0, halt=3)
    assert [Seal] == [type(act) for act in scene.look()]
    assert {1: "No space left on device"} == scene.halts.attempt.failures  # type: ignore[union-attr]
    scene.halts.sealed(KEPT)
    assert [("leave", (0, 1))] == told(scene.look())
    assert "checkpoints/30" == scene.halts.named(diagnosis()).action.checkpoint


def test_a_coordinator_that_is_started_again_repeats_what_was_not_answered(scene: Scene) -> None:
    recalled(scene, "prepare", step=40)
    assert [("prepare", (0, 1))] == told(scene.look(1.1))
    scene.say("held", halt=3, step=40)
    assert [("commit", (0, 1))] == told(scene.look())


def test_a_hold_of_long_ago_calls_no_halt_off_that_is_recalled(scene: Scene) -> None:
    scene.say("held", 1, step=12)
    scene.say("released", 1, step=12)
    scene.say("willing", halt=3)
    recalled(scene, "prepare", step=40)
    assert [] == scene.look()
    assert Course.PREPARING is scene.course


def test_a_coordinator_that_is_started_again_goes_on_telling_to_leave(scene: Scene) -> None:
    recalled(scene, "commit", "leave")
    assert scene.halts.is_done
    assert [("leave", (0, 1))] == told(scene.look(1.1))


@pytest.mark.parametrize("kinds", [(), ("prepare", "abort")])
def test_what_is_over_is_not_gone_on_with_and_its_number_not_used_again(scene: Scene, kinds: tuple[str, ...]) -> None:
    recalled(scene, *kinds)
    assert [] == scene.look(1.1)
    scene.halts.ask("me", "", scene.now_ns)
    scene.look()
    (prepare,) = scene.open()
    assert isinstance(prepare, Tell)
    assert (4 if kinds else 1) == prepare.order.halt


ASKED = HaltAsked(by="me", reason="wrong data")


def test_a_request_that_a_former_coordinator_noted_and_did_not_order_is_taken_up(scene: Scene) -> None:
    scene.halts.recall((), frozenset({0, 1}), scene.now_ns, ASKED)
    assert "a halt is under way already" == scene.halts.ask("another", "", scene.now_ns)
    assert [Open] == [type(act) for act in scene.look()]
    (prepare,) = scene.open()
    assert isinstance(prepare, Tell)
    assert ("asked for by me: wrong data", True) == (prepare.order.reason, prepare.order.is_requested)


def test_a_request_whose_halt_is_done_is_not_taken_up_again(scene: Scene) -> None:
    scene.halts.recall(orders("prepare", "commit", "leave"), frozenset({0, 1}), scene.now_ns, ASKED)
    assert not scene.halts.is_asked


@pytest.mark.parametrize(
    "why_not", ["No space left on device", "rank 1 cannot be reached, though it was not seen to end"]
)
def test_that_there_is_no_halt_is_written_down_for_a_coordinator_that_is_started_again(
    scene: Scene, why_not: str
) -> None:
    scene.place(1, is_there="reached" not in why_not)
    scene.halts.ask("me", "", scene.now_ns)
    scene.look()
    scene.open(why_not)
    scene.look(11.0)
    assert [HaltAsked(by="me"), HaltAnswered(text=f"the run is not halted: {why_not}")] == scene.notes


def test_an_operators_halt_is_refused_where_a_rank_that_may_train_on_cannot_be_reached(scene: Scene) -> None:
    scene.place(1, is_there=False)
    scene.halts.ask("me", "", scene.now_ns)
    assert [] == scene.look()
    assert [] == scene.look(11.0)
    assert not scene.halts.is_asked
    assert scene.halts.outcome is not None
    assert "the run is not halted: rank 1 cannot be reached" in scene.halts.outcome.text
    assert {"refused": 1} == scene.halts.outcomes, "nothing has failed: the run goes on"


def test_a_hold_of_a_halt_that_was_called_off_halts_nothing(scene: Scene) -> None:
    scene.say("held", why="agreed")
    assert [] == scene.look(9.0)
    assert scene.halts.attempt is None


def test_ranks_that_a_scheduler_ends_all_at_once_are_let_go_at_once(scene: Scene) -> None:
    scene.say("terminated")
    for rank in (0, 1):
        scene.place(rank, state="terminated")
    assert {(0,), (1,)} == {ranks for _, ranks in told(scene.look())}


@pytest.mark.parametrize(("poisoned", "kept"), [(None, 30), (28, 27), (29, 29)])
def test_ranks_that_learned_of_bad_numbers_too_late_go_back_to_before_them(
    scene: Scene, poisoned: int | None, kept: int
) -> None:
    scene.suspicion = Wish(cause="nonfinite_backward", reason="r")
    for rank in scene.ranks:
        scene.place(rank, snapshots=(27, 29))
    scene.say("held", why="nonfinite", poisoned=poisoned)
    assert [Open(kept)] == scene.look()
