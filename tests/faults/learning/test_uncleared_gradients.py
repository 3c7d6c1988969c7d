"""Fires on left-over gradients that add up; quiet on the resting half of a pair of optimizers."""

from holter.diagnosis import top_cause
from holter.faults.learning.uncleared_gradients import UnclearedGradients
from holter.faults.window import Note, Spread, StepNumbers
from holter.records import Census, Finding, Vitals
from made_up import made_window


def judge(*growths: float, num_optimizers: int = 1, first: int = 1, interval: int = 1) -> list[Finding]:
    notes = tuple(
        Note(rank, first + i * interval, 0, Vitals(view="local", modules=[], num_trainable=4, uncleared_steps=i + 1 if growth else 0, uncleared_growth=growth))
        for i, growth in enumerate(growths)
        for rank in (0, 1)
    )  # fmt: skip
    census = Census(
        model=0, wrapper="", is_replicated=True, optimizers=["SGD"] * num_optimizers, backward_order=[], part=0, parts=1, entries=[]
    )  # fmt: skip
    norms = tuple(StepNumbers(s, 0, {"gradient_norm": Spread(s + 1.0, s, s, 0, 0, 2)}) for s in range(len(growths)))
    window = made_window(notes=notes, census={0: census, 1: census}, series=norms)
    return list(UnclearedGradients().judge(window))


def test_gradients_that_nobody_clears_are_found_with_their_beginning() -> None:
    (finding,) = judge(1.0, 1.4, 1.9, 2.2, 2.6, 3.0, 3.4, 3.9)
    assert (finding.severity, finding.first_step, finding.detected_step, finding.ranks) == ("critical", 1, 5, (0, 1))
    assert top_cause(finding) == "gradients_never_cleared"
    assert "5 checked steps in a row" in finding.evidence[0].summary


def test_cleared_gradients_are_silent() -> None:
    assert judge(*[0.0] * 40) == []


def test_left_overs_that_are_clipped_do_not_grow_and_are_a_warning_once_they_last() -> None:
    clipped = [1.0, 0.9, 1.1, 1.05, 0.95]
    assert [] == judge(*clipped * 3)
    (finding,) = judge(*clipped * 5)
    assert ("warning", 1, 17) == (finding.severity, finding.first_step, finding.detected_step)
    assert "gradients_never_cleared" == top_cause(finding)
    assert [] == judge(*clipped * 5, num_optimizers=2)


def test_one_growing_step_is_no_streak() -> None:
    assert judge(1.0, 1.0, 1.0, 1.0, 1.5, 1.0, 1.1) == []


def test_the_resting_one_of_two_optimizers_leaves_its_last_gradient() -> None:
    assert judge(*[1.0, 1.5, 2.5, 1.8, 3.0] * 12, num_optimizers=2) == []


def test_with_two_optimizers_a_sum_is_found_later() -> None:
    (finding,) = judge(*(1.0 + 0.5 * i for i in range(40)), num_optimizers=2)
    assert finding.first_step == 1
