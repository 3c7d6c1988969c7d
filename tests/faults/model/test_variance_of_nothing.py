"""Fires on torch's own warning, and on no other."""

from holter.diagnosis import rank_causes
from holter.faults.model.variance_of_nothing import VarianceOfNothing
from holter.faults.window import Note
from holter.records import Finding, ScriptWarning
from made_up import made_window

TEXT = "std(): degrees of freedom is <= 0. Correction should be strictly less than the reduction factor"


def judge(*notes: Note) -> list[Finding]:
    return list(VarianceOfNothing().judge(made_window(notes=notes)))


def test_a_variance_over_one_sample_is_named_with_its_place() -> None:
    warned = ScriptWarning(text=TEXT, where="model.py:31", module="halting")
    (finding,) = judge(Note(1, 7, 0, warned), Note(0, 5, 0, warned))
    assert (finding.severity, finding.first_step, finding.ranks, finding.modules) == (
        "warning",
        5,
        (0, 1),
        ("halting",),
    )
    assert finding.summary == (
        "A variance was taken over one sample or none at model.py:31 in module 'halting', step 5, on ranks 0 and 1."
    )
    (cause,) = rank_causes(finding)
    assert (cause.cause, cause.confidence) == ("variance_without_samples", 0.95)


def test_two_places_are_one_finding() -> None:
    first, second = (ScriptWarning(text=TEXT, where=f"model.py:{line}") for line in (31, 40))
    (finding,) = judge(Note(0, 5, 0, first), Note(0, 5, 0, second))
    assert finding.facts["where"] == ["model.py:31", "model.py:40"]
    assert "model.py:31 and 1 more places" in finding.summary


def test_other_warnings_raise_nothing() -> None:
    assert (
        judge(Note(0, 5, 0, ScriptWarning(text="lr_scheduler.step() before optimizer.step()", where="train.py:3")))
        == []
    )
