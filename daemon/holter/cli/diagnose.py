"""`holter diagnose`: what a job that never ran holter left behind, judged as if it had: logs, loss tables, trainer_state.json, event files, tracebacks, configs, code, Flight Recorder dumps.

What a file is, is found out by its content. Nothing is executed. Exit code 0: nothing critical was found; 1: a critical cause; 2: wrong use, or
nothing that can be read.
"""

import argparse
import dataclasses
import json
import sys
import textwrap
from pathlib import Path

import msgspec

from holter import clock, config, offline
from holter.cli.parts.earlier import memory_of_logs
from holter.cli.parts.terminal import Meter, width
from holter.coordinator.judge import IncidentTracker, Judge
from holter.coordinator.window.assembly import Assembly
from holter.diagnosis import report
from holter.errors import UsageError
from holter.faults import ALL
from holter.faults.hangs.stalled_rank import StalledRank
from holter.faults.shared.wording import ranks_text
from holter.records import Diagnosis

MAX_TOLD = 20
"""Remarks on single files that are printed."""
LONG_AFTER_NS = 60 * 10**9
"""The last judgement is made this many nanoseconds later, when every answer that can come has come."""
MAX_JUDGEMENTS = 6
"""Number of judgements of the dumps. A detector may want a rank examined more than once; each time the dump is all
there is."""
A_DAY_S = 86_400.0
DETECTORS = tuple(
    # Whoever made the dumps has waited long enough; but if no rank waits in any call, nothing hangs.
    dataclasses.replace(detector, unseen_s=0.0, everyone_s=A_DAY_S, everyone_in_script_s=A_DAY_S)
    if isinstance(detector, StalledRank)
    else detector
    for detector in ALL
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="logs, tables, event files, tracebacks, configs, code, dumps (rank_3.json, nccl_trace_rank_3); files or folders",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a list of diagnoses")
    form.add_argument("--markdown", action="store_true", help="for a ticket")
    form.add_argument("--package", action="store_true", help="the context package that agents pass on, answered")
    parser.add_argument("--html", metavar="FILE", help="write the report as a self-contained page")
    parser.add_argument(
        "--root-cause", metavar="FILE", help="write the report as Markdown, for the archive: root_cause.md"
    )
    parser.add_argument(
        "--remember", action="store_true", help="write what is found to the project's memory (`holter memory`)"
    )
    parser.add_argument(
        "--memory", default="", metavar="FILE",
        help="the memory in which is looked up what was seen before (default: HOLTER_MEMORY, else holter-runs/memory.sqlite)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print what is found; exit code 1 if a critical cause is among it."""
    meter = Meter()
    found = offline.read([Path(path) for path in args.paths], meter.of("read"))
    meter.end()
    diagnoses = offline.judge(found, run_id=str(args.paths[0]), now_ns=clock.wall_ns())
    failing: list[str] = []
    if found.dumps is not None:
        hung, failing = judged(found.dumps, str(args.paths[0]))
        diagnoses = [*hung, *diagnoses]
    diagnoses = _recalled(diagnoses, found, args)
    unjudged = (*found.failures, *failing)
    sys.stderr.write("".join(f"holter: {line}\n" for line in (*_few(found.remarks), *unjudged[:MAX_TOLD])))
    sys.stdout.write(_rendered(found, diagnoses, args))
    _write(args, diagnoses)
    if not diagnoses and unjudged and not found.runs:
        raise UsageError(f"nothing was found, but not everything could be judged: {unjudged[0]}")
    return int(any(one.severity == "critical" for one in diagnoses))


def _few(remarks: list[str]) -> list[str]:
    """The first remarks, and how many more there are: a folder may hold thousands of files that say nothing here."""
    more = len(remarks) - MAX_TOLD
    return [*remarks[:MAX_TOLD], f"and {more:,} more files that say nothing here"] if more > 0 else remarks


def _recalled(diagnoses: list[Diagnosis], found: offline.Found, args: argparse.Namespace) -> list[Diagnosis]:
    """Add what earlier runs of this project showed, and remember the diagnoses if --remember asks for it."""
    memory = memory_of_logs(args.memory or config.load().memory)
    if memory is None:
        if args.remember:
            raise UsageError("--remember: there is no memory: HOLTER_MEMORY is off, or anybody may write to ./holter-runs")  # fmt: skip
        return diagnoses
    recalled = memory.recall(diagnoses, found)
    if args.remember:
        num = memory.remember(diagnoses, found)
        sys.stderr.write(f"holter: remembered {num} in {memory.file.path}\n")
    sys.stderr.write("".join(f"holter: {remark}\n" for remark in memory.file.remarks))
    return recalled


def judged(found: offline.Dumps, run_id: str) -> tuple[list[Diagnosis], list[str]]:
    """Return the diagnoses of what the detectors find in these dumps, and a sentence for each detector that failed."""
    assembly, now_ns = Assembly(len(found.ranks)), found.taken_ns
    judging = Judge(assembly, IncidentTracker(run_id, "observe"), DETECTORS)
    diagnoses: dict[str, Diagnosis] = {}
    for observation in found.observations():
        assembly.add(observation, now_ns)
    for number in range(MAX_JUDGEMENTS):
        is_last = number == MAX_JUDGEMENTS - 1
        seen = judging.judge(now_ns + LONG_AFTER_NS * is_last, is_final=is_last)
        diagnoses |= {diagnosis.id: diagnosis for diagnosis in seen.diagnoses}
        for key in seen.exams:
            assembly.add(found.examined(key.rank, key.asked_ns, key.depth), now_ns)
    return [
        offline.afterwards(one, found.flights) for one in diagnoses.values() if one.closed_at is None
    ], judging.runner.blind()


def _rendered(found: offline.Found, diagnoses: list[Diagnosis], args: argparse.Namespace) -> str:
    if args.json:
        return msgspec.json.format(msgspec.json.encode(diagnoses), indent=2).decode() + "\n"
    if args.package:
        return json.dumps(offline.answer(found, diagnoses), indent=2) + "\n"
    if args.markdown:
        return "\n".join(report.to_markdown(one) for one in diagnoses) or "Nothing was found.\n"
    known = _known(found)
    if not diagnoses:
        if found.dumps is not None and not found.runs and not found.errors:
            return f"{known}: all calls match, and nobody is waited for, as far as the recorders reach back\n"
        return f"Nothing speaks of a fault in {known}.\n{_unseen(found)}{_asked(found, diagnoses)}"
    shown = [
        report.to_text(one, width(), color=config.wants_color(is_terminal=sys.stdout.isatty())) for one in diagnoses
    ]
    note = " A dump has no stacks and no steps." if found.dumps is not None else ""
    return "\n".join([*shown, f"Judged from {known}.{note}\n{_counted(found)}{_asked(found, diagnoses)}"])


def _known(found: offline.Found) -> str:
    if found.dumps is not None:
        absent = [rank for rank in found.dumps.ranks if rank not in found.dumps.flights]
        gap = f"; there is none of {ranks_text(absent)}" if absent else ""
        return f"{len(found.dumps.flights)} dumps of {len(found.dumps.ranks)} ranks{gap}"
    points = sum(run.num_points for run in found.runs)
    counts = (
        (len(found.runs), "run"), (points, "log"), (len(found.errors), "message"), (len(found.configs), "set", " of settings"), (len(found.code), "script"),
    )  # fmt: skip
    told = ", ".join(f"{_num(*one)}" for one in counts if one[0])
    return f"{_num(len(found.files), 'file')} ({told})" if told else _num(len(found.files), "file")


def _num(num: int, name: str, more: str = "") -> str:
    return f"{num:,} {name}{'' if num == 1 else 's'}{more}"


def _counted(found: offline.Found) -> str:
    """Say what was counted as a step if the log has none."""
    by = {run.counted_by for run in found.runs} - {"step"}
    names = {"epoch": "epochs", "log": "rows as they were logged"}
    return "".join(f"The log counts no steps: its {names[one]} are counted instead.\n" for one in sorted(by))


def _unseen(found: offline.Found) -> str:
    """Say what was not there and therefore not judged: silence is no proof."""
    lacking = offline.lacking(found)
    return f"Not in it, and so not judged: {', '.join(lacking)}.\n" if lacking else ""


def _asked(found: offline.Found, diagnoses: list[Diagnosis]) -> str:
    """Say what would decide between the causes, if something is uncertain."""
    asked = offline.questions(found, diagnoses)
    lines = [textwrap.fill(one, 100, initial_indent="  - ", subsequent_indent="    ", break_long_words=False) for one in asked]  # fmt: skip
    return "\n".join(["", "Not enough evidence yet. What would decide:", *lines, ""]) if lines else ""


def _write(args: argparse.Namespace, diagnoses: list[Diagnosis]) -> None:
    """Write the report files that --html and --root-cause ask for."""
    body = (
        report.to_html(*diagnoses)
        if diagnoses
        else "<!doctype html>\n<title>holter</title>\n<p>Nothing was found.</p>\n"
    )
    text = "\n".join(report.to_markdown(one) for one in diagnoses) or "Nothing was found.\n"
    for name, content in ((args.html, body), (args.root_cause, text)):
        if name:
            try:
                Path(name).write_text(content, encoding="utf-8")
            except OSError as error:
                raise UsageError(f"{name} cannot be written: {error.strerror}") from None
