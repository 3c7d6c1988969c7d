"""Suspect, overdue, moved: each once for a standstill, and only for a rank's own."""

import math
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holter.page import PageHeartbeat
from holter.records import Overdue, Phase, ProcessState
from holter.sidecar.progress import Deadlines, ProgressWatch

POLL_S = 0.05


def process(state: str = "running", stopped_s: float = 0.0, channel: str = "") -> ProcessState:
    return ProcessState(state=state, cpu_s=1.0, cpu_share=math.nan, stopped_s=stopped_s, wait_channel=channel)


RUNNING = process()


class Rank:
    """A rank on a clock of its own, looked at every 50 ms."""

    def __init__(self) -> None:
        self.watch = ProgressWatch(Deadlines())
        self.now_s = 1000.0
        self.step = 0
        self.beat: PageHeartbeat | None = None
        self.said: list[tuple[float, Overdue]] = []

    def at(self, phase: Phase) -> None:
        self.beat = PageHeartbeat(step=self.step, phase=phase, micro_step=0, at_ns=int(self.now_s * 1e9))

    def stay(self, seconds: float, state: ProcessState = RUNNING) -> None:
        began_s = self.now_s
        while self.now_s - began_s < seconds - 1e-9:
            self.now_s += POLL_S
            self.look(state)

    def halt(self, seconds: float, name: str) -> None:
        began_s = self.now_s
        while self.now_s - began_s < seconds - 1e-9:
            self.now_s += POLL_S
            self.look(process(name, stopped_s=self.now_s - began_s))

    def look(self, state: ProcessState | None = RUNNING) -> None:
        overdue = self.watch.look(self.beat, state, self.now_s)
        if overdue is not None:
            self.said.append((self.now_s, overdue))

    def train(self, num_steps: int, phase_s: float = 0.05) -> None:
        for _ in range(num_steps):
            for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER):
                self.at(phase)
                self.stay(phase_s)
            self.step += 1

    @property
    def tiers(self) -> list[str]:
        return [overdue.tier for _, overdue in self.said]


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_a_standstill_is_suspect_then_overdue_and_each_is_said_once(rank):
    rank.train(43)
    assert [] == rank.said
    rank.at(Phase.FORWARD)
    began_s = rank.now_s
    rank.stay(60)
    (suspected_s, suspect), (overdue_s, overdue) = rank.said
    assert pytest.approx(3.0, abs=0.2) == suspected_s - began_s
    assert pytest.approx(6.0, abs=0.2) == overdue_s - began_s
    assert ("suspect", Phase.FORWARD, 3.0) == (suspect.tier, suspect.phase, suspect.deadline_s)
    assert ("overdue", Phase.FORWARD, 6.0) == (overdue.tier, overdue.phase, overdue.deadline_s)
    assert pytest.approx(6.0, abs=0.1) == overdue.waited_s
    assert "the longest of 40 waits in forward was 0.05 s, so 6 s are allowed" == overdue.because


def test_a_rank_that_goes_on_is_said_to_have_moved_and_its_wait_teaches(rank):
    rank.train(20)
    rank.at(Phase.BACKWARD)
    rank.stay(8)
    rank.train(20)
    assert ["suspect", "overdue", "moved"] == rank.tiers
    moved = rank.said[-1][1]
    assert ("it went on after 8 s", Phase.BACKWARD) == (moved.because, moved.phase)
    rank.at(Phase.BACKWARD)
    rank.stay(8)
    rank.train(1)
    assert ["suspect", "overdue", "moved"] == rank.tiers


def test_a_standstill_after_another_is_said_anew(rank):
    rank.train(20)
    for _ in range(2):
        rank.at(Phase.FORWARD)
        rank.stay(30)
        rank.train(1)
        rank.stay(0.1)
        rank.at(Phase.OPTIMIZER)
        rank.stay(30)
        rank.train(1)
    assert ["suspect", "overdue", "moved"] * 2 == rank.tiers[:6]


def test_nothing_is_said_before_the_first_beat_nor_after_the_end(rank):
    rank.stay(2000)
    rank.halt(10, "stopped")
    rank.train(20)
    rank.stay(2, process("zombie"))
    rank.stay(100, process("gone"))
    assert [] == rank.said
    assert 0.0 == ProgressWatch(Deadlines()).waited_s(5.0)


def test_the_first_steps_may_take_their_time(rank):
    rank.at(Phase.OTHER)
    rank.stay(100)
    rank.at(Phase.FORWARD)
    rank.stay(250)
    rank.train(20)
    assert ["suspect", "moved"] * 2 == [said.tier for _, said in rank.said]
    assert [15.0, 15.0] == [said.deadline_s for _, said in rank.said if said.tier == "suspect"]
    assert [0, 0] == [said.num_steps for _, said in rank.said if said.tier == "suspect"]


@pytest.mark.parametrize("state", ["stopped", "traced", "frozen"])
@pytest.mark.parametrize("num_steps", [0, 20])
def test_a_process_that_is_halted_is_suspect_after_one_second_and_overdue_after_three(rank, state, num_steps):
    rank.train(num_steps)
    rank.at(Phase.CHECKPOINT)
    rank.look()
    began_s = rank.now_s
    rank.halt(20, state)
    (suspected_s, suspect), (overdue_s, overdue) = rank.said
    assert pytest.approx(1.0, abs=0.1) == suspected_s - began_s
    assert pytest.approx(3.0, abs=0.1) == overdue_s - began_s
    assert (1.0, 3.0) == (suspect.deadline_s, overdue.deadline_s)
    assert f"its process has been {state} for 3 s, and one that works never is" == overdue.because


def test_a_short_halt_is_nothing(rank):
    rank.train(20)
    rank.at(Phase.FORWARD)
    rank.halt(0.8, "traced")
    rank.train(5)
    assert [] == rank.said


def test_a_process_that_runs_again_has_moved_and_its_halt_is_not_held_against_its_phase(rank):
    rank.train(20)
    rank.at(Phase.FORWARD)
    rank.halt(100, "stopped")
    rank.stay(1.5)
    assert ["suspect", "overdue", "moved"] == rank.tiers
    assert "its process runs again" == rank.said[-1][1].because
    rank.train(5)
    rank.at(Phase.FORWARD)
    rank.stay(7)
    # The halt was not learned as a healthy wait.
    assert ["suspect", "overdue"] == rank.tiers[3:]


def test_a_process_that_runs_again_and_does_not_go_on_is_suspect_again(rank):
    rank.train(20)
    rank.at(Phase.FORWARD)
    rank.halt(5, "stopped")
    rank.stay(10)
    assert ["suspect", "overdue", "moved", "suspect", "overdue"] == rank.tiers


def test_one_long_uninterruptible_sleep_is_suspect_and_the_phase_decides_the_rest(rank):
    rank.train(20)
    rank.at(Phase.CHECKPOINT)
    rank.look()
    began_s = rank.now_s
    while rank.now_s - began_s < 15:
        rank.now_s += POLL_S
        rank.look(process("uninterruptible", rank.now_s - began_s, "nfs_wait_bit_killable"))
    assert ["suspect"] == rank.tiers
    assert (
        "its process has been in one uninterruptible sleep in nfs_wait_bit_killable for 5 s" == rank.said[0][1].because
    )


def test_the_time_in_which_we_were_not_let_run_is_not_the_ranks(rank):
    rank.train(20)
    rank.at(Phase.FORWARD)
    rank.stay(2)
    rank.now_s += 3600.0
    rank.look()
    rank.stay(0.9)
    assert [] == rank.said
    assert pytest.approx(2.9, abs=0.2) == rank.watch.waited_s(rank.now_s)
    rank.stay(0.3)
    assert ["suspect"] == rank.tiers
    rank.train(5)
    rank.at(Phase.FORWARD)
    rank.stay(20)
    # Nor was it learned: the hour would allow another.
    assert ["suspect", "moved", "suspect", "overdue"] == rank.tiers


def test_beats_that_were_missed_belong_to_the_phase_that_was_seen_last(rank):
    rank.train(20)
    rank.at(Phase.FORWARD)
    rank.look()
    rank.now_s += 0.9
    rank.at(Phase.OTHER)
    rank.look()
    allowed = rank.watch._deadlines.allowed(Phase.FORWARD, rank.now_s)
    assert "was 0.9 s" in allowed.because


def test_slow_checkpoints_evaluations_and_first_steps_raise_nothing_on_the_rank_that_makes_them(rank):
    rank.at(Phase.OTHER)
    rank.stay(14)
    rank.at(Phase.FORWARD)
    rank.stay(14)
    for number in range(5):
        rank.train(20)
        for _ in range(4):
            rank.at(Phase.DATA)
            rank.stay(0.1)
            rank.at(Phase.EVALUATION)
            rank.stay(5.0)
        rank.train(5)
        rank.at(Phase.CHECKPOINT)
        rank.stay(0.1)
        rank.at(Phase.CHECKPOINT)
        rank.stay(8.0 + number)
        rank.at(Phase.OTHER)
        rank.stay(0.1)
    assert [] == rank.said


def test_steps_that_become_slower_all_together_are_suspected_at_most_and_then_known(rank):
    rank.train(20, 0.1)
    rank.train(5, 4.0)
    first = len(rank.said)
    assert "overdue" not in rank.tiers
    rank.train(20, 4.0)
    assert first == len(rank.said)


HEALTHY = st.lists(
    st.tuples(st.sampled_from(list(Phase)[1:]), st.floats(0.05, 2.9), st.integers(0, 1)), min_size=1, max_size=60
)


@settings(deadline=None, max_examples=40)
@given(HEALTHY)
def test_waits_under_three_seconds_never_raise_a_suspicion(waits: Iterable[tuple[Phase, float, int]]):
    rank = Rank()
    rank.train(5)
    for phase, wait_s, is_step in waits:
        rank.at(phase)
        rank.stay(wait_s)
        rank.step += is_step
    assert [] == rank.said


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(list(Phase)[1:]), st.floats(0.05, 40.0)), min_size=1, max_size=20))
def test_tiers_come_in_order_and_end_with_a_move(waits):
    rank = Rank()
    rank.train(5)
    for phase, wait_s in waits:
        rank.at(phase)
        rank.stay(wait_s)
    rank.train(1)
    text = "".join({"suspect": "s", "overdue": "o", "moved": "m"}[tier] for tier in rank.tiers)
    assert "" == text.replace("som", "").replace("sm", "")


def test_a_sidecar_that_is_always_late_is_not_blind() -> None:
    rank = Rank()
    rank.train(20)
    rank.at(Phase.FORWARD)
    for _ in range(30):
        rank.now_s += 2.5
        rank.look()
    assert ["suspect", "overdue"] == [overdue.tier for _, overdue in rank.said]
