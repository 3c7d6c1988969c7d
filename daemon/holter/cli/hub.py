"""`holter hub`: one read-only page and `/metrics` for all runs of a NATS server."""

import argparse
import asyncio
import sys

import holter
from holter.cli.parts.numbers import port
from holter.config import load
from holter.errors import UsageError
from holter.transport.nats.line import NatsPlace


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("address", nargs="?", default="", help="servers of NATS (default: HOLTER_NATS)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port, default=0, help="port to listen on; 0: a free one")


def run(args: argparse.Namespace) -> int:
    """Serve until the process is stopped."""
    settings = load()
    address = args.address or settings.nats
    if not address.startswith(("nats://", "tls://")):
        raise UsageError("name the servers, nats://host:4222, or set HOLTER_NATS")
    place = NatsPlace(address, settings.nats_credentials, settings.tls)
    for problem in (place.problem(), settings.tls.problem()):
        if problem is not None:
            raise UsageError(problem)
    # Imported here: `--help` needs no event loop.
    from holter.coordinator.http.doors import DoorSettings  # noqa: PLC0415
    from holter.coordinator.http.hub import serve_hub  # noqa: PLC0415

    doors = DoorSettings(report_token="", read_token=settings.read_token, tls=settings.tls)
    try:
        asyncio.run(serve_hub(place, doors, args.host, args.port, holter.__version__, _say))
    except OSError as error:
        raise UsageError(f"cannot listen on {args.host}:{args.port}: {error.strerror}") from None
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"holter: {text}\n")
