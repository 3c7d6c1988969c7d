"""`holter doctor`: check a machine and a job's settings before a long run; each line says what to do. In seconds, and nothing is changed.

`--script F` looks at a training script by its syntax, `--launch -- …` runs two steps of a job under holter and says what is seen. `--gpu` checks
the device path on this machine's own GPUs, in about two minutes, longer while kernels are compiled. Exit 0: all that could be checked is well; 1:
something will not work, or `--gpu` found no GPU.
"""

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Self

import holter
from holter import clock
from holter.cli.parts import preflight
from holter.cli.parts.terminal import printable
from holter.errors import UsageError
from holter.rank.doctor import plan

START_S = 120.0
"""Seconds for Python to import torch and to find the devices; a cold file system is slow."""
TICK_S = 0.5
END_S = 5.0
TAIL_LINES = 8
TAIL_BYTES = 20_000
WORDS = {"ok": "ok", "failed": "FAILED", "skipped": "skipped"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "checks of --gpu:\n" + "\n".join(f"  {check.name:14}{check.asks}" for check in plan.ALL)
    parser.add_argument("--gpu", action="store_true", help="check the GPUs")
    parser.add_argument(
        "--only", action="append", metavar="CHECK", help="with --gpu: this check alone; may be given again"
    )
    preflight.add_options(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the checks; exit code 0 if all is well, 1 if not, or if nothing could be checked."""
    if not args.gpu:
        if args.only:
            raise UsageError("--only chooses among the checks of --gpu: say `holter doctor --gpu`")
        return preflight.run(args)
    unknown = [name for name in args.only or () if name not in plan.NAMES]
    if unknown:
        raise UsageError(f"there is no check {printable(unknown[0])}; there are {', '.join(plan.NAMES)}")
    wanted = [name for name in plan.NAMES if not args.only or name in args.only]
    report = Examination(is_json=args.json)
    with _ended_by_signals():
        report.examine(wanted)
    if args.json:
        sys.stdout.write(json.dumps(report.facts(), indent=2) + "\n")
    elif report.checks:
        sys.stdout.write(report.summary() + "\n")
    return 0 if report.is_healthy else 1


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise an exception as Ctrl-C does, so that the process of the checks and its jobs end too."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Examination:
    """The findings of the GPU checks so far; lines are printed as they come, unless the output is JSON."""

    is_json: bool
    devices: list[str] | None = None
    torch: str = ""
    why_none: str = ""
    checks: list[dict[str, Any]] = field(default_factory=list)
    began_s: float = field(default_factory=clock.monotonic_s)
    at_ns: int = field(default_factory=clock.wall_ns)

    @property
    def is_healthy(self) -> bool:
        """Whether something was checked and nothing failed."""
        outcomes = {check["outcome"] for check in self.checks}
        return "failed" not in outcomes and "ok" in outcomes

    def examine(self, names: Sequence[str]) -> None:
        """Run the checks in a child process; after a check that failed, hung or died, a new process runs the rest."""
        left = list(names)
        while left:
            with _Child(left) as child:
                if not self._meet(child):
                    return
                while left and self._next(child, left):
                    pass

    def _meet(self, child: "_Child") -> bool:
        """Wait until the child has listed the devices; False if there is nothing to check."""
        found = child.next(START_S, "importing torch")
        if found is None:
            self.why_none = f"torch could not be started: {child.why_ended(START_S)}"
        elif self.devices is None:
            self.devices, self.torch, self.why_none = found["devices"], found["torch"], found["why_none"]
            if self.devices:
                self._write("\n".join(self._head()))
        if found is None or not self.devices:
            sys.stderr.write(f"holter: there is no GPU to check: {printable(self.why_none)}\n")
            return False
        return True

    def _next(self, child: "_Child", left: list[str]) -> bool:
        """Wait for one check; False if this process cannot be used any more."""
        check = plan.find(left.pop(0))
        said = f"{check.name}, {len(self.checks) + 1} of {len(self.checks) + 1 + len(left)}"
        began_s = clock.monotonic_s()
        found = child.next(check.deadline_s, said)
        if found is None:
            seconds = clock.monotonic_s() - began_s
            why = child.why_ended(check.deadline_s)
            found = {"check": check.name, "outcome": "failed", "says": why, "seconds": seconds, "numbers": {}}
            found["details"] = child.tail()
        self.checks.append(found)
        self._write("\n".join(_lines(found)))
        return bool(found["outcome"] != "failed")

    def _write(self, text: str) -> None:
        if not self.is_json:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def _head(self) -> Iterator[str]:
        yield f"holter {holter.__version__}, torch {self.torch}, {clock.rfc3339(self.at_ns)}"
        yield from (printable(f"cuda:{index} is {name}") for index, name in enumerate(self.devices or ()))

    def summary(self) -> str:
        """Return the last line, which alone says whether all is well."""
        names = {kind: [one["check"] for one in self.checks if one["outcome"] == kind] for kind in WORDS}
        took = f"in {clock.monotonic_s() - self.began_s:.0f} s"
        counts = f"{len(names['ok'])} ok, {len(names['failed'])} failed, {len(names['skipped'])} skipped"
        if names["failed"]:
            return f"NOT WELL: {', '.join(names['failed'])} ({counts} {took})"
        return f"well ({counts} {took})" if names["ok"] else f"nothing could be checked ({counts} {took})"

    def facts(self) -> dict[str, Any]:
        """Return the content of the JSON output."""
        return {
            "schema": 1,
            "is_healthy": self.is_healthy,
            "holter": holter.__version__,
            "torch": self.torch,
            "at": clock.rfc3339(self.at_ns),
            "seconds": round(clock.monotonic_s() - self.began_s, 1),
            "devices": self.devices or [],
            "why_none": self.why_none,
            "checks": self.checks,
        }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield printable(f"{WORDS[found['outcome']]:8}{found['check']:14}{found['says']}  [{found['seconds']:.1f} s]")
    yield from (printable(f"{'':10}| {line}") for line in found["details"])


class _Child:
    """The process that uses torch. It has a session of its own, so that whatever it starts ends with it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with us
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "holter.rank.doctor", *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_late = False
        self._told = _Progress()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._told.end()
        # When the doctor is ended, it does not wait for a check that is under way.
        self._is_late |= kind is not None
        self._kill()
        self._errors.close()

    def next(self, patience_s: float, what: str) -> dict[str, Any] | None:
        """Return the child's next finding; None if it ended, or was ended because it took too long."""
        deadline_s = clock.monotonic_s() + patience_s
        self._told.begin(what)
        while clock.monotonic_s() < deadline_s:
            try:
                line = self._lines.get(timeout=TICK_S)
            except queue.Empty:
                self._told.tick()
                continue
            if not line:
                break
            found: dict[str, Any] = json.loads(line)
            if "progress" in found:
                self._told.tick(found["progress"])
            elif "began" not in found:
                self._told.end()
                return found
        else:
            self._is_late = True
        self._told.end()
        self._kill()
        return None

    def why_ended(self, patience_s: float) -> str:
        """Say in a sentence why the child ended."""
        if self._is_late:
            return f"no answer within {patience_s:.0f} s: ended (a device or a driver that hangs?)"
        code = self._process.returncode
        last = next(iter(reversed(self.tail())), "")
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        return f"its process died {how}" + (f": {last}" if last else "")

    def tail(self) -> list[str]:
        """Return the last lines that the child wrote to standard error."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - TAIL_BYTES))
        return self._errors.read().decode(errors="replace").splitlines()[-TAIL_LINES:]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _kill(self) -> None:
        """Kill the child and the jobs that it started."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._is_late:
                raise subprocess.TimeoutExpired("doctor", 0)
            self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class _Progress:
    """A progress line on standard error that is drawn again and again; nothing if that is no terminal."""

    def __init__(self) -> None:
        self._what = self._text = ""
        self._began_s = 0.0

    def begin(self, what: str) -> None:
        self._what, self._text, self._began_s = what, "", clock.monotonic_s()
        self.tick()

    def tick(self, text: str | None = None) -> None:
        self._text = self._text if text is None else text
        if sys.stderr.isatty():
            more = f": {self._text}" if self._text else ""
            sys.stderr.write(
                printable(f"holter: {self._what}{more} ({clock.monotonic_s() - self._began_s:.0f} s)").join(
                    ("\r\x1b[K", "")
                )
            )
            sys.stderr.flush()

    def end(self) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
