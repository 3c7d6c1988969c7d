"""Fires when a scaler lets nothing pass; quiet on one that looks for its scale."""

from holter.diagnosis import top_cause
from holter.faults.learning.skipped_steps import SkippedSteps
from holter.faults.window import Note
from holter.records import Finding, Nonfinite, Origin, Skipped
from made_up import made_window


def skips(num: int, *, first: float = 65536.0, taken: int = 0, step: int = 0, rank: int = 0) -> list[Note]:
    inf = Nonfinite(where="input", name="batch[0]", nans=0, infs=1, numel=64)
    return [
        Note(rank, step, 0, Skipped(in_a_row=i, scale=first / 2**i, lowest_scale=first / 2**i, first_scale=first, loss=1.0, num_taken=taken, nonfinite=[inf]))
        for i in range(1, num + 1)
    ]  # fmt: skip


def judge(*notes: Note) -> list[Finding]:
    return list(SkippedSteps().judge(made_window(notes=notes)))


def test_a_scaler_that_skips_every_step_is_found() -> None:
    (finding,) = judge(*skips(20), *skips(20, rank=1))
    assert (finding.severity, finding.first_step, finding.ranks) == ("critical", 0, (0, 1))
    assert finding.tensors == ("batch[0]",)
    assert top_cause(finding) == "every_step_skipped"
    assert "its scale fell from 65536 to 1" in finding.summary
    assert "16 steps were skipped in a row" in finding.evidence[0].summary


def test_it_is_found_in_the_middle_of_a_run_and_sooner_when_the_scale_is_low() -> None:
    (finding,) = judge(*skips(13, first=1024.0, taken=40, step=40))
    assert (finding.first_step, finding.facts["has_passed_step"]) == (40, True)
    assert finding.facts["has_collapsed_scale"] is True


def test_a_scaler_that_skips_its_first_steps_is_healthy() -> None:
    assert judge(*skips(8), *skips(8, rank=1)) == []
    assert judge(*skips(20, first=2.0**36)) == []


def test_one_success_between_begins_the_count_again() -> None:
    assert judge(*skips(10), *skips(10, first=64.0, taken=1, step=1)) == []


def test_an_overflow_that_was_seen_in_a_skipped_step_is_the_cause() -> None:
    origin = Origin(
        module="head", module_class="Linear", is_input_finite=True, input_absmax=3.0, replayed=True, reason="", dtype="float16",
        dtype_max=65504.0, output_infs=8, output_absmax=0.0, weight_absmax=1e6,
    )  # fmt: skip
    window = made_window(notes=tuple(skips(20)), origins={(0, 0): origin})
    (finding,) = SkippedSteps().judge(window)
    assert (("head",), "activation_overflow") == (finding.modules, top_cause(finding))
    assert "beyond 6.55e+04" in finding.evidence[0].summary
