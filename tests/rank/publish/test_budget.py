"""The budget is kept, gradients come first, ranks keep meeting at common steps."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holter.rank.publish.budget import (
    CHECK_FLOORS,
    CHECK_SHARE,
    GRADIENT_FLOORS,
    GRADIENT_SHARE,
    MAX_INTERVAL,
    MAX_STRIDE,
    USUAL_INTERVAL,
    Costs,
    Schedule,
    StepPlan,
    plan,
)

seconds = st.floats(min_value=1e-6, max_value=10.0)
dials = st.builds(
    StepPlan,
    gradient_stride=st.sampled_from([1, 2, 4, 8, 16, 32]),
    check_interval=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
)


@given(st.builds(Costs, step_s=seconds, fixed_s=seconds, gradients_s=seconds, check_s=seconds), dials)
def test_what_is_planned_fits_unless_the_dials_are_at_their_end(costs, current):
    chosen = plan(costs, budget=0.01, floor_s=1e-4, current=current)
    budget, floor = 0.01 * costs.step_s, 1e-4
    gradients = costs.gradients_s / chosen.gradient_stride
    checks = costs.check_s * (1 if current.check_interval == 1 else 4 / 3) / chosen.check_interval
    most = max(budget * (1 - CHECK_SHARE) - costs.fixed_s, GRADIENT_SHARE * budget, GRADIENT_FLOORS * floor)
    assert gradients <= most * (1 + 1e-9) or chosen.gradient_stride == MAX_STRIDE
    is_usual = chosen.check_interval == USUAL_INTERVAL and checks <= CHECK_FLOORS * floor
    room = max(budget - costs.fixed_s - gradients, CHECK_SHARE * budget, floor)
    assert checks <= room * (1 + 1e-9) or is_usual or chosen.check_interval == MAX_INTERVAL


def test_short_steps_are_compared_every_eighth_time_as_long_as_that_is_small():
    demo = Costs(step_s=0.06, fixed_s=7e-4, gradients_s=6e-4, check_s=2.5e-3)
    assert plan(demo, budget=0.01, floor_s=5e-4, current=StepPlan()) == StepPlan(1, USUAL_INTERVAL)
    large = Costs(step_s=0.06, fixed_s=7e-4, gradients_s=6e-4, check_s=25e-3)
    assert plan(large, budget=0.01, floor_s=5e-4, current=StepPlan()).check_interval > USUAL_INTERVAL


def test_a_small_model_is_compared_at_every_step_for_a_millisecond_or_two_per_cent():
    short = Costs(step_s=0.012, fixed_s=4e-4, gradients_s=2e-4, check_s=5e-4, is_small=True)
    assert plan(short, budget=0.01, floor_s=5e-4, current=StepPlan()) == StepPlan(1, 1)
    longer = Costs(step_s=0.2, fixed_s=4e-4, gradients_s=4e-4, check_s=2.8e-3, is_small=True)
    assert plan(longer, budget=0.01, floor_s=5e-4, current=StepPlan()) == StepPlan(1, 1)
    large = Costs(step_s=0.012, fixed_s=4e-4, gradients_s=2e-4, check_s=1.5e-3)
    assert plan(large, budget=0.01, floor_s=5e-4, current=StepPlan()).check_interval > 1


def test_a_small_model_is_compared_at_every_step_beside_a_neighbour_who_shares_its_caches():
    # Two gloo ranks of 0.5 M parameters on two shared cores: what their threads were measured to compute.
    shared = Costs(step_s=0.013, fixed_s=1.2e-3, gradients_s=4e-4, check_s=1.3e-3, is_small=True)
    assert plan(shared, budget=0.01, floor_s=5e-4, current=StepPlan()) == StepPlan(1, 1)


def test_a_small_model_without_compiled_kernels_is_not_compared_at_every_step():
    slow = Costs(step_s=0.013, fixed_s=1e-3, gradients_s=0.02, check_s=0.06, is_small=True)
    assert plan(slow, budget=0.01, floor_s=5e-4, current=StepPlan()) == StepPlan(16, 32)


def test_a_neighbours_load_does_not_thin_the_checks():
    schedules = Schedule(budget=0.01, floor_s=5e-4), Schedule(budget=0.01, floor_s=5e-4)
    for schedule, factors in zip(schedules, ((1, 1, 1, 1), (1, 8, 3, 20)), strict=True):
        for step in range(80):
            slow = factors[step % 4]
            is_check = schedule.plan.is_check(step)
            schedule.observe(
                step_s=0.1,
                own_s=(3e-4 + 3e-4 + 3e-4 * is_check) * slow,
                computed_s=(3e-4 + 3e-4 + 3e-4 * is_check) * slow,
                reading_s=(3e-4 + 3e-4 * is_check) * slow,
                gradients_s=3e-4 * slow,
                check_s=3e-4 * slow * is_check,
            )
    quiet, busy = schedules
    assert StepPlan(1, 1) == quiet.plan == busy.plan


def test_what_a_device_spends_counts_as_much_as_what_the_host_does():
    schedules = []
    for device_s in (0.0, 2e-2):
        schedule = Schedule(budget=0.01, floor_s=0.0)
        for step in range(80):
            share = (1 / schedule.plan.gradient_stride + 3 * schedule.plan.is_check(step)) / 4
            schedule.observe(
                step_s=0.5,
                own_s=1e-3,
                computed_s=1e-3,
                reading_s=8e-4,
                gradients_s=4e-4 / schedule.plan.gradient_stride,
                check_s=4e-4 * schedule.plan.is_check(step),
                device_s=device_s * share,
            )
        schedules.append(schedule)
    host, device = schedules
    assert StepPlan(1, 1) == host.plan
    assert device.plan.check_interval > 1


def test_a_rank_is_held_against_its_own_history_right_after_a_comparison():
    assert [0, 1, 9, 18] == [step for step in range(20) if StepPlan(check_interval=8).reads_before(step)]
    assert all(StepPlan(check_interval=1).reads_before(step) for step in range(20))


@given(dials, dials)
def test_ranks_with_other_dials_still_compare_the_same_steps(one, other):
    common = math.lcm(one.check_interval, other.check_interval)
    assert common == max(one.check_interval, other.check_interval)
    (step,) = (step for step in range(5 * common, 6 * common) if StepPlan(check_interval=common).is_check(step))
    assert one.is_check(step)
    assert other.is_check(step)


@pytest.mark.parametrize("interval", [2, 8, 64])
@pytest.mark.parametrize("optimizers", [2, 3, 5])
def test_of_optimizers_that_take_turns_each_is_compared(interval: int, optimizers: int) -> None:
    chosen = [step for step in range(24 * interval) if StepPlan(check_interval=interval).is_check(step)]
    assert set(range(optimizers)) == {step % optimizers for step in chosen}


def test_a_cheap_reading_is_made_at_every_step():
    costs = Costs(step_s=0.5, fixed_s=1e-4, gradients_s=1e-3, check_s=2e-3)
    assert plan(costs, budget=0.01, floor_s=0.0, current=StepPlan()) == StepPlan(1, 1)


def test_a_dear_comparison_is_made_less_often_and_gradients_still_at_every_step():
    costs = Costs(step_s=0.5, fixed_s=1e-4, gradients_s=3e-3, check_s=12e-3)
    chosen = plan(costs, budget=0.01, floor_s=0.0, current=StepPlan(1, 16))
    assert chosen.gradient_stride == 1
    assert chosen.check_interval == 16


def test_one_bad_measurement_does_not_blind():
    schedule = Schedule(budget=0.01, floor_s=0.0)
    for step in range(30):
        noise = 50.0 if step == 10 else 1.0
        schedule.observe(
            step_s=0.5, own_s=2e-3, computed_s=2e-3, reading_s=1.8e-3, gradients_s=1e-3 * noise, check_s=0.8e-3 * noise
        )
    assert schedule.plan == StepPlan(1, 1)


def test_a_bad_measurement_right_after_the_first_steps_does_not_blind():
    schedule = Schedule(budget=0.01, floor_s=5e-4)
    for step in range(12):
        check_s = (1.0 if step >= 4 else 1e-3) if schedule.plan.is_check(step) else 0.0
        schedule.observe(step_s=5e-3, own_s=2e-3, computed_s=2e-3, reading_s=1e-3, gradients_s=1e-4, check_s=check_s)
    assert schedule.plan.check_interval <= 8


def test_the_dials_do_not_flutter():
    schedule = Schedule(budget=0.01, floor_s=0.0)
    seen = []
    for step in range(200):
        is_check = schedule.plan.is_check(step)
        schedule.observe(
            step_s=0.5,
            own_s=6e-3,
            computed_s=6e-3,
            reading_s=5e-3,
            gradients_s=2e-3,
            check_s=(2.8e-3 if step % 2 else 3.1e-3) * is_check,
        )
        seen.append(schedule.plan)
    assert len(set(seen[50:])) == 1


def test_a_sidecar_that_cannot_keep_up_thins_the_comparisons():
    schedule = Schedule(budget=0.5, floor_s=0.0)
    schedule.thin(3)
    for _ in range(20):
        schedule.observe(step_s=0.5, own_s=2e-3, computed_s=2e-3, reading_s=1.8e-3, gradients_s=1e-3, check_s=1e-3)
    assert schedule.plan.check_interval == 8


def test_the_ratio_is_what_we_took_of_the_rest():
    schedule = Schedule(budget=0.01, floor_s=0.0)
    for _ in range(20):
        schedule.observe(step_s=1.1, own_s=0.1, computed_s=0.1, reading_s=0.1, gradients_s=0.05, check_s=0.05)
    assert math.isclose(schedule.overhead_ratio, 0.1)
