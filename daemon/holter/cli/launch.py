"""`holter launch [options] -- accelerate launch … train.py …`: the same command, watched; its exit code and restarts obey a halt.

A launcher turns every failure of a rank into its own exit code and starts the ranks again while it may. Here the halt has the last word: 93 is
passed on, a launcher that starts the job again all the same is ended, and a run that was halted is not started without --resume.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from holter import clock, config
from holter.cli.parts import options
from holter.errors import UsageError
from holter.halting import halt_record
from holter.records import EXIT_CODE

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LOOK_S = 0.2
GRACE_S = 20.0
"""Seconds that the launcher may take to end by itself after the halt, and again after it was asked to."""
NOT_FOUND = 127
UNWATCHED = (
    "nothing of this job was watched: no process of it that imports torch built an optimizer or ran a backward pass "
    "(or TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set); see `holter launch --help`"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "holter launch [options] -- accelerate launch … train.py …"
    options.add(parser)
    parser.add_argument("--resume", action="store_true", help="start although this run was halted")


def run(args: argparse.Namespace) -> int:
    """Run the job; the exit code is its own, or 93 if it was halted."""
    command = args.words
    if not command:
        raise UsageError("name the job's own command: holter launch [options] -- accelerate launch … train.py …")
    given = options.given(args)
    if args.config:
        os.environ["HOLTER_CONFIG"] = args.config
    settings = config.load(options=given)
    run_id = settings.run_id or clock.compact(clock.wall_ns())
    run_dir = Path(settings.run_dir or Path("holter-runs") / run_id).absolute()
    halt = halt_record.read(run_dir)
    # A batch script that is queued again says --resume again, but to a halt that nobody has looked at.
    is_told = (args.resume or settings.resume) and not halt_record.is_restart(os.environ)
    if halt is not None and not is_told:
        return _refuse(run_dir, halt)
    settings_too = {config.PREFIX + name.upper(): str(value) for name, value in given.items()}
    return supervise(command, run_dir, settings_too)


def supervise(command: list[str], run_dir: Path, variables: Mapping[str, str]) -> int:
    """Run the command to its end with these additional variables; its run directory shows whether it was halted."""
    if halt := halt_record.read(run_dir):
        # The user said to resume: the halt is lifted here and not by the ranks, so that a halt.json found later is a
        # new halt.
        halt_record.lift(run_dir)
        sys.stderr.write(f"holter: resuming after the halt at step {halt.step}\n")
    forward = _Forward()
    # Before there is a child: a signal that arrives while it starts would end us and leave the child behind.
    kept = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        try:
            child = subprocess.Popen(command, env=_environ(run_dir, variables))  # noqa: S603  what the user asked to run
        except OSError as error:
            sys.stderr.write(f"holter: cannot start {command[0]}: {error.strerror}\n")
            return NOT_FOUND
        forward.to(child)
        code = _wait(child, run_dir)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    halt = halt_record.read(run_dir)
    if halt is None:
        if not (run_dir / "run.json").exists():
            sys.stderr.write(f"holter: {UNWATCHED}\n")
        return code
    # The launcher has called it a failure, at length; that must not be the last word.
    sys.stderr.write(
        "holter: what the launcher calls a failure is a halt: its ranks ended with 93, as they were told\n"
    )
    return _refuse(run_dir, halt)


def _refuse(run_dir: Path, halt: halt_record.HaltRecord) -> int:
    """Print that the run is halted, and what to do about it."""
    for sentence in halt_record.sentences(run_dir, halt, os.environ):
        sys.stderr.write(f"holter: {sentence}\n")
    return EXIT_CODE


class _Forward:
    """Passes signals on to the job. Ctrl-C reaches the job by itself, because the terminal sends it to everyone."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    def to(self, child: "subprocess.Popen[bytes]") -> None:
        """Pass signals on to this process, and those that arrived before it existed."""
        self._child = child
        for number in self._early:
            child.send_signal(number)

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self._child is None:
            self._early.append(number)
        elif not (number == signal.SIGINT and sys.stdin.isatty()):
            self._child.send_signal(number)


def _environ(run_dir: Path, variables: Mapping[str, str]) -> dict[str, str]:
    environ = {**os.environ, **variables, "HOLTER": "1", "HOLTER_RUN_DIR": str(run_dir)}
    environ.pop("HOLTER_RESUME", None)
    # Otherwise a SIGUSR1 kills the elastic agent and leaves its ranks behind.
    environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2")
    return environ


def _wait(child: "subprocess.Popen[bytes]", run_dir: Path) -> int:
    halted_at: float | None = None
    is_asked = False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(LOOK_S)
            return code if code >= 0 else 128 - code
        if halted_at is None and (run_dir / "halt.json").exists():
            halted_at = clock.monotonic_s()
        if halted_at is not None and clock.monotonic_s() - halted_at > GRACE_S * (2 if is_asked else 1):
            # Its ranks have left, but the launcher starts them again, or waits for one that cannot leave.
            child.kill() if is_asked else child.terminate()
            is_asked = True
