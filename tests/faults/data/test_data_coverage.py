"""Fires when the data is cut into more parts than ranks; quiet on subsets, unfinished passes and short last batches."""

from typing import Any

import pytest

from holter.diagnosis import rank_causes
from holter.faults.data.data_coverage import DataCoverage
from holter.faults.window import Note, Window
from holter.records import Feed, Finding
from made_up import made_window

TWICE = "BatchSamplerShard>BatchSampler>DistributedSampler"


def feed(**fields: Any) -> Feed:
    known = {
        "loader": 0, "epoch": 0, "is_end": False, "is_training": True, "dataset": "Text", "dataset_size": 64, "num_batches": 4,
        "batch_size": 4, "num_taken": 0, "num_samples": 0, "sampler": TWICE, "is_shuffling": True, "sampler_epoch": 0, "num_shards": 4,
    }  # fmt: skip
    return Feed(**known | fields)


def judge(*feeds: Feed, ranks: int = 2) -> list[Finding]:
    notes = tuple(Note(rank, 4 if one.is_end else 0, 0, one) for one in feeds for rank in range(ranks))
    window = Window(now_ns=0, world_size=ranks, attached=frozenset(range(ranks)), notes=notes)
    return list(DataCoverage().judge(window))


END: dict[str, Any] = {"is_end": True, "is_training": True, "num_taken": 4, "num_samples": 16}


def test_data_cut_twice_is_seen_at_the_beginning() -> None:
    (finding,) = judge(feed())
    assert finding.summary == (
        "Will take 32 of 64 samples in a whole pass over the data: the data set is cut into 4 parts for 2 ranks."
    )
    assert (finding.severity, finding.first_step) == ("warning", 0)
    (cause,) = rank_causes(finding)
    assert (cause.cause, cause.confidence) == ("double_sharded_data", 0.90)


def test_the_count_at_the_end_is_surer() -> None:
    (finding,) = judge(feed(), feed(**END))
    assert finding.facts["is_counted"] is True
    assert rank_causes(finding)[0].confidence == 0.95
    assert any("counted at the end of pass 0" in e.summary for e in finding.evidence)


def test_four_ranks() -> None:
    (finding,) = judge(feed(dataset_size=256, num_shards=16), ranks=4)
    assert "64 of 256 samples" in finding.summary


def test_data_cut_once_is_healthy() -> None:
    assert judge(feed(num_shards=2, num_batches=8)) == []
    assert (
        judge(feed(num_shards=2, num_batches=8), feed(**END | {"num_taken": 8, "num_samples": 32, "num_shards": 2}))
        == []
    )


def test_a_sampler_that_takes_a_part_on_purpose_is_healthy() -> None:
    assert judge(feed(num_shards=2, sampler="BatchSamplerShard>BatchSampler>SubsetRandomSampler")) == []
    assert judge(feed(num_shards=1, sampler="BatchSampler>RandomSampler")) == []


def test_a_pass_left_in_the_middle_proves_nothing() -> None:
    assert judge(feed(num_shards=2, num_batches=8), feed(num_shards=2, num_batches=8, **END)) == []


def test_dropped_last_batches_are_allowed() -> None:
    assert judge(feed(dataset_size=14, num_batches=1, batch_size=5, num_shards=3)) == []


def test_a_stream_has_no_size() -> None:
    assert judge(feed(dataset_size=-1)) == []
    assert judge(feed(num_batches=-1)) == []


def test_what_is_not_trained_on_is_not_judged() -> None:
    assert judge(feed(is_training=False), feed(**END | {"is_training": False})) == []


def test_a_rank_that_was_not_heard_of_is_waited_for() -> None:
    window = made_window(
        notes=(Note(0, 0, 0, feed()),),
    )
    assert list(DataCoverage().judge(window)) == []


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"data_coverage\.covered must be between 0 and 1, got 2"):
        DataCoverage(covered=2)


@pytest.mark.parametrize(
    ("contents", "whole", "is_found"),
    [((1, 2), -1, True), ((1, 2), 64, True), ((1, 1), 64, False), ((1, 2), 40, False)],
)
def test_data_that_each_rank_cut_by_hand_and_a_sampler_again(
    contents: tuple[int, int], whole: int, *, is_found: bool
) -> None:
    """Each holds 32 and takes 16 of them; equal ones are one data set, and parts drawn at random overlap."""
    feeds = [feed(dataset_size=32, num_shards=2, content=content, whole_size=whole) for content in contents]
    notes = tuple(Note(rank, 0, 0, one) for rank, one in enumerate(feeds))
    window = Window(now_ns=0, world_size=2, attached=frozenset({0, 1}), notes=notes)
    found = list(DataCoverage().judge(window))
    assert bool(found) is is_found
    for finding in found:
        assert "32 of 64 samples" in finding.summary
        assert "cut into 4 parts for 2 ranks" in finding.summary
