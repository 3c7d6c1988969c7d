"""Starts many small jobs quickly: imports torch once, and forks each rank from there. A rank is a process like any other.

    python tests/nursery.py          one job a line on standard input, as JSON:
    {"ranks": 2, "arguments": ["train.py", "--steps", "40"], "env": {…}, "cwd": "…", "to": "/tmp/job"}

Each rank runs `-m holter` with these arguments, told its place by the environment as a batch scheduler would. The job's output goes to
`<to>/stdout` and `<to>/stderr`; `<to>/leader` holds the process id of the ranks' parent; when the job has ended, `<to>/code` appears.
Ends when its standard input does.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from free_port import free_port
from holter.__main__ import main as run

PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.utils.data.distributed",
    "accelerate",
    "transformers.trainer",
    "holter.frameworks.attach",
)
"""What most ranks would import for seconds."""


def main() -> None:
    """Serve jobs until the input ends; children reap themselves."""
    for name in PRELOADED:
        __import__(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _lead(json.loads(line))


def _lead(job: dict[str, Any]) -> None:
    """In a process of its own: start the ranks, wait as a scheduler waits, write down the first code that is not 0."""
    os.setsid()
    folder = Path(job["to"])
    os.chdir(job["cwd"])
    for number, name in ((0, "/dev/null"), (1, folder / "stdout"), (2, folder / "stderr")):
        os.dup2(os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(job["env"])
    port = free_port()
    ranks = [_bear(rank, job["ranks"], port, job["arguments"]) for rank in range(job["ranks"])]
    _write(folder / "leader", os.getpid())
    codes: dict[int, int] = {}
    while len(codes) < len(ranks) and not any(codes.values()):
        codes |= {pid: code for pid in ranks if pid not in codes and (code := _ended(pid)) is not None}
        time.sleep(0.01)
    for pid in ranks:
        if pid not in codes:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
    _write(folder / "code", next((code for code in codes.values() if code), 0))
    os._exit(0)


def _write(path: Path, number: int) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(str(number))
    part.rename(path)


def _ended(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _bear(rank: int, world_size: int, port: int, arguments: list[str]) -> int:
    """Fork one rank; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    # From here on it ends as any interpreter does: what is raised passes through the frames above, which hold nothing.
    run(arguments)
    sys.exit(0)


if __name__ == "__main__":
    main()
