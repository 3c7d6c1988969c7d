"""A stage of a pipeline that computes longer than it used to, told by its own passes."""

import pytest
from tests.made_up import made_window

from holter.diagnosis import rank_causes
from holter.faults.slowness.slow_stage import SlowStage
from holter.faults.window import CensusChange, Note, Spread, StepNumbers
from holter.records import Finding, StageTimes


def judged(times_of, changes=()) -> list[Finding]:
    """Four stages; `times_of(rank, report)` -> forward seconds of each of four micro-batches. Ten reports of eight steps of a second's length in all."""
    notes = [
        Note(
            rank,
            8 * number + 7,
            0,
            StageTimes(stage=rank, num_steps=8, forward_s=times_of(rank, number), backward_s=[0.004] * 4),
        )
        for number in range(10)
        for rank in range(4)
    ]
    series = tuple(StepNumbers(step, step, {"seconds": Spread(0.4, 0.4, 0.4, 0, 0, 4)}) for step in range(80))
    return list(SlowStage().judge(made_window(world_size=4, series=series, notes=tuple(notes), changes=changes)))


def test_a_stage_that_becomes_slow_is_named_with_its_rank():
    (finding,) = judged(lambda rank, number: [0.06 if rank == 1 and number > 3 else 0.004] * 4)
    assert ("warning", (1,), 32) == (finding.severity, finding.ranks, finding.first_step)
    assert "Stage 1" in finding.summary
    assert "micro-batch" not in finding.summary
    assert "slow_compute" == rank_causes(finding)[0].cause


def test_one_slow_micro_batch_is_named():
    (finding,) = judged(lambda rank, number: [0.004, 0.004, 0.1 if rank == 2 and number > 4 else 0.004, 0.004])
    assert "in the forward pass of micro-batch 2" in finding.summary
    assert 2 == finding.evidence[0].values["micro_batch"]


@pytest.mark.parametrize(
    "times_of",
    [
        lambda rank, _number: [0.06 if rank == 1 else 0.004] * 4,
        lambda _rank, number: [0.06 if number > 3 else 0.004] * 4,
        lambda rank, number: [0.06 if rank == 1 and number == 5 else 0.004] * 4,
        lambda rank, number: [0.06 if rank == 1 and number > 7 else 0.004] * 4,
        lambda rank, number: [0.006 if rank == 1 and number > 3 else 0.002] * 4,
    ],
    ids=["larger_from_the_start", "all_slower", "once", "not_sure_yet", "little"],
)
def test_what_is_meant_or_passes_is_silent(times_of):
    assert [] == judged(times_of)


def test_a_stage_whose_layers_are_trained_from_then_on_has_more_to_do():

    def times_of(rank, number):
        return [0.06 if rank == 1 and number > 3 else 0.004] * 4

    for step, is_said in ((32, False), (10, True)):
        changes = (CensusChange(1, step, "block.weight", "requires_grad", "False", "True"),)
        assert is_said == bool(judged(times_of, changes))
