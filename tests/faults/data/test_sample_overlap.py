"""Samples that are evaluated and trained on; what is the same by chance or on purpose is not a warning."""

from typing import Any

import pytest

from holter.diagnosis import rank_causes
from holter.faults import Window
from holter.faults.data.sample_overlap import SampleOverlap
from holter.faults.window import Note
from holter.records import Finding, Overlap


def overlap(**changed: Any) -> Overlap:
    said = {
        "loader": 1, "dataset": "Held", "num_evaluated": 100, "num_met": 30, "num_trained": 1000, "num_pairs": 100_000,
        "num_repeats": 0, "is_distinctive": True, "is_same_dataset": False,
    }  # fmt: skip
    return Overlap(**(said | changed))


def judge(*told: tuple[int, Overlap]) -> list[Finding]:
    notes = tuple(Note(rank, 20 + number, number, body) for number, (rank, body) in enumerate(told))
    return list(SampleOverlap().judge(Window(now_ns=0, world_size=2, attached=frozenset({0, 1}), notes=notes)))


def test_what_all_ranks_met_is_counted_together_and_explained():
    (finding,) = judge((0, overlap(num_met=3)), (0, overlap()), (1, overlap(num_met=10)))
    assert ("warning", (0, 1), 20, 22) == (
        finding.severity,
        finding.ranks,
        finding.first_step,
        finding.detected_step,
    )
    assert "40 of 200 samples of the loader of Held that were looked at are trained on." == finding.summary
    assert (40, 200) == tuple(finding.evidence[0].values[name] for name in ("num_met", "num_evaluated"))
    assert ["data_leakage"] == [cause.cause for cause in rank_causes(finding)]


@pytest.mark.parametrize(
    "changed", [{"is_same_dataset": True}, {"num_clean": 50}, {"loader": -1}, {"num_evaluated": 10_000}]
)
def test_what_may_be_meant_or_is_a_few_duplicates_is_information(changed: dict[str, Any]):
    (finding,) = judge((0, overlap(**changed)))
    assert "info" == finding.severity
    assert ["data_leakage"] == [cause.cause for cause in rank_causes(finding)]


def test_samples_that_repeat_within_a_pass_are_the_same_by_chance():
    assert [] == judge((0, overlap(is_distinctive=False, num_repeats=400)))
    assert [] == judge((0, overlap(is_distinctive=False, num_pairs=1000)))
    assert 1 == len(judge((0, overlap(is_distinctive=False))))


def test_two_samples_are_no_leak():
    assert [] == judge((0, overlap(num_met=2)))
