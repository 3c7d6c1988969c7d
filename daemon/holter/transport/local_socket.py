"""Where a host's agent listens: a unix socket in a directory that only this user can enter, named after the run.

Whoever holds the lock beside the socket is the agent.

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
"""Value of the setting with which the first sidecar of a host starts the agent."""


def directory() -> Path:
    """Return the directory of all agents of this user on this host."""
    return Path(tempfile.gettempdir()) / f"holter-{os.getuid()}"


def socket_of(run_id: str, address: str) -> Path:
    """Return the socket path of this run's agent. It is short, because a socket's path may have only 107 bytes."""
    name = hashlib.blake2b(f"{run_id}\n{address}".encode("utf-8", "surrogateescape"), digest_size=9).hexdigest()
    return directory() / f"{name}.sock"


def prepare(folder: Path) -> str | None:
    """Make the directory; return a sentence if it does not belong to this user alone.

    In a directory shared by all, anybody may have taken the name first.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.lstat()
    except OSError as error:
        return f"{folder} cannot be made: {error.strerror}"
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        return f"{folder} must be a directory of this user's that nobody else may enter (chmod 700)"
    return None


def lock(path: str | Path) -> int | None:
    """Take the lock of the agent that listens there; return its descriptor, or None if that is impossible."""
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
