"""`holter diagnose`: what a job that never ran holter left behind, judged as if it had: Flight Recorder dumps, a file a rank.

A dump holds the collectives that a rank called last. Give the dumps of as many ranks as you have, made when the job hung. Exit code 0:
nothing found; 1: something is wrong; 2: wrong use, or nothing found and some dumps could not be used.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import msgspec

from holter import offline
from holter.coordinator.incidents.tracker import IncidentTracker
from holter.coordinator.judge import Judge
from holter.coordinator.window.assembly import Assembly
from holter.diagnosis import report
from holter.errors import UsageError
from holter.faults import ALL
from holter.faults.hangs.stalled_rank import StalledRank
from holter.faults.shared.wording import ranks_text
from holter.records import Diagnosis

LONG_AFTER_NS = 60 * 10**9
"""The last judgement is made as of this much later, when every answer that can come has come."""
MAX_JUDGEMENTS = 6
"""A detector may want a rank examined more than once: the dump is all there is, each time."""
A_DAY_S = 86_400.0
DETECTORS = tuple(
    # Whoever made the dumps has waited long enough; but where nobody waits in any call, nothing hangs.
    dataclasses.replace(detector, unseen_s=0.0, everyone_s=A_DAY_S, everyone_in_script_s=A_DAY_S)
    if isinstance(detector, StalledRank)
    else detector
    for detector in ALL
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="dumps (JSON or pickle, rank_3.json, nccl_trace_rank_3), or directories of them"
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="a list of diagnoses")


def run(args: argparse.Namespace) -> int:
    """Print what is found; 1 when it is anything."""
    found = offline.read([Path(path) for path in args.paths])
    diagnoses, failing = judged(found, str(args.paths[0]))
    unjudged = (*found.failures, *failing)
    sys.stderr.write("".join(f"holter: {line}\n" for line in (*found.remarks, *unjudged)))
    sys.stdout.write(_rendered(found, diagnoses, is_json=args.json))
    if not diagnoses and unjudged:
        raise UsageError(f"nothing was found, but not everything could be judged: {unjudged[0]}")
    return int(bool(diagnoses))


def judged(found: offline.Dumps, run_id: str) -> tuple[list[Diagnosis], list[str]]:
    """What the detectors find in these dumps, explained; and a sentence for each detector that failed."""
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


def _rendered(found: offline.Dumps, diagnoses: list[Diagnosis], *, is_json: bool) -> str:
    if is_json:
        return msgspec.json.format(msgspec.json.encode(diagnoses), indent=2).decode() + "\n"
    known = f"{len(found.flights)} dumps of {len(found.ranks)} ranks"
    absent = [rank for rank in found.ranks if rank not in found.flights]
    gap = f"; there is none of {ranks_text(absent)}" if absent else ""
    if not diagnoses:
        return f"{known}{gap}: all calls match, and nobody is waited for, as far as the recorders reach back\n"
    shown = [report.to_text(one, color=sys.stdout.isatty()) for one in diagnoses]
    return "\n".join([*shown, f"Judged from {known}{gap}. A dump has no stacks and no steps.\n"])
