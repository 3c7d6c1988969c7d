"""The corpus of faults, each beside its healthy twin, and the runs in which nothing is wrong: real processes, no script imports holter."""

import json

import pytest

from corpus import (
    CASES,
    COMPOSED_CASES,
    COMPOSITION_CASES,
    MESH_CASES,
    MISSED,
    RECIPES,
    RECIPES_IN_MAKE_TEST,
    SCRIPTS,
    SILENT,
    SILENT_IN_MAKE_TEST,
    STAGE_CASES,
    fault,
    missed,
    mistakes,
    recipe,
    silent,
    twin,
)
from holter import cli

pytestmark = pytest.mark.job

RELEASE = pytest.mark.release
ALL_CASES = (*CASES, *MESH_CASES, *COMPOSED_CASES, *COMPOSITION_CASES, *STAGE_CASES)
FAULTS = [pytest.param(case, fault(case), id=case.name, marks=() if case.family else RELEASE) for case in ALL_CASES]
HEALTHY = [
    *(pytest.param(silent(name), id=name, marks=() if name in SILENT_IN_MAKE_TEST else RELEASE) for name in SILENT),
    *(pytest.param(twin(case), id=case.name, marks=RELEASE) for case in ALL_CASES),
    *(pytest.param(missed(kind, is_healthy=True), id=f"missed-{kind}", marks=RELEASE) for kind in MISSED),
    *(
        pytest.param(recipe(name, ranks), id=f"recipe-{name}", marks=() if name in RECIPES_IN_MAKE_TEST else RELEASE)
        for name, ranks in RECIPES.items()
    ),
]


def said(command, run_dir, capsys):
    """What `holter report` says, or `holter replay` from the journal alone."""
    assert cli.main([command, str(run_dir), "--json"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


def substance(diagnoses):
    """What must not depend on when it was judged."""
    return [
        (
            diagnosis["severity"],
            diagnosis["first_step"],
            [(cause["cause"], cause["ranks"], cause["tensors"], cause["modules"]) for cause in diagnosis["causes"]],
        )
        for diagnosis in diagnoses
    ]


@pytest.mark.parametrize(("case", "job"), FAULTS)
def test_a_fault_is_named_with_rank_tensor_and_step_live_and_in_replay(ended, capsys, case, job):
    run = ended(job)
    reported = said("report", run.run_dir, capsys)
    assert mistakes(case, reported) == [], run.stderr[-2000:]
    assert substance(said("replay", run.run_dir, capsys)) == substance(reported)


@pytest.mark.parametrize("job", HEALTHY)
def test_a_healthy_run_raises_nothing(ended, capsys, job):
    run = ended(job)
    assert run.code == 0, run.stderr[-2000:]
    for command in ("report", "replay"):
        assert [one["symptom"] for one in said(command, run.run_dir, capsys) if one["severity"] != "info"] == []


@pytest.mark.release
@pytest.mark.xfail(strict=True, reason="a fault of composed parallelism that nothing shows which holter reads")
@pytest.mark.parametrize("job", [pytest.param(missed(kind), id=kind) for kind in MISSED])
def test_what_is_not_found_yet_is_found(ended, capsys, job):
    assert [one for one in said("report", ended(job).run_dir, capsys) if one["severity"] != "info"]


def test_a_nan_in_a_batch_is_dated_and_said_in_the_log_while_the_job_runs(jobs):
    ended = jobs.run(SCRIPTS / "nan_in_batch.py", "--steps", 2000, by="accelerate")
    assert [30] == [diagnosis["first_step"] for diagnosis in ended.diagnoses]
    assert any("(nonfinite_input) on rank 1 at step 30" in line for line in ended.holter_lines)


@pytest.mark.parametrize(
    ("way", "how", "said"),
    [
        pytest.param("jobs", "kill", "SIGKILL", marks=RELEASE),
        ("jobs", "exception", "KeyError: 'sample-17'"),
        pytest.param("forks", "exit", "7", marks=RELEASE),
    ],
)
def test_a_dead_rank_is_named_with_how_it_died(request, way, how, said):
    ended = request.getfixturevalue(way).run(SCRIPTS / "dying_rank.py", how)
    assert ended.code != 0
    assert ended.top["cause"] == ("script_error" if how == "exception" else "rank_dead")
    assert ended.top["ranks"] == [1]
    assert any(said in str(evidence) for evidence in ended.top["evidence"])
    assert ended.diagnoses[0]["first_step"] == 20


@pytest.mark.release
def test_an_exception_on_all_ranks_names_all(jobs):
    # By a launcher that waits a moment for the others: one that ends them at once leaves one exception.
    top = jobs.run(SCRIPTS / "dying_rank.py", "all_raise").top
    assert top["cause"] == "script_error"
    assert top["ranks"] == [0, 1]


@pytest.mark.release
def test_an_ordinary_end_raises_nothing(forks):
    ended = forks.run(SCRIPTS / "dying_rank.py", "end")
    assert ended.code == 0
    assert ended.diagnoses == []
