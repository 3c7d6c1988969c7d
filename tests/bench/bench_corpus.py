"""How well the corpus of faults is told: runs every case, its twin and the healthy runs, and writes the table into docs/how-it-is-tested.md.

    python tests/bench/bench_corpus.py [--write]

The same cases, the same scripts and the same judge as `tests/corpus`; what is printed is what was found in this run.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "corpus")]

from conftest import Nursery  # noqa: E402  found by the line above
from corpus import CASES, SILENT, Case, Job, fault, mistakes, run, silent, twin  # noqa: E402

PAGE = ROOT / "docs" / "how-it-is-tested.md"
BEGIN, END = "<!-- corpus: begin -->\n", "<!-- corpus: end -->\n"


@dataclass(frozen=True)
class Score:
    """One fault, as it was told."""

    case: Case
    diagnoses: list[dict[str, Any]]

    @property
    def top(self) -> dict[str, Any] | None:
        """The best cause of the first alarm."""
        alarms = [diagnosis for diagnosis in self.diagnoses if diagnosis["severity"] != "info"]
        return alarms[0]["causes"][0] if alarms else None

    @property
    def is_cause_right(self) -> bool:
        """Whether the top cause is the expected one."""
        return self.top is not None and self.top["cause"] in self.case.causes

    @property
    def is_rank_right(self) -> bool | None:
        """None: the case has no culprit rank."""
        if self.case.ranks is None:
            return None
        return self.top is not None and tuple(self.top["ranks"]) == self.case.ranks

    @property
    def steps_to_detection(self) -> int:
        """From the step at which it began to the one at which it was seen."""
        return max(0, self.diagnoses[0]["detected_step"] - self.case.step)


def table(scores: list[Score], false_alarms: Iterable[str], num_healthy: int) -> str:
    """Markdown."""
    alarms = list(false_alarms)
    found = [score for score in scores if score.top is not None]
    with_rank = [score for score in scores if score.is_rank_right is not None]
    steps = statistics.median(score.steps_to_detection for score in found) if found else float("nan")
    whole = sum(not mistakes(score.case, score.diagnoses) for score in scores)
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            f"| faults found | {len(found)} of {len(scores)} |",
            f"| right cause first | {sum(score.is_cause_right for score in scores)} of {len(scores)} |",
            f"| right rank, where one is to blame | {sum(bool(score.is_rank_right) for score in with_rank)} of {len(with_rank)} |",
            f"| cause, rank, tensors and step all right | {whole} of {len(scores)} |",
            f"| false alarms in {num_healthy} healthy runs | {len(alarms)} |",
            f"| steps from fault to detection, median | {steps:g} |",
            "",
        ]
    )


def main() -> int:
    """Run, print, and write the table into the page if told to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/how-it-is-tested.md")
    options = parser.parse_args()
    healthy = [*map(twin, CASES), *map(silent, SILENT)]
    jobs = [*map(fault, CASES), *healthy]
    with tempfile.TemporaryDirectory() as folder, Nursery() as nursery, ThreadPoolExecutor(3) as pool:

        def told(job: Job) -> list[dict[str, Any]]:
            directory = Path(folder) / job.name
            directory.mkdir()
            return run(job, nursery, directory).diagnoses

        diagnoses = [_progress(one, number, len(jobs)) for number, one in enumerate(pool.map(told, jobs), start=1)]
    scores = [Score(case, one) for case, one in zip(CASES, diagnoses, strict=False)]
    alarms = [
        f"{job.name}: {diagnosis['symptom']}"
        for job, one in zip(healthy, diagnoses[len(CASES) :], strict=True)
        for diagnosis in one
        if diagnosis["severity"] != "info"
    ]
    for score in scores:
        if wrong := mistakes(score.case, score.diagnoses):
            print(f"{score.case.name}: {'; '.join(wrong)}")
    print(*alarms, sep="\n")
    text = table(scores, alarms, len(healthy))
    print(text)
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2], encoding="utf-8")
    return 0


def _progress(diagnoses: list[dict[str, Any]], number: int, total: int) -> list[dict[str, Any]]:
    print(f"\r{number} of {total} jobs", end="", file=sys.stderr, flush=True)
    return diagnoses


if __name__ == "__main__":
    sys.exit(main())
