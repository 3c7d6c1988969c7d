"""Faults made by a grammar: draws cases, runs each as a real job under holter beside its healthy twin, and scores what was said.

    python -m tests.campaign show 7-3                 the script of the fourth case of seed 7
    python -m tests.campaign show 7-3 --twin          the same without the fault
    python -m tests.campaign list --seed 7 --number 40
    python -m tests.campaign run --seed 7 --number 40 --healthy 20
    python -m tests.campaign run --only 7-3

A case whose result is on disk is not run again (`--again` does). The exit code says whether it ran, not how well: 0, or 2 for wrong use.
"""

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.campaign.grammar import Case, draw, twin
from tests.campaign.render import render
from tests.campaign.score import Result, misses, ratio, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "campaign.md"
RESULTS = ROOT / "holter-runs" / "campaign"
SEED = re.compile(r"\d+(-h?\d+)?")
WRONG_USE = 2


def seeds(options: argparse.Namespace) -> list[str]:
    """Of the cases that are asked for."""
    if options.only:
        return [_whole(one) for one in options.only]
    faults = [f"{options.seed}-{number}" for number in range(options.number)]
    return faults + [f"{options.seed}-h{number}" for number in range(options.healthy)]


def _whole(seed: str) -> str:
    if not SEED.fullmatch(seed):
        raise ValueError(f"a case is named like 7-3 (a fault) or 7-h3 (a healthy run), got {seed!r}")
    return seed if "-" in seed else f"{seed}-0"


def signature(case: Case) -> str:
    """Of its text: a result belongs to the script that was run."""
    return hashlib.sha256(render(case).encode()).hexdigest()[:16]


def on_disk(folder: Path, case: Case) -> Result | None:
    """The result, if this very script was run before."""
    path = folder / f"{case.seed}.json"
    if not path.exists():
        return None
    kept = json.loads(path.read_text(encoding="utf-8"))
    return Result(**kept["result"]) if kept["script"] == signature(case) else None


def keep(folder: Path, case: Case, result: Result) -> None:
    """Whole or not at all."""
    part = folder / f"{case.seed}.part"
    part.write_text(json.dumps({"script": signature(case), "result": result.as_json()}, indent=1), encoding="utf-8")
    part.rename(folder / f"{case.seed}.json")


@contextmanager
def _runner(folder: Path, *, has_twins: bool) -> Iterator[Any]:
    """Made when the first case has to be run: it takes seconds."""
    from tests.campaign.runner import Runner  # noqa: PLC0415

    with Runner(folder, has_twins=has_twins) as runner:
        yield runner


def run(options: argparse.Namespace) -> int:
    """Run what was not run yet, score everything."""
    folder: Path = options.to / ("only" if options.only else str(options.seed))
    folder.mkdir(parents=True, exist_ok=True)
    cases = [draw(seed) for seed in seeds(options)]
    found = {} if options.again else {case.seed: kept for case in cases if (kept := on_disk(folder, case)) is not None}
    left_out = [case for case in cases if options.most_ranks and case.setting.ranks > options.most_ranks]
    found |= {case.seed: _left_out(case, options.most_ranks) for case in left_out}
    missing = [case for case in cases if case.seed not in found]
    print(f"{len(cases)} cases, {len(found)} of them on disk or left out; results in {folder}", flush=True)
    if missing:
        with _runner(folder, has_twins=not options.no_twins) as runner, ThreadPoolExecutor(options.at_once) as pool:
            began_s, running = time.monotonic(), {pool.submit(runner.run, case): case for case in missing}
            for number, done in enumerate(as_completed(running), start=1):
                case, result = running[done], done.result()
                keep(folder, case, result)
                found[case.seed] = result
                left_s = (time.monotonic() - began_s) / number * (len(missing) - number)
                # Not on standard output: a thread of the runner may be catching that while it asks for a report.
                print(f"{number} of {len(missing)}, {result.seconds:.0f} s, {left_s / 60:.0f} min left: {_line(result)}", file=sys.stderr, flush=True)  # fmt: skip
                # Whoever waits for the list need not wait for the last case.
                (folder / "misses.md").write_text(_listed(cases, found), encoding="utf-8")
    results = [found[case.seed] for case in cases]
    text = table(results)
    (folder / "results.json").write_text(json.dumps([one.as_json() for one in results], indent=1), encoding="utf-8")
    (folder / "table.md").write_text(text, encoding="utf-8")
    print("", *misses(results), "", text, sep="\n")
    if options.write:
        write(PAGE, str(options.seed), results)
    return 0


def _listed(cases: Sequence[Case], found: dict[str, Result]) -> str:
    done = [found[case.seed] for case in cases if case.seed in found]
    return "".join(f"- {line}\n" for line in misses(done)) + f"\n{len(done)} of {len(cases)} cases were run.\n"


def _left_out(case: Case, most: int) -> Result:
    cause = case.kind.cause if case.kind else ""
    return Result(case.seed, case.title, case.family, cause, "left out", why=f"more than {most} ranks")


def _line(result: Result) -> str:
    if result.status != "ran":
        return f"{result.seed} {result.status} ({result.why}): {result.title}"
    if result.family == "healthy":
        return f"{result.seed} {'FALSE ALARM' if result.said else 'silent'}: {result.title}"
    return f"{result.seed} {', '.join(result.mistakes) or 'right'}: {result.title}"


def write(page: Path, seed: str, results: Sequence[Result]) -> None:
    """The first score of this seed, a line that is never written twice; and the table by family of the newest run."""
    text = page.read_text(encoding="utf-8")
    ran = [one for one in results if one.status == "ran" and one.family != "healthy"]
    healthy = [one for one in results if one.status == "ran" and one.family == "healthy"]
    ranked = [one.is_rank_right for one in ran if one.is_found]
    alarms = sum(bool(one.twin_alarms) for one in ran), sum(bool(one.said) for one in healthy)
    row = (
        f"| {seed} | {len(ran)} | {ratio([one.is_found for one in ran])} | {ratio([one.is_cause_first for one in ran])} | {ratio(ranked)} | "
        f"{alarms[0]} of {sum(one.has_twin for one in ran)}, {alarms[1]} of {len(healthy)} | {sum(one.status == 'void' for one in results)} |\n"
    )
    if not any(line.startswith(f"| {seed} |") for line in _between(text, "seeds").splitlines()):
        text = _put(text, "seeds", _between(text, "seeds") + row)
    page.write_text(_put(text, "families", f"Seed {seed}:\n\n{table(results)}"), encoding="utf-8")


def _between(text: str, name: str) -> str:
    return text.partition(f"<!-- {name}: begin -->\n")[2].partition(f"<!-- {name}: end -->")[0]


def _put(text: str, name: str, inner: str) -> str:
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"{PAGE.name} has no place for {name}")
    return before + begin + inner + end + rest.partition(end)[2]


def show(options: argparse.Namespace) -> int:
    """Print a script."""
    case = draw(_whole(options.case))
    if options.twin and not case.is_faulty:
        raise ValueError(f"{case.seed} is a healthy run: it has no twin")
    print(render(twin(case) if options.twin else case), end="")
    return 0


def show_list(options: argparse.Namespace) -> int:
    """A line a case; nothing is run."""
    for seed in seeds(options):
        print(f"{seed}  {draw(seed).title}")
    return 0


def parser() -> argparse.ArgumentParser:
    """What can be asked for."""
    made = argparse.ArgumentParser("python -m tests.campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = made.add_subparsers(required=True, metavar="show | list | run")
    shown = commands.add_parser("show", help="print the script of a case")
    shown.add_argument("case", help="like 7-3, or 7-h3 for a healthy run")
    shown.add_argument("--twin", action="store_true", help="without the fault")
    shown.set_defaults(do=show)
    listed = commands.add_parser("list", help="what a seed gives, a line a case")
    ran = commands.add_parser("run", help="run and score")
    for one, do in ((listed, show_list), (ran, run)):
        one.add_argument("--seed", type=int, default=1)
        one.add_argument("--number", type=int, default=40, help="faults (40)")
        one.add_argument("--healthy", type=int, default=0, help="healthy runs (0)")
        one.add_argument("--only", nargs="+", metavar="CASE", help="these cases alone")
        one.set_defaults(do=do)
    ran.add_argument("--to", type=Path, default=RESULTS, help="where results are kept")
    ran.add_argument("--again", action="store_true", help="also what was run before")
    ran.add_argument("--no-twins", action="store_true", help="the faults alone")
    ran.add_argument("--at-once", type=int, default=2, help="jobs at the same time (2)")
    ran.add_argument("--most-ranks", type=int, default=0, help="leave out cases of more ranks than this (0: none)")
    ran.add_argument("--write", action="store_true", help="put the score into docs/campaign.md")
    return made


def main(arguments: Sequence[str]) -> int:
    """0 if it ran."""
    options = parser().parse_args(arguments)
    try:
        if (
            getattr(options, "number", 0) < 0
            or getattr(options, "healthy", 0) < 0
            or getattr(options, "at_once", 1) < 1
        ):
            raise ValueError("--number and --healthy must not be negative, --at-once must be positive")  # noqa: TRY301
        return int(options.do(options))
    except ValueError as error:
        print(f"campaign: {error}", file=sys.stderr)
        return WRONG_USE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
