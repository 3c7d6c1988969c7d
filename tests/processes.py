"""Processes of a job as seen from outside. They may end between any two looks: what is asked of one is read at once, and who is gone already is no error."""

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Ours:
    """A sidecar or a coordinator."""

    pid: int
    words: tuple[str, ...]
    """Its command line."""
    rank: int

    def send(self, number: signal.Signals) -> None:
        """One that has ended takes no signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def processes_of(run_dir: Path) -> list[Ours]:
    """Sidecars and coordinator of one run that have not ended, known by the environment that they inherited."""
    found, wanted = [], f"HOLTER_RUN_DIR={run_dir}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        # Asked many times a second while others measure: psutil would take ten times as long.
        with contextlib.suppress(OSError):
            words = _strings(folder / "cmdline")
            if b"holter.cli" in words and wanted in (environ := _strings(folder / "environ")):
                place = next((entry for entry in environ if entry.startswith(b"RANK=")), b"RANK=0")
                found.append(Ours(int(folder.name), tuple(os.fsdecode(word) for word in words), int(place[5:])))
    return found


def kill(processes: Iterable[Ours]) -> None:
    """Whatever of them is left."""
    for process in processes:
        process.send(signal.SIGKILL)


def descendants(pid: int) -> list[psutil.Process]:
    """Children, their children, and so on; none of one that is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_family(pid: int) -> None:
    """A process and all that it has started."""
    for process in descendants(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def end_children(pid: int) -> None:
    """SIGTERM to the children, and SIGKILL to whatever is left of the family: one that is stopped takes no other signal."""
    family = descendants(pid)
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
    for process in psutil.wait_procs(family, timeout=3)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _strings(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\0")
