"""Processes that stop or end: as the kernel, a batch system or native code does it."""

import os
import signal
from typing import NoReturn


def suspend(pid: int | None = None) -> None:
    """Stop a process as a debugger does (SIGSTOP); without a pid this one. It stays so until `resume`."""
    os.kill(_pid(pid), signal.SIGSTOP)


def resume(pid: int) -> None:
    """Let a suspended process go on (SIGCONT)."""
    os.kill(pid, signal.SIGCONT)


def kill(pid: int | None = None) -> None:
    """End a process without warning (SIGKILL), as the kernel does when memory is short; without a pid this one."""
    os.kill(_pid(pid), signal.SIGKILL)


def abort() -> NoReturn:
    """End this process as a failed assertion in native code does (SIGABRT)."""
    os.abort()


def leave(code: int = 1) -> NoReturn:
    """End this process with an exit code and no last words: nothing is flushed, no handler runs."""
    os._exit(code)


def _pid(pid: int | None) -> int:
    if pid is not None and pid <= 0:
        raise ValueError(f"pid must be that of one process, got {pid}")
    return os.getpid() if pid is None else pid
