"""Attaches holter at the end of `import torch`, called in every process through the `torch.backends` entry point.

An unmodified script is attached if HOLTER=1; the elastic agent, a rank's children and all other processes are left
alone.

A process that no launcher made a rank (`python train.py`) is watched from the moment it begins to train: when it builds
an optimizer, or runs its first backward pass. One that only imports torch is left alone.
"""

import contextlib
import os
import sys
from pathlib import Path

from holter.config import is_enabled

LAUNCHERS = frozenset(
    {
        "torchrun",
        "torch.distributed.run",
        "torch.distributed.launch",
        "accelerate",
        "accelerate.commands.launch",
        "deepspeed",
        "deepspeed.launcher.launch",
    }
)
"""Programs that start ranks. If a cluster sets RANK for a whole host, they look like a rank themselves."""
_is_told = False
"""Set by `python -m holter`, which runs the script: attach even if no launcher set a rank."""


def expect() -> None:
    """Make the next `import torch` of this process attach."""
    global _is_told  # noqa: PLW0603
    _is_told = True


def autoload() -> None:
    """Attach if this process is a rank that wants it.

    Nothing that goes wrong reaches the user's `import torch`.
    """
    try:
        if _is_rank():
            _attach()
        elif _may_train():
            from holter.frameworks import first_training  # noqa: PLC0415  imports torch, which has just been imported

            first_training.then(_attach)
    except Exception as error:  # noqa: BLE001
        with contextlib.suppress(Exception):
            sys.stderr.write(f"holter: cannot attach, training goes on unobserved: {error}\n")


def _attach() -> None:
    from holter.frameworks import attach  # noqa: PLC0415  imports torch, which has just been imported

    attach.attach()


def _may_train() -> bool:
    """Whether no launcher has set a rank, and this is neither a launcher nor a child of a rank."""
    is_child = os.environ.get("HOLTER_RANK_PID", "") not in ("", str(os.getpid()))
    has_launcher = any(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    return is_enabled() and not is_child and not has_launcher and _program() not in LAUNCHERS


def _is_rank() -> bool:
    if not is_enabled() or os.environ.get("HOLTER_RANK_PID", "") not in ("", str(os.getpid())):
        return False
    if _is_told:
        return True
    if _program() in LAUNCHERS:
        return False
    if "RANK" not in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        if "LOCAL_RANK" in os.environ:
            sys.stderr.write(
                "holter: RANK is not set: not attached; call holter.watch once the process group is there\n"
            )
        return False
    return "LOCAL_RANK" in os.environ or "RANK" in os.environ


def _program() -> str:
    """Return what the interpreter was started with: a module's name, or a script's name without its folder."""
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word == "-m":
            return next(words, "")
        if word in ("-W", "-X"):
            next(words, "")
        elif not word.startswith("-"):
            return Path(word).name
    return ""
