"""Real training jobs: launched as a user launches them, in a directory of their own, with a deadline."""

import contextlib
import fcntl
import json
import os
import pty
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

import psutil
import pytest

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
        report = subprocess.run(
            [BIN / "holter", "report", self.run_dir, "--json"], capture_output=True, text=True, timeout=60, check=False
        )
        assert report.returncode in (0, 1), report.stderr
        return json.loads(report.stdout)

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
class Running:
    """A job under way."""

    process: subprocess.Popen[str]
    directory: Path
    run_dir: Path

    def wait(self) -> Ended:
        """Until the launcher has ended and its pipes are closed: a process of ours that held them would be caught here."""
        stdout, stderr = self.process.communicate(timeout=DEADLINE_S)
        ended = Ended(self.process.returncode, stdout, stderr, self.directory, self.run_dir)
        wait_for(lambda: not processes_of(self.run_dir), 40, "processes of holter's that linger")
        return ended

    def coordinator(self) -> str:
        """The coordinator's address, once it is there."""
        path = self.run_dir / "coordinator.json"
        wait_for(path.exists, 60, "coordinator.json")
        return str(json.loads(path.read_text())["address"]).removeprefix("http://")

    def pids(self, command: str, rank: int | None = None) -> list[int]:
        """Processes of holter's that belong to this job's run."""
        return [
            p.pid for p in processes_of(self.run_dir) if command in p.cmdline() and (rank is None or _rank(p) == rank)
        ]


def _rank(process: psutil.Process) -> int:
    return int(process.environ().get("RANK", "0"))


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Sidecars and coordinator of one run, known by the environment that they inherited."""
    found = []
    for process in psutil.process_iter():
        try:
            if "holter.cli" in process.cmdline() and process.environ().get("HOLTER_RUN_DIR") == str(run_dir):
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.is_running()]


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
        env: dict[str, str] | None = None,
    ) -> Running:
        """Launch; `by` is torchrun, accelerate, scheduler (no launcher but the environment) or python."""
        self.number += 1
        run_dir = self.directory / f"run-{self.number}"
        launcher = {
            "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", ranks],
            "accelerate": [BIN / "accelerate", "launch", *ACCELERATE, "--num_processes", ranks],
            "scheduler": [sys.executable, ROOT / "tests" / "start_ranks.py", ranks],
            "python": [sys.executable],
        }[by]
        command = [*launcher, *(["-m", "holter", *options] if attached else []), script, *arguments]
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
        return Running(process, self.directory, run_dir)

    def run(self, script: str | Path, *arguments: object, **how: Any) -> Ended:
        """Launch and wait for the end."""
        return self.start(script, *arguments, **how).wait()

    def stop(self) -> None:
        """Kill whatever is left."""
        for process in self.running:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
        for number in range(1, self.number + 1):
            for process in processes_of(self.directory / f"run-{number}"):
                process.kill()


class Nursery:
    """A process that has torch imported already and forks ranks: for many small jobs."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None
        self._turn = threading.Lock()
        self._run_dirs: list[Path] = []

    def __enter__(self) -> Self:
        command = [sys.executable, str(ROOT / "tests" / "nursery.py")]
        environ = _environ({"HF_HUB_OFFLINE": "1"})
        self._server = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, text=True, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        for process in psutil.Process(self._server.pid).children(recursive=True):
            process.kill()
        self._server.kill()
        self._server.wait()
        for run_dir in self._run_dirs:
            for process in processes_of(run_dir):
                process.kill()

    def run(self, directory: Path, arguments: Sequence[str], *, ranks: int = 2, env: dict[str, str]) -> Ended:
        """`-m holter` with these arguments, on each rank; waits for the end."""
        run_dir = directory / "run"
        self._run_dirs.append(run_dir)
        environ = _environ({"HOLTER_RUN_DIR": str(run_dir)} | env)
        job = {"ranks": ranks, "arguments": arguments, "env": environ, "cwd": str(directory), "to": str(directory)}
        assert self._server is not None
        assert self._server.stdin is not None
        with self._turn:
            self._server.stdin.write(json.dumps(job) + "\n")
            self._server.stdin.flush()
        wait_for((directory / "code").exists, DEADLINE_S, f"the end of {arguments}")
        wait_for(lambda: not processes_of(run_dir), 40, "processes of holter's that linger")
        said = {name: (directory / name).read_text(errors="replace") for name in ("stdout", "stderr")}
        return Ended(int((directory / "code").read_text()), said["stdout"], said["stderr"], directory, run_dir)


def _environ(more: dict[str, str]) -> dict[str, str]:
    """The environment of a job: nothing of holter's from outside, one thread, no colours."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HOLTER")}
    environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore", "TERM": "dumb"}
    return environ | more


@pytest.fixture(scope="session")
def nursery_type() -> type[Nursery]:
    """For fixtures that outlive a test."""
    return Nursery


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
def status() -> Callable[[Running], dict[str, Any]]:
    """What the coordinator's API shows now; nothing while it does not answer."""

    def ask(job: Running) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://{job.coordinator()}/api/v1/status", timeout=5) as answer:
                return json.load(answer)
        except OSError:
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
