"""How a process of holter's is started so that it is nobody's burden.

Not a child of the starter: a training script that waits for its children must not meet ours, and ours must not become its zombie.
A session of its own: Ctrl-C at the terminal goes to the job, not to its watcher. None of the starter's pipes are kept open.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

SHELL = "/bin/sh"
DETACH = '"$@" >/dev/null & echo $!'
"""The shell ends at once; what it started belongs to init, ignores Ctrl-C, and reads nothing."""
DEADLINE_S = 10.0


def start(arguments: Sequence[str], *, pass_fds: Sequence[int], environ: Mapping[str, str]) -> int:
    """Start `holter ARGUMENTS` detached; its process id. Raises OSError or subprocess.TimeoutExpired when that fails."""
    # -P: the script's own directory must not shadow modules of the standard library.
    command = [sys.executable, "-P", "-m", "holter.cli", *arguments]
    shell = subprocess.Popen(  # noqa: S603
        [SHELL, "-c", DETACH, "holter", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=tuple(pass_fds),
        env={**environ, "HOLTER": "0"},
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
