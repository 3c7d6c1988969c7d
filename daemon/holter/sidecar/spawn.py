"""Starts a rank's sidecar, and tells it where the coordinator is and which run this is.

The sidecar is not a child of the starter: a training script that waits for its children must not meet ours, and ours must
not become its zombie. It has its own session, so that Ctrl-C at the terminal reaches the job and not its watcher. It keeps
none of the starter's pipes open, with one exception: rank 0's sidecar holds a copy of its standard error until the run's
last line is written, at most some ten seconds after the rank's end (`job_log.LastLine`); a program that waits for the end
of that pipe waits as long.

The Bootstrap comes later, through a pipe: the rank has it from the environment or from the job's rendezvous store. It is
never put on a command line, which everybody on the host can read.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

SHELL = "/bin/sh"
DETACH = '"$@" >/dev/null & echo $!'
"""Shell command: the shell ends at once, and what it started belongs to init, ignores Ctrl-C, and reads nothing."""
DEADLINE_S = 10.0


def start(arguments: Sequence[str], *, pass_fds: Sequence[int], environ: Mapping[str, str] | None = None) -> int:
    """Start `holter ARGUMENTS` detached, in this environment or in ours, and return its process id (0 if unknown).

    Raises OSError or subprocess.TimeoutExpired if that fails.
    """
    # -P: the script's own directory must not shadow modules of the standard library.
    command = [sys.executable, "-P", "-m", "holter.cli", *arguments]
    shell = subprocess.Popen(  # noqa: S603
        [SHELL, "-c", DETACH, "holter", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=tuple(pass_fds),
        env=None if environ is None else {**environ, "HOLTER": "0"},
        start_new_session=True,
        cwd="/" if not os.access(".", os.X_OK) else None,
    )
    try:
        said, _ = shell.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        shell.kill()
        raise
    if shell.returncode != 0:
        raise OSError(f"{SHELL} could not start {sys.executable}")
    return int(said) if said.strip().isdigit() else 0


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """How a sidecar reaches its coordinator: one line of JSON on the pipe, and the value in the job's store."""

    address: str
    """`host:port` of the coordinator, after `https://` with TLS; or NATS servers, if ranks report through NATS."""
    page: str = ""
    """Address at which people read, if that is a different one."""
    token: str
    run_id: str
    run_dir: str
    action: str
    save_deadline_s: float = 300.0
    """Seconds that a save may take in a halt."""
    starts_coordinator: bool = False
    """True only in rank 0's own copy, if no running coordinator was named."""

    @property
    def url(self) -> str:
        """The address for a browser."""
        address = self.page or self.address
        return address if "://" in address else f"http://{address}"


def encode_bootstrap(bootstrap: Bootstrap) -> bytes:
    """Encode as one line."""
    return msgspec.json.encode(bootstrap) + b"\n"


def decode_bootstrap(line: bytes) -> Bootstrap:
    """Decode one line; raise msgspec.ValidationError or DecodeError."""
    return msgspec.json.decode(line, type=Bootstrap)
