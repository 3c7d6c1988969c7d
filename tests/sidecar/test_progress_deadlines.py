"""How long a rank may stay in a phase: conservative at first, learned afterwards, never blind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holter import patience
from holter.patience import BEYOND, FIRST_STEPS, LONGEST_S, PHASES
from holter.records import Census, Phase, StepDone, TensorEntry
from holter.sidecar.progress import SETUP, Deadlines

LEARNED = [phase for phase in Phase if phase is not Phase.ATTACH]


def done(micro_steps: int = 1, **phase_seconds: float) -> StepDone:
    return StepDone(
        seconds=sum(phase_seconds.values()),
        phase_seconds=phase_seconds,
        micro_steps=micro_steps,
        loss=None,
        gradient_norm=None,
        learning_rate=None,
        batch=0,
        roots={},
        nonfinite=[],
        overhead_ratio=0.0,
        check_interval=1,
    )


def census(num_parameters: int, *, part: int = 0, parts: int = 1, dtype: str = "float32") -> Census:
    entries = [
        TensorEntry("weight", (num_parameters // 2, 2), dtype, True, False, 0),
        TensorEntry("running_mean", (10**9,), "float32", False, True, -1),
    ]
    return Census(
        model=0,
        wrapper="",
        is_replicated=True,
        optimizers=[],
        backward_order=[],
        part=part,
        parts=parts,
        entries=entries,
    )


def trained(step_s: float, num_steps: int = 50) -> Deadlines:
    """After some steps whose phases share their time."""
    deadlines = Deadlines()
    for step in range(num_steps):
        deadlines.reach_step(step)
        for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER):
            deadlines.learn_wait(phase, step, step_s / 4, step * step_s)
    deadlines.reach_step(num_steps)
    return deadlines


@pytest.mark.parametrize("phase", [Phase.ATTACH, Phase.OTHER])
def test_what_is_prepared_before_the_first_step_is_given_half_an_hour(phase):
    allowed = Deadlines().allowed(phase, 1.0)
    assert (1800.0, 15.0) == (allowed.deadline_s, allowed.suspect_s)


@pytest.mark.parametrize("phase", list(Phase))
def test_the_first_steps_are_given_ten_minutes(phase):
    deadlines = Deadlines()
    for step in range(FIRST_STEPS):
        deadlines.reach_step(step)
        if step == 0 and phase in SETUP:
            continue
        allowed = deadlines.allowed(phase, 1.0)
        assert (600.0, 15.0) == (allowed.deadline_s, allowed.suspect_s)
        assert f"the first 3 steps may take long and {step} are done, so 600 s are allowed" == allowed.because


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER])
def test_short_steps_get_the_floor(phase):
    allowed = trained(0.08).allowed(phase, 4.0)
    assert (6.0, 3.0) == (allowed.deadline_s, allowed.suspect_s)
    assert f"in {phase.name.lower()} was 0.02 s, so 6 s are allowed" in allowed.because


def test_storage_that_hesitates_for_some_seconds_is_no_stalled_loader():
    allowed = trained(0.08).allowed(Phase.DATA, 4.0)
    assert (10.0, 5.0) == (allowed.deadline_s, allowed.suspect_s)


def test_a_job_whose_steps_take_long_gets_minutes():
    allowed = trained(80.0).allowed(Phase.BACKWARD, 4000.0)
    assert pytest.approx(61.0, rel=0.01) == allowed.deadline_s
    assert "the longest of 47 waits in backward was 20 s, so 61 s are allowed" == allowed.because
    assert trained(240.0).allowed(Phase.FORWARD, 12000.0).deadline_s > 120


def test_what_the_first_steps_needed_to_compile_is_no_measure_for_the_others():
    deadlines = Deadlines()
    deadlines.reach_step(0)
    deadlines.learn_wait(Phase.FORWARD, 0, 90.0, 90.0)
    deadlines.reach_step(FIRST_STEPS)
    assert deadlines.allowed(Phase.FORWARD, 91.0).deadline_s > 270
    for step in range(FIRST_STEPS, FIRST_STEPS + 4):
        deadlines.learn_wait(Phase.FORWARD, step, 0.05, 92.0)
    assert 6.0 == deadlines.allowed(Phase.FORWARD, 93.0).deadline_s


def test_workers_of_a_loader_start_with_every_epoch_so_their_first_start_is_remembered():
    deadlines = Deadlines()
    deadlines.reach_step(0)
    deadlines.learn_wait(Phase.DATA, 0, 8.0, 8.0)
    for step in range(1, 100):
        deadlines.reach_step(step)
        deadlines.learn_wait(Phase.DATA, step, 0.01, 8.0 + step)
    assert deadlines.allowed(Phase.DATA, 120.0).deadline_s > 24


def test_data_is_patient_until_sixteen_batches_were_seen():
    deadlines = Deadlines()
    deadlines.reach_step(0)
    deadlines.reach_step(FIRST_STEPS)
    for number in range(16):
        allowed = deadlines.allowed(Phase.DATA, 1.0)
        assert 20.0 == allowed.deadline_s, number
        deadlines.learn_wait(Phase.DATA, FIRST_STEPS, 0.01, 1.0)
    assert 10.0 == deadlines.allowed(Phase.DATA, 1.0).deadline_s


def test_a_phase_that_was_never_seen_is_given_a_minute():
    allowed = trained(0.05).allowed(Phase.EVALUATION, 3.0)
    assert (60.0, "evaluation was never seen before, so 60 s are allowed") == (allowed.deadline_s, allowed.because)


def test_steps_too_short_to_be_seen_are_known_by_what_the_rank_says_of_them():
    deadlines = Deadlines()
    deadlines.reach_step(0)
    for step in range(10):
        deadlines.learn_step(step, done(2, forward=0.002, backward=0.004, data=0.0, checkpoint=5.0), 0.1)
    assert 6.0 == deadlines.allowed(Phase.FORWARD, 0.2).deadline_s
    assert "the longest of 14 waits in forward was 0.001 s" in deadlines.allowed(Phase.FORWARD, 0.2).because
    assert 10.0 == deadlines.allowed(Phase.DATA, 0.2).deadline_s


def test_a_first_checkpoint_is_allowed_what_its_bytes_need():
    deadlines = trained(0.05)
    deadlines.learn_census(census(10**9))
    allowed = deadlines.allowed(Phase.CHECKPOINT, 3.0)
    assert pytest.approx(3 * 4e9 / 50e6 + 20) == allowed.deadline_s
    assert "no whole checkpoint has been seen yet and the parameters have 4 GB, so 260 s are allowed" == allowed.because
    deadlines.learn_census(census(10**9, dtype="bfloat16"))
    assert pytest.approx(3 * 2e9 / 50e6 + 20) == deadlines.allowed(Phase.CHECKPOINT, 3.0).deadline_s
    deadlines.learn_census(census(10**9, part=1, parts=2))
    assert pytest.approx(3 * 6e9 / 50e6 + 20) == deadlines.allowed(Phase.CHECKPOINT, 3.0).deadline_s
    deadlines.learn_census(census(10**12))
    assert 1800.0 == deadlines.allowed(Phase.CHECKPOINT, 3.0).deadline_s


def test_a_small_save_does_not_speak_for_the_checkpoint_that_it_begins():
    deadlines = trained(0.05)
    deadlines.learn_census(census(10**9))
    deadlines.learn_wait(Phase.CHECKPOINT, 50, 0.01, 3.0)
    assert 260.0 == deadlines.allowed(Phase.CHECKPOINT, 3.0).deadline_s
    deadlines.learn_wait(Phase.CHECKPOINT, 50, 30.0, 33.0)
    deadlines.learn_wait(Phase.CHECKPOINT, 100, 0.01, 40.0)
    assert pytest.approx(91.0, rel=0.01) == deadlines.allowed(Phase.CHECKPOINT, 40.0).deadline_s


def test_checkpoints_that_are_known_have_a_floor_of_their_own():
    deadlines = trained(0.05)
    for step in (50, 75):
        deadlines.learn_wait(Phase.CHECKPOINT, step, 0.5, 3.0)
    assert 10.0 == deadlines.allowed(Phase.CHECKPOINT, 3.0).deadline_s


def test_an_evaluation_has_an_end_once_there_is_a_second():
    deadlines, seen = Deadlines(), []
    for step in range(12):
        seen.append(deadlines.has_evaluated)
        deadlines.learn_step(step, done(forward=0.1, **({"evaluation": 1.0} if step in (4, 9) else {})), float(step))
    assert [False] * 10 + [True] * 2 == seen


def test_a_run_that_is_resumed_or_met_late_has_first_steps_too():
    deadlines = Deadlines()
    deadlines.reach_step(5000)
    deadlines.learn_wait(Phase.FORWARD, 5000, 100.0, 1.0)
    assert 600.0 == deadlines.allowed(Phase.FORWARD, 1.0).deadline_s
    deadlines.reach_step(5003)
    for _ in range(4):
        deadlines.learn_wait(Phase.FORWARD, 5003, 0.1, 2.0)
    assert 6.0 == deadlines.allowed(Phase.FORWARD, 2.0).deadline_s


def test_an_interpreter_that_is_ending_is_given_time():
    deadlines = trained(0.05)
    deadlines.learn_farewell()
    allowed = deadlines.allowed(Phase.OTHER, 3.0)
    assert (120.0, "its interpreter is ending, so 120 s are allowed") == (allowed.deadline_s, allowed.because)


waits = st.floats(0, 5000)


def taught(phase: Phase, lengths: list[float]) -> Deadlines:
    deadlines = trained(0.05, 10)
    for number, wait_s in enumerate(lengths):
        deadlines.learn_wait(phase, 10 + number, wait_s, 10.0 + number)
    return deadlines


@settings(deadline=None)
@given(st.sampled_from(LEARNED), st.lists(waits, max_size=30))
def test_never_below_the_floor_nor_the_longest_wait_seen_lately_and_never_above_the_ceiling(phase, lengths):
    rule = PHASES[phase]
    allowed = taught(phase, lengths).allowed(phase, 10.0 + len(lengths))
    longest_s = min(max(lengths, default=0.0), LONGEST_S)
    assert rule.floor_s <= allowed.deadline_s
    assert 0.99 * longest_s <= allowed.suspect_s <= allowed.deadline_s
    assert allowed.deadline_s <= max(rule.ceiling_s, BEYOND * longest_s)


@settings(deadline=None)
@given(st.sampled_from(LEARNED), st.lists(waits, max_size=30), waits)
def test_a_longer_wait_never_shortens_what_is_allowed(phase, lengths, longer):
    before = taught(phase, [*lengths, 0.0]).allowed(phase, 100.0).deadline_s
    after = taught(phase, [*lengths, longer]).allowed(phase, 100.0).deadline_s
    assert after >= before


@settings(deadline=None)
@given(st.sampled_from(LEARNED), st.floats(0, LONGEST_S))
def test_a_wait_that_ended_well_is_no_news_the_second_time(phase, wait_s):
    deadlines = taught(phase, [0.1] * 20)
    deadlines.learn_wait(phase, 40, wait_s, 50.0)
    deadlines.learn_wait(phase, 41, 0.1, 51.0)
    assert deadlines.allowed(phase, 60.0).suspect_s >= 0.99 * wait_s


@settings(deadline=None)
@given(st.sampled_from(LEARNED), st.floats(0, 1e6))
def test_one_odd_wait_blinds_nobody_for_ever(phase, wait_s):
    deadlines = taught(phase, [0.1] * 20)
    deadlines.learn_wait(phase, 40, wait_s, 50.0)
    soon = deadlines.allowed(phase, 60.0).deadline_s
    years_s = 3e8
    for _ in range(20):
        deadlines.learn_wait(phase, 10**6, 0.1, years_s)
    later = deadlines.allowed(phase, years_s).deadline_s
    assert soon <= max(PHASES[phase].ceiling_s, BEYOND * LONGEST_S)
    assert later == PHASES[phase].floor_s


def test_what_recurs_every_few_hours_is_remembered():
    deadlines = trained(0.05)
    for number in range(5):
        at_s = number * 3 * 3600.0
        assert number == 0 or deadlines.allowed(Phase.OTHER, at_s).deadline_s > 30.0
        deadlines.learn_wait(Phase.OTHER, 50 + number, 30.0, at_s + 30.0)


def test_a_rank_whose_kernels_are_compiled_is_given_time_until_that_is_over_or_has_lasted_too_long():
    deadlines = trained(0.1)
    deadlines.learn_preparing(100.0, is_over=False)
    allowed = deadlines.allowed(Phase.FORWARD, 101.0)
    assert patience.FIRST_S == allowed.deadline_s
    assert "kernels are being compiled" in allowed.because
    assert patience.FIRST_S > deadlines.allowed(Phase.FORWARD, 100.0 + patience.PREPARING_S).deadline_s
    deadlines.learn_preparing(102.0, is_over=True)
    assert patience.FIRST_S > deadlines.allowed(Phase.FORWARD, 102.0).deadline_s
