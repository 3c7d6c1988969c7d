"""Checks what holter and a long run need of this machine. Takes seconds; changes nothing but a file that is written and removed."""

import contextlib
import importlib.metadata
import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from holter import clock
from holter.offline.preflight.record import PreflightCheck, failed, fine, skipped, warned

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 8)
MIN_DESCRIPTORS = 1024
FEW_BYTES, NO_BYTES = 5 << 30, 200 << 20
"""Bytes of free space for checkpoints and journal: below the first there is little, below the second none."""
MAX_CLOCK_S = 1.0
STACK_DEADLINE_S = 20.0


@dataclass(frozen=True)
class MachineNeeds:
    """The resources that the job will need on this machine."""

    runs: Path = Path("holter-runs")
    run_dir: Path | None = None
    """This run's own directory, if one is named."""
    local_ranks: int = 1
    ports: tuple[tuple[str, int], ...] = ()
    """(setting, port) of the ports that must be free."""
    ring_bytes: int = 4 << 20
    coordinator: str = ""
    """`host:port` of a coordinator that already runs; empty if there is none."""
    shared_memory: Path = Path("/dev/shm")  # noqa: S108 - where torch puts it
    yama: Path = Path("/proc/sys/kernel/yama/ptrace_scope")


def look(needs: MachineNeeds) -> Iterator[PreflightCheck]:
    """Yield the result of one check after another; a check that raises gives a result that says so."""
    checks: tuple[tuple[str, Callable[[MachineNeeds], PreflightCheck]], ...] = (
        ("python", _python), ("torch", _torch), ("compiler", _compiler), ("kernels", _kernels), ("stacks", _stacks), ("descriptors", _descriptors),
        ("shared memory", _shared_memory), ("disk", _disk), ("ports", _ports), ("clock", _clock),
    )  # fmt: skip
    for name, check in checks:
        try:
            yield check(needs)
        except Exception as error:  # noqa: BLE001 - one check must not hide the others
            yield skipped(name, f"could not be looked at: {type(error).__name__}: {error}")


def _python(_: MachineNeeds) -> PreflightCheck:
    version = sys.version_info[:3]
    said = f"Python {'.'.join(map(str, version))}"
    return (
        fine("python", said) if version >= MIN_PYTHON else failed("python", f"{said} is too old", "Take 3.11 or newer.")
    )


def _torch(_: MachineNeeds) -> PreflightCheck:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return failed(
            "torch",
            "torch is not installed in this environment",
            "pip install holter[torch], in the environment of the job.",
        )
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < MIN_TORCH:
        return failed("torch", f"torch {version} is older than 2.8", "Take a newer one.")
    return fine("torch", f"torch {version}")


def _compiler(_: MachineNeeds) -> PreflightCheck:
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found:
        return fine("compiler", f"a C compiler: {found}")
    return warned(
        "compiler",
        "there is no C compiler: kernels that are not built yet cannot be",
        "Install gcc, if the next line says that kernels are missing.",
    )


def _kernels(_: MachineNeeds) -> PreflightCheck:
    spec = importlib.util.find_spec("holter_kernels")
    folders = list(spec.submodule_search_locations or []) if spec else []
    if any(Path(folder).glob("_native*.so") for folder in folders if list(Path(folder).glob("_native*.so"))):
        return fine("kernels", "the CPU kernels are built")
    return warned(
        "kernels",
        "the CPU kernels are not built: statistics are taken by torch, many times slower",
        "Reinstall holter where a C compiler is.",
    )


def _stacks(needs: MachineNeeds) -> PreflightCheck:
    """Check that stacks can be read, by taking that of a process of our own as a sidecar does with its rank."""
    program = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    if not Path(program).exists():
        return failed(
            "stacks",
            "py-spy is not found: hung ranks have no stacks",
            "pip install py-spy, in the environment of the job.",
        )
    scope = ""
    with contextlib.suppress(OSError):
        scope = needs.yama.read_text(encoding="ascii").strip()
    if scope == "3" or (scope == "2" and os.geteuid() != 0):
        return failed(
            "stacks",
            f"kernel.yama.ptrace_scope is {scope}: nobody may look into a rank",
            "sysctl kernel.yama.ptrace_scope=1, or give py-spy CAP_SYS_PTRACE.",
        )
    sleeper = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]
    child = subprocess.Popen(sleeper, stdout=subprocess.PIPE)  # noqa: S603 - a process of our own
    try:
        assert child.stdout is not None
        child.stdout.readline()
        command = [program, "dump", "--pid", str(child.pid)]
        seen = subprocess.run(command, capture_output=True, text=True, timeout=STACK_DEADLINE_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return failed(
            "stacks",
            f"py-spy did not answer within {STACK_DEADLINE_S:.0f} s",
            "Look at the machine's load, and at the container's seccomp profile.",
        )
    finally:
        child.kill()
        child.wait()
    if seen.returncode:
        last = (seen.stderr.strip().splitlines() or ["no reason given"])[-1]
        return failed(
            "stacks", f"py-spy cannot look into a process of ours: {last}", "In a container: --cap-add SYS_PTRACE."
        )
    return fine("stacks", f"py-spy sees stacks (ptrace_scope {scope or 'not there'})")


def _descriptors(needs: MachineNeeds) -> PreflightCheck:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(MIN_DESCRIPTORS, 64 * needs.local_ranks)
    if soft >= wanted or soft < 0:
        return fine("descriptors", f"{soft} open files are allowed")
    if 0 <= hard < wanted:
        return failed(
            "descriptors",
            f"{soft} open files are allowed, {hard} at most, and {wanted} are needed",
            f"Raise the hard limit: ulimit -Hn {wanted}, or LimitNOFILE.",
        )
    return warned(
        "descriptors", f"{soft} open files are allowed: loaders with many workers run out", f"ulimit -n {wanted}"
    )


def _shared_memory(needs: MachineNeeds) -> PreflightCheck:
    if not needs.shared_memory.is_dir():
        return failed(
            "shared memory",
            f"{needs.shared_memory} is not there: loaders' workers and pages need it",
            "Mount a tmpfs there.",
        )
    usage = shutil.disk_usage(needs.shared_memory)
    wanted = needs.local_ranks * (needs.ring_bytes + (256 << 20))
    if usage.free < needs.local_ranks * needs.ring_bytes + (8 << 20):
        return failed(
            "shared memory",
            f"{usage.free >> 20} MB of {needs.shared_memory} are free, not enough for the pages of {needs.local_ranks} ranks",
            "docker run --shm-size=8g, or empty it.",
        )
    if usage.free < wanted:
        return warned(
            "shared memory",
            f"{usage.free >> 20} MB of {needs.shared_memory} are free: loaders with workers pass batches through it and die with a bus error",
            "docker run --shm-size=8g, or num_workers=0.",
        )
    return fine("shared memory", f"{usage.free >> 20} MB are free in {needs.shared_memory}")


def _disk(needs: MachineNeeds) -> PreflightCheck:
    if needs.run_dir is not None and (needs.run_dir / "halt.json").exists():
        return failed(
            "run directory",
            f"{needs.run_dir} holds a run that was halted: the job would end at once with 93",
            "`holter resume` it, or name another directory.",
        )
    folder = needs.runs.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    trial = folder / f".holter-doctor-{os.getpid()}"
    try:
        began_s = clock.monotonic_s()
        with trial.open("wb") as file:
            file.write(b"\0" * (16 << 20))
            file.flush()
            os.fsync(file.fileno())
        took_s = clock.monotonic_s() - began_s
    except OSError as error:
        return failed(
            "disk",
            f"{folder} cannot be written: {error.strerror}",
            "Start the job where run directories can be made, or set HOLTER_RUN_DIR.",
        )
    finally:
        trial.unlink(missing_ok=True)
    free = shutil.disk_usage(folder).free
    if free < NO_BYTES:
        return failed(
            "disk", f"{free >> 20} MB are free at {folder}: no checkpoint fits", "Make room, or set HOLTER_RUN_DIR."
        )
    said = f"{free / 2**30:.1f} GB are free at {folder}; 16 MB took {took_s:.1f} s"
    return (
        warned("disk", f"{said}: little for checkpoints", "Count the size of one checkpoint times three.")
        if free < FEW_BYTES
        else fine("disk", said)
    )


def _ports(needs: MachineNeeds) -> PreflightCheck:
    for setting, port in needs.ports:
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")):  # noqa: S104 - tried, not served
            with contextlib.closing(socket.socket(family)) as door:
                door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    door.bind((host, port))
                except OSError as error:
                    return failed(
                        "ports",
                        f"{setting} asks for port {port}: {error.strerror}",
                        f"Choose another, or end who has it: ss -ltnp 'sport = :{port}'.",
                    )
    named = ", ".join(f"{setting} {port}" for setting, port in needs.ports)
    return fine("ports", f"free: {named}" if named else "none is asked for: free ones are taken")


def _clock(needs: MachineNeeds) -> PreflightCheck:
    if not needs.coordinator:
        return skipped(
            "clock",
            "no other machine is known here (HOLTER_COORDINATOR is not set); ranks measure their offsets when they connect",
        )
    host, _, port = needs.coordinator.removeprefix("http://").rstrip("/").rpartition(":")
    try:
        connection = HTTPConnection(host.strip("[]"), int(port), timeout=3.0)
        with contextlib.closing(connection):
            connection.request("GET", "/healthz")
            answer = connection.getresponse().getheader("Date") or ""
        behind_s = parsedate_to_datetime(answer).timestamp() - clock.wall_ns() / 1e9
    except (OSError, HTTPException, ValueError, TypeError) as error:
        return failed(
            "coordinator",
            f"the coordinator at {needs.coordinator} does not answer: {error}",
            "Start it, or unset HOLTER_COORDINATOR.",
        )
    if abs(behind_s) > MAX_CLOCK_S + 1.0:
        return warned(
            "clock", f"this clock and the coordinator's are {abs(behind_s):.0f} s apart", "Run an NTP client on both."
        )
    return fine("clock", f"within {MAX_CLOCK_S + 1.0:.0f} s of the coordinator's")
