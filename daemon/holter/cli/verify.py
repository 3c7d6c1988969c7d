"""`holter verify BEFORE AFTER`: did the fix work: two runs, two logs, or an incident and a run.

BEFORE and AFTER are run directories or what a job without holter left (a log, a table, a folder). An incident is `RUN INCIDENT`, or its folder
`RUN/incidents/INCIDENT`. Exit code 0: fixed; 1: not fixed, or worse; 3: undecided; 2: wrong use.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from holter import clock, config, offline
from holter.cli.parts.earlier import memory_path, project_of
from holter.cli.parts.evidence import is_run_directory, record_of_run
from holter.cli.parts.run_reader import RUNS
from holter.errors import UsageError
from holter.offline.proof import FixVerdict, PastFault, RunRecord, record_of_found
from holter.offline.proof import verify as judge
from holter.offline.proof.memory import MemoryEntry, MemoryFile
from holter.offline.proof.verify import EXIT_CODES

NUM_PATHS = (2, 3)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "paths", nargs="+", metavar="BEFORE [INCIDENT] AFTER", help="run directories, logs or folders of logs"
    )
    parser.add_argument("--cause", help="which fault of BEFORE was to be fixed (default: the gravest)")
    parser.add_argument(
        "--fix", metavar="TEXT", help="what was done: it is remembered with the verdict (`holter memory`)"
    )
    parser.add_argument("--json", action="store_true", help="print facts as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the verdict; it decides the exit code."""
    verdict = verified(args.paths, args.cause)
    text = msgspec.json.format(msgspec.json.encode(verdict), indent=2).decode() if args.json else rendered(verdict)
    sys.stdout.write(text + "\n")
    if args.fix:
        _remember(verdict, args.fix)
    return EXIT_CODES[verdict.verdict]


def verified(paths: list[str], cause: str | None = None) -> FixVerdict:
    """Return the verdict on BEFORE [INCIDENT] AFTER. Raises UsageError."""
    if len(paths) not in NUM_PATHS:
        raise UsageError(f"verify takes BEFORE and AFTER, or RUN INCIDENT AFTER, got {len(paths)} names")
    before_path, incident = _incident(paths[0], paths[1] if len(paths) == NUM_PATHS[1] else None)
    after_path = Path(paths[-1])
    if _is_same(before_path, after_path):
        before, after = _lives(before_path, incident)
    else:
        before, after = record_of(before_path), record_of(after_path)
    return judge(before, after, _chosen(before, incident, cause))


def record_of(path: Path) -> RunRecord:
    """Return the record of a run directory, a log or a folder. Raises UsageError."""
    if is_run_directory(path):
        return record_of_run(path)
    if not path.exists():
        raise UsageError(f"{path} is neither a run directory nor a file or folder")
    found = offline.read([path])
    return record_of_found(found, offline.judge(found, run_id=str(path), now_ns=clock.wall_ns()), str(path))


def _remember(verdict: FixVerdict, fix: str) -> None:
    """Remember the fix that was tried, with its verdict."""
    before, fault = Path(verdict.before), verdict.fault
    if fault is None:
        raise UsageError(f"--fix: no fault was found in {before}, so there is nothing to remember")
    is_run = is_run_directory(before)
    runs = before.absolute().parent if is_run else RUNS
    path = memory_path(runs, config.load().memory)
    if path is None:
        raise UsageError("--fix: there is no memory: HOLTER_MEMORY is off, or anybody may write beside the run")
    now_ns = clock.wall_ns()
    entry = MemoryEntry(
        key=f"verified-{now_ns}", kind="fix", at=clock.rfc3339(now_ns), project=project_of(runs), run=before.name if is_run else str(before.absolute()), incident=fault.id, cause=fault.cause,
        place=fault.place, symptom=fault.symptom, step=fault.first_step, fix=fix, verdict=verdict.verdict,
    )  # fmt: skip
    MemoryFile(path).put([entry])


def _incident(before: str, incident: str | None) -> tuple[Path, str | None]:
    """Return run directory and incident, given either as `RUN/incidents/ID` or as `RUN ID`."""
    path = Path(before)
    if incident is None and path.parent.name == "incidents" and (path / "diagnosis.json").exists():
        return path.parent.parent, path.name
    if incident is not None and not is_run_directory(path):
        raise UsageError(f"{before} is no run directory, so it has no incident {incident}")
    return path, incident


def _is_same(before: Path, after: Path) -> bool:
    return before.exists() and after.exists() and before.resolve() == after.resolve()


def _lives(path: Path, incident: str | None) -> tuple[RunRecord, RunRecord]:
    """Return the records of a run before and after its last start, if it was resumed in its own directory."""
    if not is_run_directory(path):
        raise UsageError(f"BEFORE and AFTER are both {path}: there is nothing to compare")
    before, after = record_of_run(path, life="earlier"), record_of_run(path, life="last")
    if after.first_step < 0 or not before.num_steps:
        raise UsageError(f"{path} was not started again since {incident or 'its incident'}: there is no AFTER")
    return before, after


def _chosen(before: RunRecord, incident: str | None, cause: str | None) -> PastFault | None:
    known = [one for one in before.faults if incident in {None, one.id} and cause in {None, one.cause}]
    if known or (incident is None and cause is None):
        return next(iter(known), None)
    there = ", ".join(f"{one.id} ({one.cause})" for one in before.faults) or "none"
    raise UsageError(f"{before.name} has no incident {incident or ''}{cause or ''}; it has {there}")


def rendered(verdict: FixVerdict) -> str:
    """Describe the verdict for a person; the verdict itself comes first."""
    word = verdict.verdict.replace("_", " ")
    lines = [f"{word}: {verdict.reason}"]
    if verdict.fault is not None:
        lines.append(f"  It was: {verdict.fault.symptom}")
    if verdict.came_back is not None:
        lines.append(f"  It is: {verdict.came_back.symptom}")
    lines += [f"  {one.text()}" for one in verdict.comparisons]
    if verdict.gone_faults:
        lines.append(f"  Also gone: {', '.join(one.cause for one in verdict.gone_faults)}")
    lines += [f"  Changed: {one.text()}" for one in verdict.changes]
    if verdict.unknown:
        lines.append(f"  Not known whether it changed: {', '.join(verdict.unknown)}")
    return "\n".join([*lines, *(f"  {one}" for one in verdict.remarks)])
