"""Fires on a model that is trained in evaluation mode, everywhere or on a rank; quiet on frozen normalisation and on evaluations that are over."""

from holter.diagnosis import top_cause
from holter.faults.learning.evaluation_mode import EvaluationMode
from holter.faults.window import Note, Spread, StepNumbers
from holter.records import Finding, Modes, Named
from made_up import made_window


def modes(*names: str, whole: bool = True, sensitive: int = 2) -> Modes:
    return Modes(model="", evaluating=Named(len(names), list(names)), num_sensitive=sensitive, is_whole=whole)


def judge(*told: tuple[int, int, Modes], now: int = 30, ranks: int = 2) -> list[Finding]:
    notes = tuple(Note(rank, step, 0, body) for rank, step, body in sorted(told, key=lambda one: one[1]))
    series = tuple(StepNumbers(step, step, {"loss": Spread(1.0, 1.0, 1.0, 0, 1, ranks)}) for step in range(now + 1))
    return list(EvaluationMode().judge(made_window(0, ranks, frozenset(range(ranks)), notes=notes, series=series)))


BOTH = modes("norm", "drop")


def test_a_model_in_evaluation_mode_on_all_ranks_is_found_and_explained() -> None:
    (finding,) = judge((0, 20, BOTH), (1, 20, BOTH))
    assert (20, 28, (0, 1)) == (finding.first_step, finding.detected_step, finding.ranks)
    assert ("norm", "drop") == finding.modules
    assert "2 of 2 modules" in finding.evidence[0].summary
    assert "trained_in_evaluation_mode" == top_cause(finding)


def test_a_rank_in_another_mode_is_named_whichever_module_it_is() -> None:
    for rank in (0, 1):
        (finding,) = judge((rank, 5, modes("drop", whole=False)))
        assert (rank,) == finding.ranks
        assert (5, 8) == (finding.first_step, finding.detected_step)
        assert "trained_in_evaluation_mode" == top_cause(finding)


def test_of_many_ranks_the_few_are_named_even_if_they_are_the_ones_that_train() -> None:
    (finding,) = judge(*((rank, 0, BOTH) for rank in (0, 1, 3)), ranks=4)
    assert (2,) == finding.ranks


def test_ranks_that_evaluate_different_modules_differ_too() -> None:
    (finding,) = judge((0, 0, modes("norm", whole=False)), (1, 0, modes("norm", "drop", whole=False)))
    assert (1,) == finding.ranks


def test_normalisation_that_all_ranks_froze_is_silent() -> None:
    frozen = modes("norm", whole=False)
    assert [] == judge((0, 0, frozen), (1, 0, frozen))
    # The model was put into evaluation mode, and a part of it back into training: that is meant.
    part = modes("norm")
    assert [] == judge((0, 0, part), (1, 0, part))


def test_a_mode_that_is_over_or_young_is_silent() -> None:
    back = modes(whole=False)
    assert [] == judge((0, 20, BOTH), (1, 20, BOTH), (0, 22, back), (1, 22, back))
    assert [] == judge((0, 20, BOTH), (1, 20, BOTH), now=25)
    assert [] == judge((0, 20, BOTH), now=21)
