"""Real training jobs: launched as a user launches them, in a directory of their own, with a deadline."""

import contextlib
import fcntl
import http.client
import io
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from holter import cli
from processes import end_children, kill, kill_family, processes_of

pytest_plugins = ["fake_cuda.pytest_plugin"]

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
ACCELERATE = [
    "--multi_gpu",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
    "--main_process_port",
    "0",
]
DEADLINE_S = 240.0
_PRINTING = threading.Lock()
"""There is one standard output."""


def pytest_configure() -> None:
    # Started in a shell's background we ignore Ctrl-C, and so would every job that is to be interrupted.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Ended:
    """A job that has ended, and what it left."""

    code: int
    stdout: str
    stderr: str
    directory: Path
    run_dir: Path

    @property
    def diagnoses(self) -> list[dict[str, Any]]:
        """What `holter report --json` prints."""
        with _PRINTING, contextlib.redirect_stdout(io.StringIO()) as printed:
            assert cli.main(["report", str(self.run_dir), "--json"]) in (0, 1)
        return json.loads(printed.getvalue())

    @property
    def alarms(self) -> list[dict[str, Any]]:
        """Diagnoses of severity warning or above."""
        return [diagnosis for diagnosis in self.diagnoses if diagnosis["severity"] != "info"]

    @property
    def top(self) -> dict[str, Any]:
        """The best cause of the one incident there must be."""
        diagnoses = self.diagnoses
        assert len(diagnoses) == 1, (self.stderr[-3000:], [d["symptom"] for d in diagnoses])
        return diagnoses[0]["causes"][0]

    @property
    def holter_lines(self) -> list[str]:
        """What holter said on standard error."""
        return [line for line in self.stderr.splitlines() if line.startswith("holter: ")]


@dataclass
class Job:
    """A job under way."""

    directory: Path
    run_dir: Path

    def coordinator(self) -> str:
        """The coordinator's address, once it is there."""
        path = self.run_dir / "coordinator.json"
        wait_for(path.exists, 60, "coordinator.json")
        return str(json.loads(path.read_text())["address"]).removeprefix("http://")

    def pids(self, command: str, rank: int | None = None) -> list[int]:
        """Processes of holter's that belong to this job's run."""
        found = [process for process in processes_of(self.run_dir) if command in process.words]
        return [process.pid for process in found if rank in (None, process.rank)]


@dataclass
class Running(Job):
    """One that was launched."""

    process: subprocess.Popen[str]

    def wait(self) -> Ended:
        """Until the launcher has ended and its pipes are closed: a process of ours that held them would be caught here."""
        stdout, stderr = self.process.communicate(timeout=DEADLINE_S)
        ended = Ended(self.process.returncode, stdout, stderr, self.directory, self.run_dir)
        wait_for(lambda: not processes_of(self.run_dir), 40, "processes of holter's that linger")
        return ended


@dataclass
class Forked(Job):
    """One of the nursery's."""

    arguments: Sequence[str]

    @property
    def has_ended(self) -> bool:
        """All ranks have."""
        return (self.directory / "code").exists()

    def end(self) -> None:
        """As a scheduler ends a job; one that has ended stays as it is."""
        if not self.has_ended:
            end_children(int((self.directory / "leader").read_text()))

    def wait(self, is_enough: Callable[[Path], object] = lambda _: False, deadline_s: float = DEADLINE_S) -> Ended:
        """Until it ends, enough is seen in its run directory, or it is too late: then it is ended."""
        until = time.monotonic() + deadline_s
        while not self.has_ended and not is_enough(self.run_dir) and time.monotonic() < until:
            time.sleep(0.05)
        self.end()
        wait_for(lambda: self.has_ended, 30, f"the end of {self.arguments}")
        wait_for(lambda: not processes_of(self.run_dir), 40, "processes of holter's that linger")
        said = {name: (self.directory / name).read_text(errors="replace") for name in ("stdout", "stderr")}
        code = int((self.directory / "code").read_text())
        return Ended(code, said["stdout"], said["stderr"], self.directory, self.run_dir)


def wait_for(is_there: Callable[[], Any], seconds: float, what: str) -> None:
    """Poll with a deadline that says what it waited for."""
    deadline = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)


@dataclass
class Launcher:
    """Starts jobs in one test's directory."""

    directory: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)
    number: int = 0

    def start(
        self,
        script: str | Path,
        *arguments: object,
        ranks: int = 2,
        attached: bool = True,
        by: str = "torchrun",
        options: Sequence[str] = (),
        launching: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> Running:
        """Launch; `by` is torchrun, accelerate, scheduler (no launcher but the environment) or python; with its own options."""
        self.number += 1
        run_dir = self.directory / f"run-{self.number}"
        launcher = {
            "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", ranks],
            "accelerate": [BIN / "accelerate", "launch", *ACCELERATE, "--num_processes", ranks],
            "scheduler": [sys.executable, ROOT / "tests" / "start_ranks.py", ranks],
            "python": [sys.executable],
        }[by]
        command = [*launcher, *launching, *(["-m", "holter", *options] if attached else []), script, *arguments]
        environ = _environ({"HOLTER_RUN_DIR": str(run_dir)} | (env or {}))
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=self.directory,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.running.append(process)
        return Running(self.directory, run_dir, process)

    def run(self, script: str | Path, *arguments: object, **how: Any) -> Ended:
        """Launch and wait for the end."""
        return self.start(script, *arguments, **how).wait()

    def stop(self) -> None:
        """Kill whatever is left."""
        for process in self.running:
            if process.poll() is None:
                kill_family(process.pid)
        for number in range(1, self.number + 1):
            kill(processes_of(self.directory / f"run-{number}"))


class Nursery:
    """A process that has torch imported already and forks ranks: for many small jobs."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None
        self._turn = threading.Lock()
        self._jobs: list[Forked] = []

    def __enter__(self) -> Self:
        command = [sys.executable, str(ROOT / "tests" / "nursery.py")]
        environ = _environ({"HF_HUB_OFFLINE": "1"})
        self._server = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, text=True, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        kill_family(self._server.pid)
        self._server.communicate()
        for job in self._jobs:
            kill(processes_of(job.run_dir))

    def start(self, directory: Path, arguments: Sequence[str], *, ranks: int = 2, env: dict[str, str]) -> Forked:
        """`-m holter` with these arguments, on each rank; the directory is the job's own."""
        assert self._server is not None
        assert self._server.stdin is not None
        job = Forked(directory, Path(env.get("HOLTER_RUN_DIR", directory / "run")), arguments)
        environ = _environ({"HOLTER_RUN_DIR": str(job.run_dir)} | env)
        order = {"ranks": ranks, "arguments": arguments, "env": environ, "cwd": str(directory), "to": str(directory)}
        with self._turn:
            self._jobs.append(job)
            self._server.stdin.write(json.dumps(order) + "\n")
            self._server.stdin.flush()
        wait_for((directory / "leader").exists, 120, "the nursery")
        return job

    def run(
        self,
        directory: Path,
        arguments: Sequence[str],
        *,
        ranks: int = 2,
        env: dict[str, str],
        is_enough: Callable[[Path], object] = lambda _: False,
        deadline_s: float = DEADLINE_S,
    ) -> Ended:
        """The job after its end. One that hangs is ended when enough is seen in its run directory, or at the deadline."""
        return self.start(directory, arguments, ranks=ranks, env=env).wait(is_enough, deadline_s)


@dataclass
class Cradle:
    """Jobs of one test that are forked from the nursery: where the way they are launched is not what is tested."""

    directory: Path
    nursery: Nursery
    jobs: list[Forked] = field(default_factory=list)

    def start(
        self,
        script: str | Path,
        *arguments: object,
        ranks: int = 2,
        options: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> Forked:
        """Begin one, in a directory of its own."""
        directory = self.directory / f"job-{len(self.jobs)}"
        directory.mkdir()
        words = [str(word) for word in (*options, script, *arguments)]
        self.jobs.append(self.nursery.start(directory, words, ranks=ranks, env=env or {}))
        return self.jobs[-1]

    def run(self, script: str | Path, *arguments: object, **how: Any) -> Ended:
        """Until its end."""
        return self.start(script, *arguments, **how).wait()

    def stop(self) -> None:
        """Kill whatever is left."""
        for job in self.jobs:
            job.end()
            kill(processes_of(job.run_dir))


def _environ(more: dict[str, str]) -> dict[str, str]:
    """The environment of a job: nothing of holter's from outside, one thread, no colours; a fault is looked at to its end."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HOLTER")}
    environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore", "TERM": "dumb"}
    # Jobs of one test lie side by side: what one leaves in the memory is no business of the next.
    environ |= {"HOLTER_ACTION": "notify", "HOLTER_LINGER_S": "0", "HOLTER_MEMORY": "off"}
    return environ | more


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """One for all tests of a session."""
    with Nursery() as made:
        yield made


@pytest.fixture
def forks(tmp_path: Path, nursery: Nursery) -> Iterator[Cradle]:
    """Start real jobs whose ranks are forked; whatever of them is left at the end of the test is killed."""
    cradle = Cradle(tmp_path, nursery)
    yield cradle
    cradle.stop()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Launcher]:
    """Launch real jobs; whatever of them is left at the end of the test is killed."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.stop()


@pytest.fixture(name="wait_for")
def _wait_for() -> Callable[[Callable[[], Any], float, str], None]:
    return wait_for


@pytest.fixture
def status() -> Callable[[Job], dict[str, Any]]:
    """What the coordinator's API shows now; nothing while it does not answer."""

    def ask(job: Job) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://{job.coordinator()}/api/v1/status", timeout=5) as answer:
                return json.load(answer)
        except (OSError, http.client.HTTPException):
            return {"ranks": []}

    return ask


@pytest.fixture(scope="session")
def launcher_type() -> type[Launcher]:
    """For fixtures that outlive a test."""
    return Launcher


@pytest.fixture
def hostile_server() -> Iterator[str]:
    """A server that answers every connection with garbage and never lets go."""
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)
            with contextlib.suppress(OSError):
                connection.sendall(
                    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n" + bytes(range(256)) * 64
                )

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    for connection in held:
        connection.close()


@pytest.fixture
def terminal() -> Callable[..., str]:
    """Run a job whose standard streams are a terminal of 24 rows; what was drawn on it."""

    def run(launcher: Launcher, script: Path, *arguments: str) -> str:
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        environ = {key: value for key, value in os.environ.items() if not key.startswith("HOLTER")}
        run_dir = launcher.directory / "run-terminal"
        environ |= {"OMP_NUM_THREADS": "1", "TERM": "xterm", "HOLTER_RUN_DIR": str(run_dir)}
        command = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "-m", "holter", script, *arguments]
        process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environ)
        os.close(follower)
        drawn = bytearray()
        with contextlib.suppress(OSError):  # EIO: the last process has let go of the terminal
            while chunk := os.read(leader, 65536):
                drawn += chunk
        os.close(leader)
        assert process.wait(timeout=DEADLINE_S) == 0
        return drawn.decode(errors="replace")

    return run
