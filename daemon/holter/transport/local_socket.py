"""Where a host's agent listens: a unix socket in a directory that only this user can enter, by the run's name; who holds the lock beside it is the agent.

$XDG_RUNTIME_DIR/holter or /tmp/holter-UID    0700, ours
    a1b2c3….sock                              where the agent of one run listens
    a1b2c3….lock                              held by that agent for as long as it lives
"""

import fcntl
import hashlib
import os
import stat
import tempfile
from pathlib import Path

AUTO = "auto"
"""As a setting: the first sidecar of a host starts the agent."""


def directory() -> Path:
    """Of all agents of this user on this host."""
    return Path(tempfile.gettempdir()) / f"holter-{os.getuid()}"


def socket_of(run_id: str, address: str) -> Path:
    """Where the agent of this run listens. The path is short: a socket's may have 107 bytes."""
    name = hashlib.blake2b(f"{run_id}\n{address}".encode("utf-8", "surrogateescape"), digest_size=9).hexdigest()
    return directory() / f"{name}.sock"


def prepare(folder: Path) -> str | None:
    """Make the directory; a sentence where it is not ours alone: in a directory of all, whoever comes first owns a name."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.lstat()
    except OSError as error:
        return f"{folder} cannot be made: {error.strerror}"
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        return f"{folder} must be a directory of this user's that nobody else may enter (chmod 700)"
    return None


def lock(path: str | Path) -> int | None:
    """The lock of the agent that listens there, as a descriptor; None: another agent has it, or there can be none."""
    descriptor = -1
    try:
        descriptor = os.open(
            Path(path).with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        return None
    return descriptor
