"""`holter runs [DIR]`: all runs below a folder, or of a NATS server (`holter runs nats://host:4222`): state, steps, incidents; 1 when one of them has an open critical incident."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from holter.cli.parts.run_reader import RUNS, RunReader, has_open_critical, locate
from holter.cli.parts.terminal import fitted, printable, table
from holter.config import load
from holter.diagnosis.explain import WORST_FIRST
from holter.errors import UsageError
from holter.halting import halt_record
from holter.records import Diagnosis
from holter.records.titles import titled
from holter.transport.nats.line import NatsPlace, failures

COLUMNS = ("run", "state", "steps", "worst", "incidents", "ranks", "started")
"""Columns of the table; those that a narrow terminal may cut off come last."""
DEEP = 4
"""Largest number of folders between DIR and a run."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "directory", nargs="?", metavar="DIR", help=f"folder to look below (default: ./{RUNS}), or servers of NATS"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the runs, newest first."""
    if (args.directory or "").startswith(("nats://", "tls://")):
        return _of_server(args)
    root = Path(args.directory or RUNS)
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder")
    found = [_about(locate(str(path.parent))) for path in _below(root)]
    found.sort(key=lambda one: str(one["started_at"]), reverse=True)
    if args.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    elif not found:
        sys.stdout.write(f"no run below {root}\n")
    else:
        rows = [tuple(printable(str(cell)) for cell in _row(one)) for one in found]
        sys.stdout.write("\n".join(fitted(table(COLUMNS, rows))) + "\n")
    return int(any(one["is_critical"] for one in found))


def _of_server(args: argparse.Namespace) -> int:
    """Print the runs of a NATS server, by asking it as a client that holds no lease and publishes nothing."""
    import asyncio  # noqa: PLC0415 - folders need none

    from holter.coordinator.http.hub import runs_of  # noqa: PLC0415

    settings = load()
    place = NatsPlace(args.directory, settings.nats_credentials, settings.tls)
    if (problem := place.problem()) is not None:
        raise UsageError(problem)
    try:
        found = asyncio.run(runs_of(place))
    except failures() as error:
        raise UsageError(f"{args.directory} cannot be read: {type(error).__name__}: {error}") from None
    if args.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    elif not found:
        sys.stdout.write(f"no run at {args.directory}\n")
    else:
        rows = [tuple(printable(str(cell)) for cell in _row_of_server(one)) for one in found]
        sys.stdout.write("\n".join(fitted(table(COLUMNS, rows))) + "\n")
    return int(any(one.get("is_critical") for one in found))


def _row_of_server(one: dict[str, Any]) -> tuple[Any, ...]:
    open_ones = [found for found in one.get("incidents", []) if found["is_open"]]
    worst = min(open_ones, key=lambda found: WORST_FIRST.index(found["severity"]), default=None)
    over = one.get("num_incidents", 0) - one.get("num_open", 0)
    parts = [f"{one['num_open']} open" if one.get("num_open") else "", f"{over} over" if over else ""]
    named = f"{worst['severity']}: {worst['title']} at step {worst['step']}" if worst else ""
    ranks = f"{one.get('ranks', 0)} of {one.get('world_size', 0)}"
    began = str(one.get("started_at", ""))[:16].replace("T", " ")
    counted = ", ".join(filter(None, parts)) or "none"
    return (one["run_id"], one["state"], one.get("steps", "-"), named, counted, ranks, began)


def _below(root: Path) -> list[Path]:
    """Return the run.json of each run below a folder; a run directory contains no other run."""
    return sorted({path for depth in range(DEEP) for path in root.glob("*/" * depth + "run.json")})


def _about(found: RunReader) -> dict[str, Any]:
    """Return the facts about one run."""
    status = found.ask("/api/v1/status")
    diagnoses = found.diagnoses()
    still_open = [one for one in diagnoses if one.closed_at is None]
    about = found.identity
    return {
        "run_id": about.get("run_id") or found.name,
        "directory": str(found.directory),
        "state": _state(found, is_live=status is not None),
        "started_at": about.get("started_at", ""),
        "ended_at": about.get("ended_at"),
        "ranks": len(about.get("ranks", [])),
        "world_size": about.get("world_size", 0),
        "steps": _steps(status) if status is not None else about.get("steps"),
        "incidents": [_brief(one) for one in diagnoses],
        "num_open": len(still_open),
        "is_critical": has_open_critical(diagnoses),
    }


def _state(found: RunReader, *, is_live: bool) -> str:
    assert found.directory is not None
    if halt_record.read(found.directory) is not None:
        return "halted"
    if is_live:
        return "running"
    return "ended" if found.identity.get("ended_at") else "silent"


def _steps(status: dict[str, Any]) -> int | None:
    return max((rank["step"] for rank in status["ranks"] if rank["step"] is not None), default=None)


def _brief(one: Diagnosis) -> dict[str, Any]:
    return {
        "id": one.id,
        "severity": one.severity,
        "cause": one.causes[0].cause if one.causes else "unknown",
        "step": one.first_step,
        "is_open": one.closed_at is None,
    }


def _row(one: dict[str, Any]) -> tuple[Any, ...]:
    incidents = one["incidents"]
    over = len(incidents) - one["num_open"]
    counted = f"{one['num_open']} open, {over} over" if over else f"{one['num_open']} open" if incidents else "none"
    order = ("critical", "warning", "info")
    worst = min(incidents, key=lambda found: (not found["is_open"], order.index(found["severity"])), default=None)
    steps = "-" if one["steps"] is None else one["steps"]
    ranks = f"{one['ranks']} of {one['world_size']}"
    named = f"{worst['severity']}: {titled(worst['cause'])} at step {worst['step']}" if worst else ""
    started = one["started_at"][:16].replace("T", " ")
    return (_short(Path(one["directory"])), one["state"], steps, named, counted, ranks, started)


def _short(directory: Path) -> Path:
    """Return a path relative to here if it lies below: the other commands accept it, too."""
    here = Path.cwd()
    return directory.relative_to(here) if directory.is_relative_to(here) else directory
