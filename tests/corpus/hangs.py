"""Ranks that hang, end or are late: each fault, what must be said of it, and the healthy runs that look most like one.

Most of these jobs never end by themselves: they are watched until an incident is written, and then stopped. A case passes when the top
cause, the culprit ranks (and no victim), the collective and the words are right, in one incident, live and after the job's end.
"""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holter.coordinator.recovery.journal import read
from holter.records import Exam

SCRIPTS = Path(__file__).parent / "scripts"
DEADLINE_S = 90.0
"""For a job to be diagnosed, beginning with its start."""
DETECTED_S = 35.0
"""From the moment at which a rank last moved to the diagnosis, on a busy machine. A rank that saves may take twenty seconds before it is overdue."""
SETTLED_S, MATURE_S = 2.0, 12.0
"""How long an incident is left to mature before the job is stopped: at least, and while something is missing. Native frames take py-spy
a second of one core, and on a busy machine the incident is told before they are there."""


@dataclass(frozen=True)
class Case:
    """One fault."""

    row: int
    """Of the public corpus; 0: not in it."""
    script: str
    how: str
    causes: frozenset[str]
    """The top cause is one of these."""
    ranks: tuple[int, ...] | None = (1,)
    """Exactly these; None: no rank is to blame."""
    world_size: int = 2
    says: tuple[str, ...] = ()
    """Words of the evidence."""
    native: tuple[str, ...] = ()
    """Words that only native frames tell; not missed where the rank's own examination says why there are none."""
    function: str = ""
    """The evidence names a line of this function of the script."""
    operation: str = ""
    """Of the collective that is named."""
    kinds: tuple[str, ...] = ()
    """Kinds of evidence that must be there."""
    hangs: bool = True
    """Else it ends by itself."""
    family: str = ""
    """Of faults that `make test` has this job of; empty: another variant, which `make test-all` runs too."""

    @property
    def name(self) -> str:
        """For people and for test ids."""
        # The culprit is said where it is the rank that has the job's store, and whose sidecar started the coordinator.
        who = "rank0" if self.ranks == (0,) else ""
        words = (f"{self.row:02d}" if self.row else "", self.script, self.how, f"x{self.world_size}", who)
        return "-".join(word for word in words if word)


def case(row: int, script: str, cause: str, how: str = "", **more: Any) -> Case:
    """A line of the table."""
    return Case(row, script, how, frozenset(cause.split("|")), **more)


def process(row: int, how: str, cause: str, **more: Any) -> tuple[Case, Case]:
    """A fault of one process, among two ranks and among four."""
    pair = case(row, "process_faults", cause, how, **more)
    return pair, Case(**(pair.__dict__ | {"ranks": (2,), "world_size": 4, "family": ""}))


CASES = (
    case(24, "skipped_collective", "rank_missing_from_collective", "lone", operation="all_reduce", family="hangs"),
    case(24, "skipped_collective", "rank_missing_from_collective", "metric", operation="all_reduce", hangs=False),
    case(24, "skipped_collective", "rank_missing_from_collective", "group", operation="all_reduce"),
    case(24, "skipped_collective", "rank_missing_from_collective|collective_order_mismatch", "early", operation="all_reduce"),
    case(25, "other_size", "collective_shape_mismatch", ranks=None, operation="all_reduce", says=("100", "200"), hangs=False, family="hangs"),
    *process(26, "suspend", "rank_suspended", kinds=("process_state",), family="hangs"),
    *process(27, "kill", "rank_dead", says=("SIGKILL",), kinds=("last_collectives", "last_statistics"), hangs=False, family="hangs"),
    case(27, "process_faults", "rank_dead", "kill", ranks=(0,), says=("SIGKILL",), kinds=("last_collectives", "last_statistics"), hangs=False),
    *process(0, "abort", "rank_dead", says=("SIGABRT",), kinds=("last_collectives", "last_statistics"), hangs=False),
    *process(0, "leave", "rank_dead", says=("exit code 7",), kinds=("last_collectives", "last_statistics"), hangs=False),
    case(0, "process_faults", "rank_dead", "leave_quietly", kinds=("last_collectives", "last_statistics"), hangs=False),
    *process(28, "spin", "rank_stuck_in_python", function="spin", kinds=("stacks",), family="hangs"),
    case(0, "process_faults", "rank_stuck_in_python", "spin", ranks=(0,), function="spin", kinds=("stacks",)),
    case(0, "late_peers", "rank_stuck_in_python", "late", function="spin", operation="all_reduce", kinds=("stacks",)),
    case(0, "late_peers", "rank_stuck_in_python", "receive", function="spin", kinds=("stacks",)),
    case(0, "process_faults", "rank_stuck_in_python", "spin_in_forward", function="spin", kinds=("stacks",)),
    case(0, "process_faults", "rank_stuck_in_python", "sleep", function="sleep", kinds=("stacks",)),
    case(0, "process_faults", "rank_stuck_in_python", "wait_for_lock", function="wait_for_lock", kinds=("stacks",)),
    *process(29, "wait_in_native_code", "interpreter_locked", function="wait_in_native_code", native=("nanosleep",), kinds=("stacks",), family="hangs"),
    case(29, "process_faults", "interpreter_locked", "count_in_native_code", function="count_in_native_code", kinds=("stacks",)),
    case(29, "process_faults", "interpreter_locked", "match_in_native_code", function="match_in_native_code", native=("sre_",)),
    case(30, "slow_rank", "slow_compute", "backward", hangs=False, family="slowness"),
    case(30, "slow_rank", "slow_compute", "backward", hangs=False, ranks=(2,), world_size=4),
    case(30, "slow_rank", "slow_compute", "backward", hangs=False, ranks=(0,)),
    case(30, "slow_rank", "slow_compute", "forward", hangs=False),
    case(31, "slow_rank", "slow_input", "data", hangs=False, family="slowness"),
    case(0, "other_dtype", "collective_dtype_mismatch", "once", ranks=None, operation="all_reduce", says=("float32", "int32"), hangs=False, family="hangs"),
    case(0, "other_dtype", "collective_dtype_mismatch", "always", ranks=None, operation="all_reduce", says=("float32", "int32"), hangs=False),
    case(0, "other_dtype", "collective_dtype_mismatch", "once", ranks=(2,), world_size=4, says=("float32", "int32"), hangs=False),
    case(0, "other_dtype", "collective_dtype_mismatch", "narrow", ranks=None, operation="all_reduce", says=("float16", "float32"), hangs=False),
    case(0, "other_order", "collective_order_mismatch", "broadcast", ranks=None, says=("broadcast", "all_reduce"), family="hangs"),
    case(0, "other_order", "collective_order_mismatch", "gather", ranks=None, says=("all_gather", "all_reduce")),
    case(0, "other_order", "collective_order_mismatch", "barrier", ranks=None, says=("barrier", "all_reduce")),
    case(0, "stalled_loader", "stalled_data_loader", "here", function="__getitem__", kinds=("stacks",), family="hangs"),
    case(0, "stalled_loader", "stalled_data_loader", "in_worker", kinds=("stacks",)),
    case(0, "stalled_save", "stalled_checkpoint", "write", function="write", kinds=("stacks",), family="hangs"),
    case(0, "stalled_save", "stalled_checkpoint", "open", kinds=("stacks",)),
    case(0, "nested_groups", "rank_stuck_in_python", "loop", world_size=4, ranks=(2,), function="wait_for_nothing", family="hangs"),
    case(0, "nested_groups", "rank_missing_from_collective", "skip", world_size=4, ranks=(2,), operation="all_reduce", hangs=False),
)  # fmt: skip

SILENT = (
    "checkpoint_and_barrier", "saving_on_one_rank", "evaluation_on_one_rank", "long_first_step", "jittery_ranks", "equally_slow",
    "one_pause", "late_leaver", "slow_workers",
)  # fmt: skip
"""Runs of `scripts/patient_runs.py`."""
SILENT_IN_MAKE_TEST = ("evaluation_on_one_rank", "one_pause")


@dataclass(frozen=True)
class Watched:
    """One job: a fault, a twin, or a healthy run."""

    name: str
    script: str
    arguments: tuple[str, ...]
    world_size: int = 2
    hangs: bool = False
    of: Case | None = None
    """What must be said of it."""


@dataclass
class Told:
    """What was said of a job."""

    live: list[dict[str, Any]] = field(default_factory=list)
    """Diagnoses as they stood when the first alarm had matured, with the job still alive."""
    ended: Any = None


def fault(of: Case) -> Watched:
    """The case's fault."""
    culprit = of.ranks[0] if of.ranks else 1
    return Watched(of.name, f"{of.script}.py", (*_how(of), "--culprit", str(culprit)), of.world_size, of.hangs, of)


def twin(of: Case) -> Watched:
    """The same script without the fault."""
    return Watched(f"{of.name}-twin", f"{of.script}.py", (*_how(of), "--healthy"), of.world_size)


def twins() -> list[Watched]:
    """One for each script and kind of loop; the kinds of process faults have the same."""
    chosen = {(one.script, "" if one.script == "process_faults" else one.how, one.world_size): one for one in CASES}
    return [twin(one) for one in chosen.values()]


def silent(name: str) -> Watched:
    """A healthy run."""
    return Watched(f"silent-{name}", "patient_runs.py", (name,))


def _how(of: Case) -> tuple[str, ...]:
    return (of.how,) if of.how else ()


def run(job: Watched, nursery: Any, directory: Path, monotonic_s: Callable[[], float]) -> Told:
    """Run it to its end, or until an incident was written and has matured."""
    told = Told()
    since: list[float] = []

    def is_enough(run_dir: Path) -> bool:
        if not since and alarms(_written(run_dir)):
            since.append(monotonic_s())
        if not since or monotonic_s() - since[0] < SETTLED_S:
            return False
        told.live = _written(run_dir)
        is_whole = job.of is None or not mistakes(job.of, told.live)
        return job.hangs and (is_whole or monotonic_s() - since[0] > MATURE_S)

    arguments = [str(SCRIPTS / job.script), *job.arguments]
    told.ended = nursery.run(
        directory, arguments, ranks=job.world_size, env={}, is_enough=is_enough, deadline_s=DEADLINE_S
    )
    return told


def _written(run_dir: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(run_dir.glob("incidents/*/diagnosis.json")):
        try:
            found.append(json.loads(path.read_text()))
        except (OSError, ValueError):  # being written just now
            continue
    return found


def alarms(diagnoses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of severity warning or above."""
    return [diagnosis for diagnosis in diagnoses if diagnosis["severity"] != "info"]


def is_seen_natively(of: Case, run_dir: Path) -> bool:
    """Whether the culprit's first examination brought native frames: on a very busy machine py-spy may be too late."""
    exams = [
        entry.observation.body
        for entry in read(run_dir / "journal")
        if entry.observation.rank in (of.ranks or ()) and isinstance(entry.observation.body, Exam)
    ]
    asked = [exam for exam in exams if exam.reason == "asked"]
    return not asked or not asked[0].stack_error.startswith("no native frames: py-spy has not answered in ")


def mistakes(of: Case, diagnoses: list[dict[str, Any]], *, is_seen_natively: bool = True) -> list[str]:
    """What is wrong with what was said, a sentence each; empty: the case passes."""
    raised = alarms(diagnoses)
    if len(raised) != 1:
        return [f"{len(raised)} incidents: {[_brief(alarm) for alarm in raised]}"]
    top, evidence = raised[0]["causes"][0], " ".join(str(proof) for proof in raised[0]["causes"][0]["evidence"])
    kinds = {proof["kind"] for proof in top["evidence"]}
    collective = (top.get("collective") or {}).get("operation", "")
    after_s = raised[0]["detected_after_s"]
    checks = {
        f"the cause is {top['cause']} ({top['confidence']})": top["cause"] in of.causes,
        f"the ranks are {top['ranks']}": of.ranks is None or tuple(top["ranks"]) == of.ranks,
        f"the collective is {collective or 'not named'}": not of.operation or collective == of.operation,
        f"no line of {of.function} is named": not of.function or names_line(of, evidence),
        f"it was detected after {after_s} s": after_s is None or after_s <= DETECTED_S,
        **{f"{word!r} is not said": word in evidence for word in (*of.says, *(of.native if is_seen_natively else ()))},
        **{f"there is no evidence of kind {kind}, only of {sorted(kinds)}": kind in kinds for kind in of.kinds},
    }
    return [text for text, is_right in checks.items() if not is_right]


def names_line(of: Case, evidence: str) -> bool:
    """Whether the evidence holds `script.py:17` with a line of the function."""
    tree = ast.parse((SCRIPTS / f"{of.script}.py").read_text(encoding="utf-8"))
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == of.function)
    named = {int(line) for line in re.findall(rf"{of.script}\.py:(\d+)", evidence)}
    return bool(named & set(range(found.lineno, (found.end_lineno or found.lineno) + 1)))


def _brief(diagnosis: dict[str, Any]) -> str:
    top = diagnosis["causes"][0]
    return f"{top['cause']} on {top['ranks']} at {diagnosis['first_step']}: {diagnosis['symptom']}"
