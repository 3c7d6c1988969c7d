"""halt.json in a run directory: this run was stopped on purpose, and whoever starts it again must know that.

    halt.json      present: do not restart blindly
    halts/<n>.json those that somebody lifted, oldest first
    resumed.json   which of them this life of the run goes on from; the next one begins without it
    job.json       by which names the job goes: a restart that was given no run directory is known by them
    .halt.room     a page that is taken at the start: on a disk that is full by then halt.json is written into it

A restarted rank looks before it attaches. `holter resume RUN` or HOLTER_RESUME=1 lifts the halt; nothing is lost by that. The job keeps the
variable for as long as it lives, so it counts at its first start only: it would lift the next halt too.
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
"""How often a scheduler, or an elastic agent, has started this job again."""


class HaltRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`halt.json`: public; fields are added, never changed."""

    cause: str
    ranks: list[int]
    step: int
    """Completed optimizer steps in the checkpoint."""
    checkpoint: str | None
    """What to give to the framework, relative to the run directory; None: nothing good could be kept."""
    verdict: str
    incident: str | None = None
    exit_code: int = EXIT_CODE
    at: str
    why: str = ""
    """What was saved and what was not, for a person."""
    reason: str = ""
    """Why it was halted, or who asked for it with what reason."""
    framework: str = ""
    run_id: str = ""
    healthy_step: int | None = None
    """Completed steps of the last checkpoint from before the fault, where the one that was kept is not healthy."""
    healthy_checkpoint: str | None = None
    """Where that is: relative to the run directory, or the script's own."""

    @property
    def offered(self) -> tuple[int, str | None]:
        """Step and path of what to go on from."""
        if self.healthy_step is not None and self.healthy_checkpoint is not None:
            return self.healthy_step, self.healthy_checkpoint
        return self.step, self.checkpoint


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """`resumed.json`."""

    step: int
    checkpoint: str | None
    at: str
    is_begun: bool = False
    """Whether a life of the run has gone on from it."""


class JobNames(msgspec.Struct, frozen=True, kw_only=True):
    """`job.json`."""

    names: list[str]


def read(run_dir: Path) -> HaltRecord | None:
    """The halt that stands in this run directory; one that is there and cannot be read stands too."""
    path = run_dir / "halt.json"
    try:
        content = read_plain(path)
    except OSError:
        if not os.path.lexists(path):
            # A directory that nobody can look into is no reason to end a training.
            return None
        content = b""
    try:
        return msgspec.json.decode(content, type=HaltRecord)
    except UNREADABLE:
        why = "halt.json cannot be read"
        return HaltRecord(cause="unknown", ranks=[], step=0, checkpoint=None, verdict="unknown", at="", why=why)


def write(run_dir: Path, halt: HaltRecord) -> None:
    """Write halt.json, whole or not at all, also on a full disk if there was room once. Raises OSError."""
    try:
        _write(run_dir / "halt.json", halt)
    except OSError as error:
        try:
            _write_into_room(run_dir, halt)
        except OSError:
            raise error from None


def rename(run_dir: Path, incident: str, cause: str, ranks: Iterable[int]) -> None:
    """The incident for which the run was halted is understood better: halt.json says the same cause. Raises OSError."""
    halt = read(run_dir)
    if halt is not None and halt.incident == incident and (halt.cause, halt.ranks) != (cause, list(ranks)):
        write(run_dir, msgspec.structs.replace(halt, cause=cause, ranks=list(ranks)))


def lift(run_dir: Path) -> HaltRecord | None:
    """Move halt.json to the past halts, and return it. None: there was none. Raises OSError."""
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
    """Completed steps of the checkpoint that this life of the run goes on from; 0: it began at the beginning."""
    resumed = read_json(run_dir / "resumed.json", Resumed)
    return resumed.step if resumed is not None else 0


def begin(run_dir: Path) -> None:
    """A life of the run begins: what was lifted before it counts for it, and for none that comes later."""
    resumed = read_json(run_dir / "resumed.json", Resumed)
    if resumed is None:
        return
    with contextlib.suppress(OSError):
        if resumed.is_begun:
            (run_dir / "resumed.json").unlink()
        else:
            _write(run_dir / "resumed.json", msgspec.structs.replace(resumed, is_begun=True))


def introduce(run_dir: Path, names: Iterable[str]) -> None:
    """Write down by which names this job goes, and take room for a halt; that a directory cannot be written to is said elsewhere."""
    with contextlib.suppress(OSError):
        _write(run_dir / "job.json", JobNames(names=sorted(names)))
        write_whole(run_dir / ROOM, b"\n" * ROOM_BYTES)


def find(run_dir: str, runs: Path, names: Iterable[str]) -> tuple[Path, HaltRecord] | None:
    """The halt that stands for this job: in its own directory if that was named, else in one of `runs` that is of the same job."""
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
    """Names of this job that a blind restart still has: the scheduler's, the rendezvous's, and the launcher's process.

    At a start they count only where the scheduler or the elastic agent says that it is a restart: one allocation, one rendezvous that
    the user named and one launcher may run many trainings.
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
    """Why nothing is started, and what to do."""
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
