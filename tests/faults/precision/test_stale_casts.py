"""Fires when swapped weights leave the output as it was; quiet on weights that hardly differ."""

from holter.diagnosis import top_cause
from holter.faults.precision.stale_casts import StaleCasts
from holter.faults.window import Note, Spread, StepNumbers
from holter.records import Finding, Swapped
from made_up import made_window


def swap(step: int, distance: float, *, rank: int = 0, same_input: bool = True, same_output: bool = True) -> Note:
    body = Swapped(distance=distance, is_input_equal=same_input, is_output_equal=same_output, num_times=1)
    return Note(rank, step, 0, body)


def judge(*notes: Note, kl: float | None = None, name: str = "log.kl") -> list[Finding]:
    series = () if kl is None else tuple(StepNumbers(s, 0, {name: Spread(kl, kl, kl, 0, 1, 2)}) for s in range(5))
    window = made_window(notes=notes, series=series)
    return list(StaleCasts().judge(window))


def test_other_weights_and_the_same_output_are_a_stale_cache() -> None:
    (finding,) = judge(swap(3, 0.02), swap(3, 0.02, rank=1), kl=0.0)
    assert (finding.severity, finding.first_step, finding.ranks) == ("critical", 3, (0, 1))
    assert top_cause(finding) == "stale_autocast_cache"
    assert any("relative distance of 0.02" in one.summary for one in finding.evidence)
    assert any("logged KL was exactly 0 at all 5 steps" in one.summary for one in finding.evidence)


def test_without_a_log_the_output_is_enough() -> None:
    (finding,) = judge(swap(3, 0.02))
    assert any("exactly 0" in one.summary for one in finding.evidence)
    assert finding.facts["is_kl_zero"] is None


def test_a_logged_kl_of_zero_is_enough_where_the_inputs_differ() -> None:
    (finding,) = judge(swap(3, 0.02, same_input=False, same_output=False), kl=0.0, name="log.train/kl_loss")
    assert finding.facts["is_output_equal"] is None
    assert top_cause(finding) == "stale_autocast_cache"
    assert judge(swap(3, 0.02, same_input=False, same_output=False), kl=0.0, name="log.klaxon") == []


def test_other_outputs_are_healthy() -> None:
    assert judge(swap(3, 0.02, same_output=False), kl=0.01) == []
    assert judge(swap(3, 0.02, same_output=False), kl=0.0) == []


def test_equal_weights_have_equal_outputs() -> None:
    assert judge(*(swap(step, 0.0) for step in range(9)), kl=0.0) == []


def test_weights_that_hardly_differ_count_only_when_seen_again() -> None:
    assert judge(swap(1, 2e-6), swap(2, 4e-6)) == []
    assert judge(*(swap(step, 1e-8) for step in range(9))) == []
    assert len(judge(swap(1, 2e-6), swap(2, 4e-6), swap(3, 6e-6))) == 1
