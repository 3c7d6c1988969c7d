"""One class that has nearly all labels; sorted, balanced and merely uneven data are silent."""

from collections.abc import Mapping, Sequence

from holter.diagnosis import rank_causes
from holter.faults import Window
from holter.faults.data.label_counts import LabelCounts
from holter.faults.window import Note
from holter.records import Finding, Labels


def judge(stretches: Sequence[Mapping[int, int]], *, is_weighted: bool = False) -> list[Finding]:
    notes = tuple(
        Note(
            rank,
            12 * (number + 1),
            number,
            Labels(counts=dict(counts), num_classes=3, is_weighted=is_weighted, first_step=12 * number),
        )
        for number, counts in enumerate(stretches)
        for rank in (0, 1)
    )
    return list(LabelCounts().judge(Window(now_ns=0, world_size=2, attached=frozenset({0, 1}), notes=notes)))


def test_a_class_with_nearly_all_labels_is_told_with_counts():
    (finding,) = judge([{0: 97, 1: 3}, {0: 98, 1: 2}, {0: 97, 1: 3}])
    assert ("info", 0, 36) == (finding.severity, finding.first_step, finding.detected_step)
    assert "Class 0 has 584 of 600 labels (97.3 %)." == finding.summary
    assert "of 3 classes 1 never came" in finding.evidence[0].summary
    assert ["class_imbalance"] == [cause.cause for cause in rank_causes(finding)]


def test_whether_the_loss_weighs_its_classes_is_said():
    (finding,) = judge([{0: 97, 1: 3}] * 3, is_weighted=True)
    assert "the loss weighs its classes" == finding.evidence[1].summary


def test_sorted_data_is_silent_while_one_class_follows_the_other():
    assert [] == judge([{0: 100}] * 5)
    assert [] == judge([{0: 100}] * 5 + [{0: 97, 1: 3}])
    assert [] == judge([{0: 100}] * 5 + [{0: 50, 1: 50}, {1: 100}])


def test_uneven_and_few_labels_are_silent():
    assert [] == judge([{0: 90, 1: 10}] * 4)
    assert [] == judge([{0: 19, 1: 1}] * 3)


def by_rank(*counts: Mapping[int, int]) -> list[Finding]:
    notes = tuple(
        Note(rank, 36, rank, Labels(counts=dict(each), num_classes=10, is_weighted=False, first_step=24))
        for rank, each in enumerate(counts)
    )
    world = len(counts)
    return list(LabelCounts().judge(Window(now_ns=0, world_size=world, attached=frozenset(range(world)), notes=notes)))


def test_one_rank_with_one_label_beside_others_with_several_is_named():
    (finding,) = by_rank({0: 60, 1: 70, 2: 62}, {0: 192})
    assert ("warning", (1,), 24) == (finding.severity, finding.ranks, finding.first_step)
    assert "corrupt_labels_or_range" == rank_causes(finding)[0].cause


def test_ranks_that_have_each_a_class_of_their_own_and_small_batches_are_silent():
    assert [] == by_rank({0: 192}, {1: 192})
    assert [] == by_rank({0: 180, 1: 12}, {1: 192})
    assert [] == by_rank({0: 10, 1: 12}, {1: 22})


def test_a_rank_without_labels_of_its_own_is_nobodys_measure():
    assert [] == by_rank({3: 400}, {})
    assert [] == by_rank({}, {})
