"""The faults of the corpus that this version names, each beside its healthy twin: real processes, no script imports holter."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = pytest.mark.job

NET = {"encoder.weight", "encoder.bias", "block.0.weight", "block.0.bias", "block.2.weight", "block.2.bias"}
NET |= {"head.weight", "head.bias"}


def test_a_nan_in_a_batch_is_blamed_on_the_rank_that_fed_it(jobs):
    top = jobs.run(SCRIPTS / "nan_in_batch.py").top
    assert top["cause"] == "nonfinite_input"
    assert top["ranks"] == [1]
    assert top["basis"] == "observation"


def test_a_nan_in_a_batch_is_dated_and_said_in_the_log_while_the_job_runs(jobs):
    ended = jobs.run(SCRIPTS / "nan_in_batch.py", "--steps", 4000, by="accelerate")
    assert [30] == [diagnosis["first_step"] for diagnosis in ended.diagnoses]
    assert any("nonfinite_input on rank 1 at step 30" in line for line in ended.holter_lines)


def test_a_nan_made_in_the_forward_pass_is_traced_to_its_module(jobs):
    ended = jobs.run(SCRIPTS / "nan_in_forward.py")
    assert ended.top["cause"] == "nonfinite_forward"
    assert ended.top["ranks"] == [1]
    assert ended.top["modules"] == ["body.compress"]
    assert ended.diagnoses[0]["first_step"] == 20


def test_a_nan_made_in_the_backward_pass_is_traced_to_its_tensor(jobs):
    ended = jobs.run(SCRIPTS / "nan_in_backward.py")
    assert ended.top["cause"] == "nonfinite_backward"
    assert ended.top["ranks"] == [1]
    assert ended.top["tensors"][0] == "centre.weight"
    assert ended.diagnoses[0]["first_step"] == 20


def test_replicas_that_start_apart_are_named_from_step_0(jobs):
    ended = jobs.run(SCRIPTS / "seed_per_rank.py")
    assert ended.top["cause"] == "unsynced_initialisation"
    assert set(ended.top["tensors"]) == NET
    assert ended.diagnoses[0]["first_step"] == 0


@pytest.mark.parametrize("script", ["lost_hooks.py", "raw_module.py"])
def test_gradients_that_are_never_reduced_are_named(jobs, script):
    ended = jobs.run(SCRIPTS / script)
    assert ended.top["cause"] == "gradient_sync_bypassed"
    assert set(ended.top["tensors"]) == NET
    assert ended.diagnoses[0]["first_step"] == 0


def test_a_flipped_bit_is_found_on_its_rank_in_its_tensor_at_its_step(jobs):
    ended = jobs.run(SCRIPTS / "flipped_bit.py", options=["--overhead-budget", "1"])
    assert ended.top["cause"] == "silent_data_corruption"
    assert ended.top["ranks"] == [1]
    assert ended.top["tensors"] == ["block.0.weight"]
    assert ended.diagnoses[0]["first_step"] == 20


@pytest.mark.parametrize(("how", "said"), [("kill", "SIGKILL"), ("exception", "KeyError: 'sample-17'"), ("exit", "7")])
def test_a_dead_rank_is_named_with_how_it_died(jobs, how, said):
    ended = jobs.run(SCRIPTS / "dying_rank.py", how)
    assert ended.code != 0
    assert ended.top["cause"] == "rank_dead"
    assert ended.top["ranks"] == [1]
    assert any(said in str(evidence) for evidence in ended.top["evidence"])
    assert ended.diagnoses[0]["first_step"] == 20


def test_an_exception_on_all_ranks_names_all(jobs):
    top = jobs.run(SCRIPTS / "dying_rank.py", "all_raise").top
    assert top["cause"] == "rank_dead"
    assert top["ranks"] == [0, 1]


@pytest.mark.parametrize(
    "script",
    ["nan_in_batch", "nan_in_forward", "nan_in_backward", "seed_per_rank", "lost_hooks", "raw_module", "flipped_bit"],
)
def test_the_healthy_twin_raises_nothing(jobs, script):
    ended = jobs.run(SCRIPTS / f"{script}.py", "--healthy")
    assert ended.code == 0, ended.stderr[-2000:]
    assert ended.alarms == []


def test_an_ordinary_end_raises_nothing(jobs):
    ended = jobs.run(SCRIPTS / "dying_rank.py", "end")
    assert ended.code == 0
    assert ended.diagnoses == []


def test_a_clean_run_of_1000_steps_raises_nothing(jobs):
    ended = jobs.run(SCRIPTS / "nan_in_batch.py", "--healthy", "--steps", 1000)
    assert ended.code == 0, ended.stderr[-2000:]
    assert ended.diagnoses == []
