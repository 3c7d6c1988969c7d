"""The record halt.json in a run directory: this run was stopped on purpose, and whoever restarts it must know that.

    halt.json      while it exists, the run must not be restarted blindly
    halts/<n>.json past halts that somebody lifted, oldest first
    resumed.json   the checkpoint that this life of the run resumes from; the next life begins without it
    job.json       names of the job, by which a restart without a run directory is recognised
    .halt.room     space reserved at the start: if the disk is full at a halt, halt.json is written into it

A restarted rank looks for halt.json before it attaches. `holter resume RUN` or HOLTER_RESUME=1 lifts the halt; nothing
is lost by that. A job keeps its environment for as long as it lives, so the variable counts at its first start only:
otherwise it would lift the next halt too.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from holter.clock import rfc3339, wall_ns
from holter.files import UNREADABLE, as_json, read_json, read_plain, sync_folder, write_whole
from holter.records import EXIT_CODE
from holter.records.titles import titled

ROOM = ".halt.room"
ROOM_BYTES = 4096
REQUEUES, RESTARTS = "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"
"""Variables that count how often a scheduler, or an elastic agent, has restarted this job."""


class HaltRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `halt.json`. It is public: fields are added, never changed."""

    cause: str
    ranks: list[int]
    step: int
    """Completed optimizer steps in the checkpoint."""
    checkpoint: str | None
    """Path to give to the framework, relative to the run directory; None if nothing good could be kept."""
    verdict: str
    incident: str | None = None
    exit_code: int = EXIT_CODE
    at: str
    why: str = ""
    """What was saved and what was not, in words for a person."""
    reason: str = ""
    """Why the run was halted, or who asked for it and why."""
    framework: str = ""
    run_id: str = ""
    healthy_step: int | None = None
    """Completed steps of the last checkpoint from before the fault, if the one that was kept is not healthy; else
    None."""
    healthy_checkpoint: str | None = None
    """Path of that checkpoint: relative to the run directory, or one of the script's own."""

    @property
    def offered(self) -> tuple[int, str | None]:
        """Step and path of the checkpoint to resume from."""
        if self.healthy_step is not None and self.healthy_checkpoint is not None:
            return self.healthy_step, self.healthy_checkpoint
        return self.step, self.checkpoint


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `resumed.json`."""

    step: int
    checkpoint: str | None
    at: str
    is_begun: bool = False
    """Whether a life of the run has already started from it."""


class JobNames(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `job.json`."""

    names: list[str]


def read(run_dir: Path) -> HaltRecord | None:
    """Return the halt recorded in this run directory; None if there is none.

    A halt.json that exists but cannot be read counts as a halt.
    """
    path = run_dir / "halt.json"
    try:
        content = read_plain(path)
    except OSError:
        if not os.path.lexists(path):
            # A directory that cannot be accessed is no reason to end a training.
            return None
        content = b""
    try:
        return msgspec.json.decode(content, type=HaltRecord)
    except UNREADABLE:
        why = "halt.json cannot be read"
        return HaltRecord(cause="unknown", ranks=[], step=0, checkpoint=None, verdict="unknown", at="", why=why)


def write(run_dir: Path, halt: HaltRecord) -> None:
    """Write halt.json completely or not at all; on a full disk into the reserved space. Raises OSError."""
    try:
        _write(run_dir / "halt.json", halt)
    except OSError as error:
        try:
            _write_into_room(run_dir, halt)
        except OSError:
            raise error from None


def rename(run_dir: Path, incident: str, cause: str, ranks: Iterable[int]) -> None:
    """Update cause and ranks in halt.json when the incident it names is better understood. Raises OSError."""
    halt = read(run_dir)
    if halt is not None and halt.incident == incident and (halt.cause, halt.ranks) != (cause, list(ranks)):
        write(run_dir, msgspec.structs.replace(halt, cause=cause, ranks=list(ranks)))


def lift(run_dir: Path) -> HaltRecord | None:
    """Move halt.json to the past halts and return it; None if there was none. Raises OSError."""
    halt = read(run_dir)
    if halt is None:
        return None
    past = run_dir / "halts"
    past.mkdir(exist_ok=True)
    step, checkpoint = halt.offered
    _write(run_dir / "resumed.json", Resumed(step=step, checkpoint=checkpoint, at=rfc3339(wall_ns())))
    (run_dir / "halt.json").rename(past / f"{len(list(past.glob('*.json'))) + 1}.json")
    return halt


def base_step(run_dir: Path) -> int:
    """Return the completed steps of the checkpoint that this life resumes from; 0 if it started from scratch."""
    resumed = read_json(run_dir / "resumed.json", Resumed)
    return resumed.step if resumed is not None else 0


def begin(run_dir: Path) -> None:
    """Start a life of the run: a halt lifted before it counts for this life only, not for later ones."""
    resumed = read_json(run_dir / "resumed.json", Resumed)
    if resumed is None:
        return
    with contextlib.suppress(OSError):
        if resumed.is_begun:
            (run_dir / "resumed.json").unlink()
        else:
            _write(run_dir / "resumed.json", msgspec.structs.replace(resumed, is_begun=True))


def introduce(run_dir: Path, names: Iterable[str]) -> None:
    """Write down the names of this job and reserve space for halt.json.

    Errors are ignored: elsewhere the user is told that the directory is not writable.
    """
    with contextlib.suppress(OSError):
        _write(run_dir / "job.json", JobNames(names=sorted(names)))
        write_whole(run_dir / ROOM, b"\n" * ROOM_BYTES)


def find(run_dir: str, runs: Path, names: Iterable[str]) -> tuple[Path, HaltRecord] | None:
    """Find the halt of this job and its run directory: the named directory if there is one, else one of `runs` with the same job."""
    if run_dir:
        halt = read(Path(run_dir))
        return (Path(run_dir), halt) if halt is not None else None
    ours = set(names)
    for path in sorted(runs.glob("*/halt.json"), reverse=True):
        halt, job = read(path.parent), read_json(path.parent / "job.json", JobNames)
        if halt is not None and job is not None and ours & set(job.names):
            return path.parent, halt
    return None


def job_names(environ: Mapping[str, str], parent: int, *, is_start: bool = False) -> list[str]:
    """Return the names that identify this job after a blind restart: the scheduler's, the rendezvous's, the launcher process's.

    With `is_start` they count only if the scheduler or the elastic agent says that this is a restart, because one
    allocation, one named rendezvous and one launcher may run many trainings.
    """
    is_requeued = _is_counted(environ, REQUEUES)
    if is_start and not is_restart(environ):
        return []
    found = []
    if environ.get("SLURM_JOB_ID") and (is_requeued or not is_start):
        found.append(f"slurm:{environ['SLURM_JOB_ID']}")
    rendezvous = environ.get("TORCHELASTIC_RUN_ID", "none")
    if rendezvous != "none":
        found.append(f"rendezvous:{rendezvous}")
    if RESTARTS in environ and (started := _started(parent)):
        found.append(f"launcher:{os.uname().nodename}:{parent}:{started}")
    return found


def is_restart(environ: Mapping[str, str]) -> bool:
    """Whether the scheduler or the elastic agent says that it has started this job before."""
    return _is_counted(environ, REQUEUES) or _is_counted(environ, RESTARTS)


def sentences(run_dir: Path, halt: HaltRecord, environ: Mapping[str, str]) -> list[str]:
    """Return the messages for the user: why nothing is started, and what to do."""
    variable = ", or start with HOLTER_RESUME=1" if not is_restart(environ) else " (in a restart nothing else lifts it)"
    where = f" on rank {', '.join(map(str, halt.ranks))}" if halt.ranks else f": {halt.reason}" * bool(halt.reason)
    step, checkpoint = halt.offered
    verdict = halt.verdict if step == halt.step else f"healthy; what was kept at step {halt.step} is {halt.verdict}"
    kept = f"go on from step {step}: {run_dir / checkpoint} ({verdict})" if checkpoint else "no checkpoint was kept"
    return [
        f"this run was halted: {titled(halt.cause)}{where}; it is not started again blindly; {kept}",
        f"once its cause is dealt with: `holter resume {run_dir}`{variable}",
        f"what happened: `holter report {run_dir}`",
    ]


def _is_counted(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "0") not in {"", "0"}


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _write(path: Path, record: msgspec.Struct) -> None:
    write_whole(path, as_json(record))


def _write_into_room(run_dir: Path, halt: HaltRecord) -> None:
    """Overwrite the reserved file, which takes no new space on the disk; if it is too small, the end of `why` is cut off."""
    over = len(as_json(halt)) - ROOM_BYTES
    if over > 0:
        why = halt.why.encode()[: -over - len("…".encode())].decode(errors="ignore") + "…"
        halt = msgspec.structs.replace(halt, why=why)
    with (run_dir / ROOM).open("r+b") as file:
        file.write(as_json(halt).ljust(ROOM_BYTES, b"\n"))
        file.flush()
        os.fsync(file.fileno())
    (run_dir / ROOM).rename(run_dir / "halt.json")
    sync_folder(run_dir)
