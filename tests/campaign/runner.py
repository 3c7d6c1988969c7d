"""Runs cases: each a real job of forked ranks under holter, then its healthy twin."""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.campaign.grammar import Case, twin
from tests.campaign.render import render
from tests.campaign.score import Result, brief, counts, judge

from conftest import Nursery

DEADLINE_S = 240.0
HANGING_S = 75.0
"""For a job that hangs to be diagnosed, beginning with its start."""
SETTLED_S = 5.0
"""How long an incident of a hanging job is left to mature."""
THERE, MISSING, THE_END = "effect is there", "effect is MISSING", "the end"


class Runner:
    """A nursery, and a folder in which each case has its own."""

    def __init__(self, folder: Path, *, has_twins: bool = True, nursery: Nursery | None = None) -> None:
        self._folder, self._has_twins = folder.absolute(), has_twins
        self._own = None if nursery else Nursery()
        self._nursery = nursery or self._own

    def __enter__(self) -> Self:
        if self._own is not None:
            self._own.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._own.__exit__()

    def run(self, case: Case) -> Result:
        """The case and its twin; what was wholly right leaves nothing but its result."""
        began = time.monotonic()
        folder = self._folder / case.seed
        shutil.rmtree(folder, ignore_errors=True)
        result = Result(
            seed=case.seed,
            title=case.title,
            family=case.family,
            cause=case.kind.cause if case.kind else "",
            status="ran",
            is_from_start=case.when is not None and case.when.begin == 0,
        )
        try:
            self._score(case, folder, result)
        except (AssertionError, OSError, ValueError) as error:
            result.status, result.why = "void", f"the machine: {type(error).__name__}: {error}"[:300]
        result.seconds = round(time.monotonic() - began, 1)
        if result.status == "ran" and not result.mistakes and not (case.kind is None and result.said):
            shutil.rmtree(folder, ignore_errors=True)
        return result

    def _job(self, case: Case, folder: Path) -> Any:
        folder.mkdir(parents=True)
        script = folder / "case.py"
        script.write_text(render(case), encoding="utf-8")
        may_hang = case.is_faulty and case.kind is not None and case.kind.ends in ("hangs", "either")
        since: list[float] = []

        def is_enough(run_dir: Path) -> bool:
            if not since and any(counts(one, "info") for one in _written(run_dir)):
                since.append(time.monotonic())
            return may_hang and bool(since) and time.monotonic() - since[0] > SETTLED_S

        env = case.injected.env if case.injected else {}
        deadline_s = HANGING_S if may_hang else DEADLINE_S
        assert self._nursery is not None
        return self._nursery.run(
            folder, [str(script)], ranks=case.setting.ranks, env=env, is_enough=is_enough, deadline_s=deadline_s
        )

    def _score(self, case: Case, folder: Path, result: Result) -> None:
        ended = self._job(case, folder / "job")
        why = void(case, ended)
        if why:
            result.status, result.why = "void", why
            return
        expected, of_twin = case.expected, []
        if expected is None:
            result.said = [brief(one) for one in ended.diagnoses if counts(one, "warning")]
            return
        if self._has_twins:
            healthy = self._job(twin(case), folder / "twin")
            result.twin_failure = void(twin(case), healthy)
            result.has_twin = not result.twin_failure
            of_twin = [] if result.twin_failure else healthy.diagnoses
        judge(result, expected, ended.diagnoses, of_twin)


def void(case: Case, ended: Any) -> str:
    """Why this run says nothing; empty: it does."""
    last = (ended.stderr.strip().splitlines() or ["nothing on standard error"])[-1][:200]
    has_ended = THE_END in ended.stdout
    ends = case.kind.ends if case.is_faulty and case.kind else "normally"
    if MISSING in ended.stdout:
        return next(line for line in ended.stdout.splitlines() if MISSING in line)
    if case.is_faulty and THERE not in ended.stdout:
        return f"the effect was not checked; code {ended.code}: {last}"
    if ends == "normally" and (ended.code != 0 or not has_ended):
        return f"the script ended with code {ended.code}: {last}"
    if ends in ("hangs", "dies", "either") and has_ended and ended.code == 0:
        return f"the job should have ended otherwise ({ends})"
    return ""


def _written(run_dir: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(run_dir.glob("incidents/*/diagnosis.json")):
        try:
            found.append(json.loads(path.read_text()))
        except (OSError, ValueError):  # being written just now
            continue
    return found
