"""Fires where ranks of a tensor-parallel group are fed other batches; ranks of other data-parallel places may be."""

from holter.diagnosis import rank_causes
from holter.faults import StepView, Window
from holter.faults.data.parallel_inputs import ParallelInputs
from holter.faults.window import ModelView
from holter.records import Census, MeshAxis

AXES = [MeshAxis("dp", 2, 2, "data"), MeshAxis("tp", 2, 1, "tensor")]


def judge(batches, axes=AXES, num_steps=5):
    told = Census(
        model=0,
        wrapper="",
        is_replicated=False,
        optimizers=[],
        backward_order=[],
        part=0,
        parts=1,
        entries=[],
        axes=axes,
    )
    views = tuple(StepView(step, 0, 4, (), batches=batches(step)) for step in range(num_steps))
    ranks = frozenset(range(4))
    return list(
        ParallelInputs().judge(Window(0, 4, ranks, steps=views, models=ModelView(census=dict.fromkeys(ranks, told))))
    )


def test_a_rank_of_a_group_that_is_fed_another_batch_is_found_with_the_axis():
    (finding,) = judge(lambda step: {step: (0, 1), 10 + step: (2,), 20 + step: (3,)})
    assert ((2, 3), 0) == (finding.ranks, finding.first_step)
    assert ("tp", [[2, 3]]) == (finding.evidence[0].values["axis"], finding.evidence[0].values["subgroups"])
    assert "parallel_input_mismatch" == rank_causes(finding)[0].cause


def test_a_majority_of_the_group_is_taken_for_the_sound_side():
    (finding,) = judge(lambda step: {step: (0, 1, 3), 10 + step: (2,)}, [MeshAxis("tp", 4, 1, "tensor")])
    assert (2,) == finding.ranks


def test_groups_that_agree_among_themselves_and_a_single_step_are_silent():
    assert [] == judge(lambda step: {step: (0, 1), 10 + step: (2, 3)})
    assert [] == judge(lambda step: {step: (0, 1), 10 + step: (2, 3)} if step != 4 else {1: (0, 1), 2: (2,), 3: (3,)})


def test_where_no_axis_carries_parts_of_one_result_nothing_must_agree():
    assert [] == judge(lambda step: {step: (0,), 10 + step: (1, 2), 20 + step: (3,)}, [MeshAxis("dp", 4, 1, "data")])
