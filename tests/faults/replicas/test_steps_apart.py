"""Ranks whose count of steps is one off are known by gradients that are each other's, a step later; what is local is told from a clip."""

import msgspec
import pytest
from tests.faults.replicas.test_replica_divergence import NAMES, SECOND, equal, given, parted, table, top, view

from holter.faults.replicas.replica_case import StepsApart, steps_apart
from holter.faults.replicas.replica_divergence import ReplicaDivergence
from holter.faults.shared.parting import find_parting
from holter.faults.window import Spread, StepNumbers, StepView
from holter.records import Finding
from made_up import made_window

OTHER = dict.fromkeys(NAMES, 8)
CLASS = "gradients_reduced"


def views(of_zero: list[int], of_one: list[int], first: int = 30) -> tuple[StepView, ...]:
    """What a reduction gave two ranks, from this step on; 0: nothing was read."""
    found = []
    for place, pair in enumerate(zip(of_zero, of_one, strict=True)):
        roots: dict[int, tuple[int, ...]] = {}
        for rank, root in enumerate(pair):
            if root:
                roots[root] = (*roots.get(root, ()), rank)
        found.append(view(first + place, {CLASS: roots, "hyperparameters": {1: (0,), 2: (1,)}}))
    return tuple(found)


def passes(step: int, zero: int, one: int) -> StepNumbers:
    low, high = (0, 1) if zero <= one else (1, 0)
    spread = Spread((zero + one) / 2, min(zero, one), max(zero, one), low, high, num=2)
    return StepNumbers(step, 0, {"micro_steps": spread})


def judged(steps: tuple[StepView, ...], *counted: StepNumbers) -> list[Finding]:
    at = next(one.step for one in steps if len(one.roots[CLASS]) > 1)
    classes = {CLASS: parted(at, now=at + 4), "gradients": parted(at, now=at + 4), "hyperparameters": parted(at)}
    known = given(CLASS, at, OTHER) | given("gradients", at, OTHER) | given("hyperparameters", at, OTHER)
    known |= given("hyperparameters", at - 1, {}) | given("hyperparameters", at - 2, {})
    window = made_window(now_ns=1000 * SECOND, steps=steps, classes=classes, tables=known, series=counted)
    return list(ReplicaDivergence().judge(window))


SKIPPED = views([10, 11, 12, 13, 14, 15], [10, 12, 13, 14, 15, 16])


def test_a_rank_that_left_out_a_step_is_named_and_its_optimizer_blamed():
    (finding,) = judged(SKIPPED, passes(31, 1, 2))
    assert ("optimizer_state_mismatch", (1,), 31) == (top(finding), finding.ranks, finding.first_step)
    assert any("rank 1 left out an optimizer step" in line.summary for line in finding.evidence)


def test_a_rank_that_took_a_step_too_many_is_named():
    steps = views([10, 0, 11, 12, 13, 14], [10, 11, 12, 13, 14, 15])
    (finding,) = judged(steps, passes(31, 0, 1))
    assert ("optimizer_state_mismatch", (0,)) == (top(finding), finding.ranks)


def test_a_rank_that_makes_a_step_without_a_backward_pass_takes_one_too_many_each_time():
    """Every second step of its is one: no gradients of its are ever those of the others' next step."""
    steps = views([10, 11, 12, 13, 14], [10, 21, 22, 23, 24])
    usual = [passes(step, 1, 1) for step in range(20, 31)]
    (finding,) = judged(steps, *usual, passes(31, 0, 1), passes(33, 0, 1))
    assert ("optimizer_state_mismatch", (0,)) == (top(finding), finding.ranks)
    assert any("without a backward pass, which nobody had done before" in line.summary for line in finding.evidence)
    (habit,) = judged(steps, passes(29, 0, 1), *usual[-1:], passes(31, 0, 1))
    assert top(habit) != "optimizer_state_mismatch"


def test_where_nothing_tells_who_it_was_both_are_named():
    (finding,) = judged(SKIPPED)
    assert ("optimizer_state_mismatch", (0, 1)) == (top(finding), finding.ranks)


@pytest.mark.parametrize(
    ("zero", "one"),
    [
        ([10, 11, 12, 13, 14], [10, 21, 22, 23, 24]),  # gradients that are nobody's
        ([10, 11, 12, 13, 14], [10, 12, 22, 23, 24]),  # once may be chance
        ([10, 11, 11, 11, 11], [10, 11, 12, 11, 11]),  # gradients that stand still
    ],
)
def test_other_gradients_prove_nothing(zero, one):
    window = made_window(steps=views(zero, one), classes={CLASS: parted(31)})
    assert StepsApart() == steps_apart(window, find_parting(window, CLASS))


def added(norm: float, total: float, said: float = 0.0, *, times: int = 3) -> Finding:
    """Rank 1's gradients have this norm and this sum where the reduction left 1 and 1."""
    shown = view(8, {CLASS: {5: (0, 1)}, "gradients": {11: (0,), 22: (1,)}})
    equal_tables = {
        (CLASS, 8, rank): msgspec.structs.replace(table(CLASS, 5, {}), sums=[1.0] * len(NAMES)) for rank in (0, 1)
    }
    changed = given("gradients", 8, OTHER, norms=dict.fromkeys(NAMES, norm), sums=dict.fromkeys(NAMES, total))
    numbers = {"backward.after_reduction": Spread(said, said, said, 1, 1, num=1)} if said else {}
    window = made_window(
        now_ns=1000 * SECOND,
        steps=(shown,),
        classes={CLASS: equal(8), "gradients": parted(8, now=8 + times - 1)},
        tables=equal_tables | changed,
        series=(StepNumbers(8, 0, numbers),),
    )
    (finding,) = ReplicaDivergence().judge(window)
    return finding


def test_gradients_to_which_something_local_was_added_are_no_clip():
    finding = added(1.4, -0.3)
    assert ("gradient_sync_bypassed", (1,)) == (top(finding), finding.ranks)


@pytest.mark.parametrize(("norm", "total"), [(1.4, 1.4), (0.6, 0.2), (0.5, 0.5)], ids=["scaled", "by value", "by norm"])
def test_what_clips_or_scales_stays_uneven_clipping(norm, total):
    assert top(added(norm, total)) == "uneven_clipping"


def test_a_rank_that_says_that_a_pass_came_after_the_reduction_is_believed_of_a_single_step():
    assert top(added(0.6, 0.2, said=1.0, times=1)) == "gradient_sync_bypassed"
    assert top(added(0.6, 0.2, times=1)) == "corrupted_collective"
