"""`holter page`: the page of a run that is over, served from its directory until Ctrl-C, beside another one with `--beside`. A run that still lives is shown by its coordinator."""

import argparse
import asyncio
import os
import socket
import sys
from typing import TYPE_CHECKING

import holter
from holter.cli.parts.numbers import port
from holter.cli.parts.run_reader import RunReader, locate
from holter.cli.parts.terminal import with_progress
from holter.errors import UsageError

if TYPE_CHECKING:
    from holter.coordinator.recovery.rebuilt_run import FinishedRun


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="run directory (default: the newest run)")
    parser.add_argument(
        "--beside", metavar="RUN", default="", help="draw this run's numbers beside them, by step, to compare the two"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port, default=0, help="port to listen on; 0: a free one")


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C; if the run's coordinator answers, only print where its page is."""
    found = locate(args.run)
    other = locate(args.beside) if args.beside else None
    if other is not None and other.directory is None:
        raise UsageError(f"--beside must name a run directory, got {args.beside}")
    if other is None and found.ask("/api/v1/status") is not None:
        sys.stdout.write(f"run {found.name} lives; its page is {found.url}/\n")
        return 0
    if found.directory is None:
        raise UsageError(f"no coordinator answers at {found.address}")
    listener = _listener(args.host, args.port)
    _serve(found, other, listener)
    return 0


def _serve(found: RunReader, other: RunReader | None, listener: socket.socket) -> None:
    from holter.coordinator.recovery import rebuilt_run  # noqa: PLC0415 - wrong use is told at once

    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finished = _read(found, address)
    if other is not None:
        series = _read(other, address).page_state.paint().joined_series()
        finished.page_state.other = {"name": other.name, "series": series}
    sys.stdout.write(f"the page of {found.name}: {address}/   (Ctrl-C ends it)\n")
    sys.stdout.flush()
    asyncio.run(rebuilt_run.serve(finished, holter.__version__, listener))


def _read(found: RunReader, address: str) -> "FinishedRun":
    from holter.coordinator.identity import RunSettings  # noqa: PLC0415
    from holter.coordinator.recovery import journal, rebuilt_run  # noqa: PLC0415

    assert found.directory is not None
    run_dir, damage = found.directory.absolute(), list[str]()
    settings = RunSettings(run_dir, found.name, address, int(found.identity.get("world_size") or 0))
    finished = rebuilt_run.FinishedRun(settings, found.identity)
    finished.read(with_progress(journal.read(run_dir / "journal", damage)))
    finished.finish(found.diagnoses())
    sys.stderr.write("".join(f"holter: journal: {line}\n" for line in damage))
    return finished


def _listener(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "ports end at 65535"
        raise UsageError(f"cannot listen on {host}:{port}: {reason}") from None
