"""The last line of a run."""

from holter.coordinator.closing import RunSummary, closing_line
from holter.records import Healthy
from made_up import HALT, diagnosis


def test_a_healthy_run_says_so() -> None:
    healthy = Healthy(step=400, path="out/step-400")
    line = closing_line(RunSummary(run_dir="runs/a", steps=400, last_healthy=healthy))
    assert (
        line
        == "ended after 400 steps · no incident · last healthy checkpoint of step 400: out/step-400 · holter report runs/a"
    )


def test_what_was_not_seen_is_not_called_healthy() -> None:
    line = closing_line(RunSummary(run_dir="runs/a", steps=4, blind=("rank 1 has not been heard for 9 s",)))
    assert "no incident, but not all was seen: rank 1 has not been heard for 9 s" in line


def test_incidents_are_named_with_rank_and_step_and_the_rest_is_counted() -> None:
    found = tuple(diagnosis(first_step=step) for step in (3, 5, 7, 9))
    line = closing_line(RunSummary(run_dir="runs/a", steps=10, incidents=found))
    assert "4 incidents: Non-finite input (nonfinite_input) on rank 1 at step 3 (critical), " in line
    assert " and 1 more · no healthy checkpoint is known · holter report runs/a" in line


def test_a_halted_run_says_from_where_to_go_on() -> None:
    line = closing_line(RunSummary(run_dir="runs/a", steps=31, incidents=(diagnosis(),), halt=HALT))
    assert line.startswith(
        "halted after 30 steps · 1 incident: Non-finite input (nonfinite_input) on rank 1 at step 30 (critical)"
    )
    assert " · go on from step 30: checkpoints/30/state (healthy) · holter report runs/a" in line
