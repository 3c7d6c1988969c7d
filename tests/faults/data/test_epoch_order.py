"""Fires when a shuffling sampler repeats itself; quiet without shuffling, on handfuls of samples and on one batch for ever."""

import math
from typing import Any

import pytest

from holter.diagnosis import rank_causes, top_cause
from holter.faults.data.epoch_order import EpochOrder
from holter.faults.window import Note, Spread, StepNumbers, StepView
from holter.records import Feed, Finding
from made_up import made_window


def feed(epoch: int, order: int, **fields: Any) -> Feed:
    known = {
        "loader": 0, "epoch": epoch, "is_end": True, "is_training": True, "dataset": "Text", "dataset_size": 64, "num_batches": 8,
        "batch_size": 4, "num_taken": 8, "num_samples": 32, "sampler": "BatchSampler>DistributedSampler", "is_shuffling": True,
        "sampler_epoch": 0, "num_shards": 2, "order": order,
    }  # fmt: skip
    return Feed(**known | fields)


def judge(*feeds: Feed, ranks: tuple[int, ...] = (0, 1), signatures: tuple[int, ...] = ()) -> list[Finding]:
    notes = tuple(
        Note(rank, 8 * (one.epoch + is_end), 0, one if is_end else feed(one.epoch, 0, is_end=False, is_training=False))
        for one in feeds
        for is_end in (False, True)
        for rank in ranks
    )
    steps = tuple(StepView(step, 0, 2, (), batches={of: (0,)}) for step, of in enumerate(signatures))
    window = made_window(notes=notes, steps=steps)
    return list(EpochOrder().judge(window))


def test_two_epochs_in_one_order_are_named() -> None:
    (finding,) = judge(feed(0, 11), feed(1, 11))
    assert (finding.severity, finding.first_step, finding.detected_step, finding.ranks) == ("warning", 8, 16, (0, 1))
    assert top_cause(finding) == "repeated_epoch_order"
    assert "Passes 0 and 1 over the data came in the same order on ranks 0 and 1" in finding.summary
    assert any("its epoch was 0 each time" in e.summary for e in finding.evidence)


def test_it_began_with_the_first_repeat_however_late_it_is_judged() -> None:
    (finding,) = judge(feed(0, 9), *(feed(epoch, 11) for epoch in range(1, 7)))
    assert (finding.first_step, finding.detected_step) == (16, 56)
    assert "Passes 1 to 6 over the data" in finding.summary


def test_of_passes_between_the_first_and_the_newest_nothing_needs_to_be_known() -> None:
    (finding,) = judge(feed(0, 11), feed(6, 11), feed(7, 11))
    assert (finding.first_step, finding.detected_step) == (8, 64)
    assert "Passes 0, 6 and 7 over the data" in finding.summary
    (finding,) = judge(feed(0, 9), feed(6, 11), feed(7, 11))
    assert finding.first_step == 56
    assert not judge(feed(0, 11), feed(5, 12), feed(7, 11))


def test_a_sampler_that_takes_no_epoch_is_named_too() -> None:
    (finding,) = judge(
        *(feed(epoch, 11, sampler="BatchSampler>RandomSampler", sampler_epoch=-1, num_shards=1) for epoch in (0, 1))
    )
    assert rank_causes(finding)[0].confidence == 0.88


def test_only_the_rank_that_repeats_is_named() -> None:
    (finding,) = judge(feed(0, 11), feed(1, 11), ranks=(1,))
    assert finding.ranks == (1,)


@pytest.mark.parametrize(
    "feeds",
    [
        [feed(0, 11), feed(1, 12)],
        [feed(0, 11)],
        [feed(0, 11, is_shuffling=False), feed(1, 11, is_shuffling=False)],
        [feed(0, 11, sampler_epoch=0), feed(1, 11, sampler_epoch=1)],
        [feed(0, 0), feed(1, 0)],
        [feed(0, 11, is_training=False), feed(1, 11, is_training=False)],
        [feed(0, 11, num_taken=3), feed(1, 11, num_taken=3)],
        [
            feed(0, 11, num_taken=4, num_samples=4, num_batches=4),
            feed(1, 11, num_taken=4, num_samples=4, num_batches=4),
        ],
        [feed(0, 11, num_samples=8), feed(1, 11, num_samples=8)],
    ],
    ids=[
        "other order",
        "one pass",
        "in order on purpose",
        "told a new epoch",
        "unknown",
        "evaluation",
        "left",
        "four",
        "eight",
    ],
)
def test_healthy_passes_raise_nothing(feeds: list[Feed]) -> None:
    assert judge(*feeds) == []


def test_the_newest_passes_count_when_older_ones_are_forgotten() -> None:
    (finding,) = judge(feed(7, 11), feed(8, 11))
    assert finding.first_step == 64
    assert judge(feed(4, 11), feed(8, 11)) == []


def test_one_batch_for_ever_has_no_order() -> None:
    assert judge(feed(0, 11), feed(1, 11), signatures=(5, 5, 5, 5)) == []
    assert len(judge(feed(0, 11), feed(1, 11), signatures=(5, 6, 7, 5))) == 1


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"epoch_order\.min_batches must be at least 2, got 1"):
        EpochOrder(min_batches=1)


def test_a_batch_that_a_rank_keeps_is_named_and_one_batch_from_the_start_is_not() -> None:
    (finding,) = judge(signatures=(*range(1, 21), *[99] * 18))
    assert ((0,), 20) == (finding.ranks, finding.first_step)
    assert top_cause(finding) == "repeated_epoch_order"
    assert judge(signatures=(*range(1, 21), *[99] * 10)) == []
    assert judge(signatures=(99,) * 60) == []
    assert judge(signatures=(1, 2) * 30) == []


def inputs(means: list[float], spread: float = 1.0) -> list[Finding]:
    def one(value: float) -> Spread:
        return Spread(value, value - 0.1, value + 0.1, 0, 1, 2)

    series = tuple(
        StepNumbers(
            step, step, {"batch.input.mean": one(mean), "batch.input.spread": Spread(spread, spread, spread, 0, 1, 2)}
        )
        for step, mean in enumerate(means)
    )
    return list(EpochOrder().judge(made_window(series=series)))


def test_inputs_that_the_script_keeps_although_its_loader_goes_on_are_named_on_all_ranks() -> None:
    (finding,) = inputs([*(step / 7 for step in range(20)), *[5.0] * 17])
    assert ((0, 1), 20) == (finding.ranks, finding.first_step)
    assert inputs([5.0] * 60) == []
    assert inputs([*(step / 7 for step in range(20)), *[5.0] * 17], spread=0.0) == []


def test_one_rank_alone_that_keeps_its_inputs_is_named() -> None:
    """The other's differ at each step, now above and now below."""

    def pair(own: float, other: float) -> Spread:
        low, high = sorted((own, other))
        return Spread((own + other) / 2, low, high, int(own > other), int(own < other), 2)

    def judged(kept: list[float], spread: float = 1.0) -> list[Finding]:
        others = [math.sin(step) for step in range(len(kept))]
        numbers = [
            {"batch.x.mean": pair(own, other), "batch.x.spread": pair(spread, 1.1 + other / 10)}
            for own, other in zip(kept, others, strict=True)
        ]
        series = tuple(StepNumbers(step, 0, each) for step, each in enumerate(numbers))
        return list(EpochOrder().judge(made_window(series=series)))

    (finding,) = judged([*(step / 70 for step in range(20)), *[0.3] * 17])
    assert ((0,), 20, "warning") == (finding.ranks, finding.first_step, finding.severity)
    assert "repeated_epoch_order" == top_cause(finding)
    assert [] == judged([0.3] * 60)
    assert [] == judged([*(step / 70 for step in range(20)), *[1.0] * 17], spread=0.0), "a mask of full sequences"
    assert [] == judged([step / 70 for step in range(37)])


@pytest.mark.parametrize("num", [2, 4])
def test_positions_of_full_sequences_beside_other_tokens_are_no_kept_batch(num: int) -> None:
    """Padded to the longest at first, then packed."""

    def spread(values: list[float]) -> Spread:
        low, high = min(values), max(values)
        return Spread(sum(values) / num, low, high, values.index(low), values.index(high), num)

    lengths = [[20.0 + step % 13 + 3 * rank for rank in range(num)] for step in range(20)] + [[64.0] * num] * 20
    tokens = [[100 + math.sin(7 * step + 3 * rank) for rank in range(num)] for step in range(40)]
    series = tuple(
        StepNumbers(
            step,
            0,
            {
                "batch.position_ids.mean": spread(length),
                "batch.position_ids.spread": spread(length),
                "batch.input_ids.mean": spread(token),
                "batch.input_ids.spread": spread([2 * one for one in token]),
            },
        )
        for step, (length, token) in enumerate(zip(lengths, tokens, strict=True))
    )
    assert [] == list(EpochOrder().judge(made_window(world_size=num, series=series)))
