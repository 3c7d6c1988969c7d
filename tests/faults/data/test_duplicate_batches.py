"""Fires when replicas read the same batches step after step; quiet on parallelism by tensors, one batch for ever, coincidence."""

from collections.abc import Sequence

import pytest

from holter.diagnosis import top_cause
from holter.faults.data.duplicate_batches import DuplicateBatches
from holter.faults.window import Note, StepView
from holter.records import Census, Component, Feed, Finding, TensorEntry
from made_up import made_window

Batches = dict[int, tuple[int, ...]]


def census(num_replicas: int) -> Census:
    return Census(
        model=0,
        wrapper="DistributedDataParallel",
        is_replicated=True,
        optimizers=["AdamW"],
        components=[Component("", "GPT", "DistributedDataParallel", True, num_replicas)],
        backward_order=[],
        part=0,
        parts=1,
        entries=[TensorEntry("fc.weight", (4, 4), "float32", True, False, 0, num_replicas > 0)],
    )


def judge(
    batches: Sequence[Batches], *, ranks: int = 2, num_replicas: int | None = None, notes: tuple[Note, ...] = ()
) -> list[Finding]:
    one = census(ranks if num_replicas is None else num_replicas)
    window = made_window(
        now_ns=0,
        world_size=ranks,
        attached=frozenset(range(ranks)),
        steps=tuple(StepView(step, step, ranks, (), batches=of_step) for step, of_step in enumerate(batches)),
        census=dict.fromkeys(range(ranks), one),
        notes=notes,
    )
    return list(DuplicateBatches().judge(window))


def shared(num: int) -> list[Batches]:
    return [{100 + step: (0, 1)} for step in range(num)]


def own(num: int) -> list[Batches]:
    return [{100 + step: (0,), 900 + step: (1,)} for step in range(num)]


def test_replicas_that_read_the_same_batches_are_named_after_four_steps() -> None:
    assert judge(shared(3)) == []
    (finding,) = judge(shared(4))
    assert (finding.severity, finding.first_step, finding.ranks) == ("warning", 0, (0, 1))
    assert top_cause(finding) == "duplicate_data_across_ranks"
    assert "Ranks 0 and 1 trained on the same batches" in finding.summary
    assert any("at 4 steps compared, 0 to 3" in e.summary for e in finding.evidence)


def test_ranks_with_batches_of_their_own_are_healthy() -> None:
    assert judge(own(30)) == []


def test_a_coincidence_is_no_proof() -> None:
    assert judge([*own(5), *shared(1)]) == []
    assert judge([*shared(3), *own(1)]) == []


def test_one_batch_for_ever_is_no_proof() -> None:
    assert judge([{7: (0, 1)}] * 30) == []
    assert judge([{7 + step % 2: (0, 1)} for step in range(30)]) == []


def test_ranks_that_share_one_model_read_the_same_batch_on_purpose() -> None:
    pairs = [{step: (0, 1), 100 + step: (2, 3)} for step in range(10)]
    assert judge(pairs, ranks=4, num_replicas=2) == []
    assert judge(shared(10), num_replicas=0) == []


def test_only_the_ranks_that_share_are_named() -> None:
    (finding,) = judge([{step: (1, 3), 100 + step: (0,), 200 + step: (2,)} for step in range(6)], ranks=4)
    assert finding.ranks == (1, 3)


def test_pairs_are_told_apart() -> None:
    (finding,) = judge([{step: (0, 1), 100 + step: (2, 3)} for step in range(6)], ranks=4)
    assert finding.ranks == (0, 1, 2, 3)
    assert "Ranks 0 and 1 and ranks 2 and 3, each group alike," in finding.summary


def test_it_says_since_when() -> None:
    (finding,) = judge([*own(10), *[{500 + step: (0, 1)} for step in range(5)]])
    assert finding.first_step == 10


def test_steps_without_signatures_are_passed_over() -> None:
    (finding,) = judge([one for batch in shared(5) for one in (batch, {})])
    assert finding.first_step == 0


def test_the_loader_is_shown() -> None:
    feed = Feed(
        loader=0, epoch=0, is_end=False, is_training=True, dataset="Text", dataset_size=64, num_batches=16, batch_size=4,
        num_taken=0, num_samples=0, sampler="BatchSampler>SequentialSampler", is_shuffling=False, sampler_epoch=-1, num_shards=1,
    )  # fmt: skip
    (finding,) = judge(shared(6), notes=tuple(Note(rank, 0, 0, feed) for rank in (0, 1)))
    assert finding.facts["is_loader_cut"] is False
    assert any("does not cut the data set" in e.summary for e in finding.evidence)


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"duplicate_batches\.min_steps must be at least 2, got 1"):
        DuplicateBatches(min_steps=1)
