"""Fires before the shortest rank runs out; quiet on evaluation, equal lengths, loaders begun anew, and jobs without reductions."""

from typing import Any

import pytest

from holter.diagnosis import top_cause
from holter.faults.data.batch_lengths import BatchLengths
from holter.faults.window import Note, Spread, StepNumbers, StepView
from holter.records import Census, Component, Feed, Finding, TensorEntry
from made_up import made_window


def note(rank: int, num_batches: int, step: int = 0, **fields: Any) -> Note:
    known = {
        "loader": 0, "epoch": 0, "is_end": False, "is_training": True, "dataset": "Text", "dataset_size": 64,
        "num_batches": num_batches, "batch_size": 4, "num_taken": 0, "num_samples": 0, "sampler": "BatchSampler>SequentialSampler",
        "is_shuffling": False, "sampler_epoch": -1, "num_shards": 1,
    }  # fmt: skip
    return Note(rank, step, 0, Feed(**known | fields))


def judge(
    *notes: Note,
    last_step: int = 3,
    num_replicas: int = 2,
    ranks: int = 2,
    entries: tuple[TensorEntry, ...] = (),
    micro: int = 1,
) -> list[Finding]:
    census = Census(
        model=0,
        wrapper="DistributedDataParallel",
        is_replicated=True,
        optimizers=["SGD"],
        components=[Component("", "MLP", "DistributedDataParallel", True, num_replicas)],
        backward_order=[],
        part=0,
        parts=1,
        entries=list(entries or [TensorEntry("fc.weight", (8, 16), "float32", True, False, 0, num_replicas > 0)]),
    )
    spread = Spread(micro, micro, micro, 0, 1, ranks)
    window = made_window(
        now_ns=0,
        world_size=ranks,
        attached=frozenset(range(ranks)),
        steps=tuple(StepView(step, 0, ranks, ()) for step in range(last_step + 1)),
        series=tuple(StepNumbers(step, 0, {"micro_steps": spread}) for step in range(last_step + 1)),
        census=dict.fromkeys(range(ranks), census),
        notes=notes,
    )
    return list(BatchLengths().judge(window))


def test_a_batch_more_on_one_rank_is_told_long_before_it_hangs() -> None:
    (finding,) = judge(note(0, 20), note(1, 21))
    assert (finding.severity, finding.ranks, finding.first_step) == ("warning", (1,), 0)
    assert top_cause(finding) == "uneven_batches"
    assert finding.evidence[-1].values["short_step"] == 20
    assert finding.facts["ranks_running_out"] == [0]
    assert finding.summary == (
        "Rank 0 will run out of data before step 20, while rank 1 has batches left and will wait there for ever."
    )
    assert any("20 on rank 0 and 21 on rank 1" in e.summary for e in finding.evidence)


def test_four_ranks_and_accumulation() -> None:
    (finding,) = judge(
        note(0, 40, 7), note(1, 40, 7), note(2, 32, 7), note(3, 40, 7), last_step=10, ranks=4, num_replicas=4, micro=4
    )
    assert finding.ranks == (0, 1, 3)
    assert finding.evidence[-1].values["short_step"] == 15
    assert finding.facts["ranks_running_out"] == [2]


def test_equal_lengths_are_healthy() -> None:
    assert judge(note(0, 20), note(1, 20), last_step=19) == []


def test_an_uneven_evaluation_is_healthy() -> None:
    train = [note(rank, 20) for rank in (0, 1)]
    begins = [note(rank, 5 + rank, 10, loader=1, is_training=False) for rank in (0, 1)]
    ends = [note(rank, 5 + rank, 10, loader=1, is_end=True, is_training=False, num_taken=5 + rank) for rank in (0, 1)]
    assert judge(*train, *begins, *ends, last_step=15) == []
    assert judge(*train, *begins, last_step=15) == []


def test_a_loader_without_a_length_says_nothing() -> None:
    assert judge(note(0, -1), note(1, 21)) == []


def test_ranks_that_never_meet_may_differ() -> None:
    assert judge(note(0, 20), note(1, 21), num_replicas=0) == []


def test_a_sharded_model_must_keep_pace_too() -> None:
    weight = TensorEntry("fc.weight", (8, 16), "float32", True, False, 0, False, True)
    assert len(judge(note(0, 20), note(1, 21), num_replicas=0, entries=(weight,))) == 1


def test_a_loader_that_is_begun_anew_copes() -> None:
    anew = note(0, 20, 20, epoch=1, is_training=True)
    assert judge(note(0, 20), note(1, 21), anew, last_step=25) == []


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"batch_lengths\.min_difference must be at least 1, got 0"):
        BatchLengths(min_difference=0)
