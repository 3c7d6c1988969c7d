"""`holter resume RUN [-- COMMAND …]`: lift the halt, so that the run can be started again, and say from where it goes on.

With a command it is run at once as `holter launch` would, with the path of the checkpoint in HOLTER_RESUME_FROM.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holter.cli import launch
from holter.cli.parts.run_reader import RunReader, locate
from holter.errors import UsageError
from holter.frameworks.all import ALL
from holter.frameworks.fsdp.framework import PARTS, RESUME_PARTS
from holter.halting import halt_record
from holter.halting.halt_record import HaltRecord
from holter.halting.vault import store
from holter.records.titles import titled

HOW = {framework.checkpoint: framework.resume for framework in ALL} | {PARTS: RESUME_PARTS}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "holter resume [-h] [--json] [RUN] [-- COMMAND …]"
    parser.add_argument("run", nargs="?", metavar="RUN", help="run directory (default: the newest run)")
    parser.add_argument("--json", action="store_true", help="the halt that was lifted, and where the checkpoint is")


def run(args: argparse.Namespace) -> int:
    """Lift the halt, and run the command if there is one; the exit code is the command's, else 0."""
    command = args.words
    found = locate(args.run)
    if found.directory is None:
        raise UsageError(f"{found.address} is a coordinator's address; name the run's directory")
    halt = halt_record.read(found.directory)
    if halt is None and found.ask("/api/v1/status") is not None:
        raise UsageError(f"{found.directory} is running; `holter status {found.directory}` shows how")
    if halt is None:
        raise UsageError(
            f"{found.directory} does not stand halted: it has no halt.json, and can be started as it is{_last_healthy(found.directory)}"
        )
    checkpoint = halt.offered[1]
    path = str((found.directory / checkpoint).absolute()) if checkpoint else None
    try:
        halt_record.lift(found.directory)
    except OSError as error:
        raise UsageError(f"{found.directory / 'halt.json'} cannot be lifted: {error.strerror}") from None
    sys.stdout.write(_as_json(halt, path) if args.json else _as_text(found, halt, path))
    sys.stdout.flush()
    if not command:
        return 0
    return launch.supervise(command, found.directory.absolute(), {"HOLTER_RESUME_FROM": path or ""})


def _last_healthy(directory: Path) -> str:
    """For a run that ended by itself: name the last healthy checkpoint if a later one is not to be trusted; else empty."""
    saves = store.read_script_saves(directory)
    healthy = next((save for save in reversed(saves) if save.verdict == "healthy"), None)
    if not saves or saves[-1] is healthy:
        return ""
    last = f"its last checkpoint, of step {saves[-1].step}, is {saves[-1].verdict} ({saves[-1].why})"
    offered = (
        f"the last healthy one is of step {healthy.step}: {healthy.path}" if healthy else "no healthy one is known"
    )
    return f"; {last}; {offered}"


def _as_json(halt: HaltRecord, path: str | None) -> str:
    return json.dumps({**msgspec.to_builtins(halt), "path": path}, indent=2) + "\n"


def _as_text(found: RunReader, halt: HaltRecord, path: str | None) -> str:
    where = f" on rank {', '.join(map(str, halt.ranks))}" if halt.ranks else ""
    lines = [
        f"lifted: halted by {titled(halt.cause)}{where} after {halt.step} steps" + (f", {halt.at}" if halt.at else "")
    ]
    if path is None:
        lines.append("no checkpoint was kept: " + (halt.why or "see `holter report`"))
    else:
        lines += _checkpoint_lines(halt, path)
    if words := found.identity.get("command"):
        lines.append(f"it ran as    {shlex.join(map(str, words))}")
    return "\n".join(lines) + "\n"


def _checkpoint_lines(halt: HaltRecord, path: str) -> Iterator[str]:
    step, offered = halt.offered
    if offered != halt.checkpoint:
        yield f"kept         of step {halt.step}, {halt.verdict}: {halt.why}"
        yield f"checkpoint   {path} (healthy, of step {step}: the last from before it began)"
        yield f"check it     holter checkpoint verify {shlex.quote(path)}"
        return
    yield f"checkpoint   {path} ({halt.verdict}, of step {step})"
    if halt.verdict != "healthy":
        yield f"             {halt.why}"
    yield f"check it     holter checkpoint verify {shlex.quote(str(Path(path).parent))}"
    if how := HOW.get(halt.framework):
        yield f"go on with   {how.format(path=path)}"
