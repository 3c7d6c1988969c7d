"""Runs real jobs under `-m holter`, each in a directory of its own, and reads there what happened."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holter import clock

SCRIPT = Path(__file__).with_name("job_script.py")
POLL_S = 0.1
END_S = 15.0
TAIL_LINES = 12
LOAD = ("--standalone", "--nproc-per-node")


@dataclass(frozen=True)
class EndedJob:
    """A job that has ended, or was ended by us."""

    code: int | None
    """Exit code; None if we ended it, because enough was seen or because it took too long."""
    run_dir: Path
    said: list[str]

    @property
    def diagnoses(self) -> list[dict[str, Any]]:
        """Diagnoses that were written to the run directory."""
        return [
            json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(self.run_dir.glob("incidents/*/diagnosis.json"))
        ]

    @property
    def halt(self) -> dict[str, Any]:
        """Content of `halt.json`: why the job was halted and what was kept; empty if it was not halted."""
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.run_dir / "halt.json").read_text(encoding="utf-8"))
            return found
        return {}

    def named(self) -> set[tuple[str, int]]:
        """Return (cause, rank) for each rank that the first cause of a diagnosis names."""
        tops = [diagnosis["causes"][0] for diagnosis in self.diagnoses if diagnosis["causes"]]
        return {(top["cause"], rank) for top in tops for rank in top["ranks"]}


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """Make a temporary directory for one check."""
    with tempfile.TemporaryDirectory(prefix="holter-doctor-", ignore_cleanup_errors=True) as made:
        yield Path(made)


def run(  # noqa: PLR0913 - what a job is, all named
    at: Path,
    arguments: Sequence[str],
    *,
    num_ranks: int,
    deadline_s: float,
    action: str = "",
    is_enough: Callable[[EndedJob], object] = lambda _: False,
) -> EndedJob:
    """Run the script on `num_ranks` ranks, under holter if an action is given, until it ends, enough is seen, or the deadline has passed."""
    at.mkdir(parents=True, exist_ok=True)
    run_dir = at / "run"
    launcher = [] if num_ranks == 1 else ["-m", "torch.distributed.run", *LOAD, str(num_ranks)]
    under = ["-m", "holter", "--run-dir", str(run_dir), "--action", action] if action else []
    command = [sys.executable, *launcher, *under, str(SCRIPT), *arguments]
    with (at / "said").open("wb") as said:
        process = subprocess.Popen(  # noqa: S603
            command, cwd=at, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )
    until_s = clock.monotonic_s() + deadline_s
    while process.poll() is None and clock.monotonic_s() < until_s:
        if is_enough(EndedJob(None, run_dir, [])):
            break
        threading.Event().wait(POLL_S)
    code = process.poll()
    _end(process)
    lines = (at / "said").read_text(encoding="utf-8", errors="replace").splitlines()
    return EndedJob(code, run_dir, [line for line in lines if is_telling(line)][-TAIL_LINES:])


def is_telling(line: str) -> bool:
    """Whether a line is one of holter's or an error; a launcher's own summary is left out, because it names hosts and hides the cause."""
    return line.startswith("holter: ") or ("Error" in line and "error_file" not in line and "ChildFailed" not in line)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a job with SIGTERM to its process group, and with SIGKILL if it does not end in time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
