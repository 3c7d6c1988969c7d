"""Ranks that hang, end or are late, in real jobs: the culprit is named while the job is alive, and nobody in jobs that only wait."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hangs import CASES, SCRIPTS, SILENT, SILENT_IN_MAKE_TEST, alarms, fault, is_seen_natively, mistakes, silent, twins

from holter import cli

pytestmark = pytest.mark.job

RELEASE = pytest.mark.release
FAULTS = [pytest.param(case, fault(case), id=case.name, marks=() if case.family else RELEASE) for case in CASES]
HEALTHY = [
    *(pytest.param(silent(name), id=name, marks=() if name in SILENT_IN_MAKE_TEST else RELEASE) for name in SILENT),
    *(pytest.param(job, id=job.name, marks=RELEASE) for job in twins()),
]
TIMES = 4
"""How often a rank is killed, each time somewhere else: its last words must be there always."""


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
            [(cause["cause"], cause["ranks"], cause["collective"]) for cause in diagnosis["causes"]],
        )
        for diagnosis in diagnoses
    ]


@pytest.mark.parametrize(("case", "watched"), FAULTS)
def test_a_hang_is_named_with_rank_and_place_live_at_the_end_and_in_replay(told, capsys, case, watched):
    job = told(watched)
    reported = said("report", job.ended.run_dir, capsys)
    seen = {"is_seen_natively": is_seen_natively(case, job.ended.run_dir)}
    assert mistakes(case, reported, **seen) == [], job.ended.stderr[-2000:]
    if case.hangs:
        assert mistakes(case, job.live, **seen) == []
    assert substance(said("replay", job.ended.run_dir, capsys)) == substance(reported)


@pytest.mark.parametrize("watched", HEALTHY)
def test_a_job_that_only_waits_raises_nothing(told, capsys, watched):
    job = told(watched)
    assert job.ended.code == 0, job.ended.stderr[-2000:]
    for command in ("report", "replay"):
        assert [one["symptom"] for one in alarms(said(command, job.ended.run_dir, capsys))] == []


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["kill", "abort", "leave"])
def test_a_rank_that_ends_without_warning_always_leaves_its_last_collectives_and_statistics(
    nursery, tmp_path, capsys, how
):
    dice = random.Random(how)  # noqa: S311
    steps = [dice.randrange(12, 45) for _ in range(TIMES)]

    def end_at(number):
        directory = tmp_path / str(number)
        directory.mkdir()
        script = [str(SCRIPTS / "process_faults.py"), how, "--at", str(steps[number])]
        return nursery.run(directory, script, env={})

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(end_at, range(TIMES)))
    for step, ended in zip(steps, runs, strict=True):
        diagnoses = alarms(said("report", ended.run_dir, capsys))
        assert ["rank_dead"] == [one["causes"][0]["cause"] for one in diagnoses], f"at step {step}"
        evidence = {proof["kind"]: proof for proof in diagnoses[0]["causes"][0]["evidence"]}
        calls = evidence["last_collectives"]["values"]
        assert 1 == calls["rank"]
        assert "all_reduce" in str(calls["calls"])
        assert evidence["last_statistics"]["values"]["rank"] == 1
        assert evidence["last_statistics"]["values"]["step"] in (step - 2, step - 1, step)
