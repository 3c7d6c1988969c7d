"""`holter agent`: join what the sidecars of a host or pod say, and pass it on to the coordinator. A host's first sidecar starts it where HOLTER_AGENT=auto."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from holter import clock
from holter.cli.parts.logs import log_to
from holter.cli.parts.numbers import count, seconds
from holter.config import Settings, secret_in, usable
from holter.errors import UsageError
from holter.transport.local_socket import AUTO, lock, prepare, socket_of

LARGE = 16_000
"""Number of ranks assumed if nobody says how large the job is; the agent then reports once a second."""

logger = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--socket",
        default="",
        help="where to listen for sidecars, in a directory that is made with mode 0700 (default: HOLTER_AGENT)",
    )
    parser.add_argument(
        "--coordinator", default="", help="the coordinator's address (default: HOLTER_COORDINATOR, else HOLTER_NATS)"
    )
    parser.add_argument("--run-id", default="", help="name of the run (default: HOLTER_RUN_ID, else the coordinator's)")
    parser.add_argument(
        "--token-file", default="", help="file with the token to report (default: HOLTER_TOKEN or HOLTER_TOKEN_FILE)"
    )
    parser.add_argument(
        "--world-size",
        type=count,
        default=0,
        help="number of ranks of the job; in small ones it reports up to four times a second, in large ones once",
    )
    parser.add_argument(
        "--idle-s",
        type=seconds,
        default=0.0,
        help="end so many seconds after the last sidecar has left; 0: never (default)",
    )
    parser.add_argument(
        "--first-s",
        type=seconds,
        default=0.0,
        help="end if no coordinator has answered or no sidecar has come by then; 0: never (default)",
    )
    parser.add_argument("--log-file", default="", help=argparse.SUPPRESS)
    parser.add_argument("--lock-fd", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--clock-base-ns", type=int, default=None, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Serve until the sidecars have left, or until SIGTERM."""
    if args.clock_base_ns is not None:
        clock.go_on_from(args.clock_base_ns)
    ours, wrong = usable()
    is_by_hand = args.lock_fd < 0
    if is_by_hand and wrong:
        raise UsageError(wrong[0])
    address, token = _whom_to_tell(args, ours)
    run_id = args.run_id or ours.run_id
    path = _socket(args.socket or ours.agent, run_id, address)
    if (problem := prepare(path.parent)) is not None:
        raise UsageError(problem)
    held = args.lock_fd if args.lock_fd >= 0 else lock(path)
    if held is None:
        raise UsageError(f"another agent listens at {path}")
    log_to(Path(args.log_file or os.devnull), is_by_hand=is_by_hand)
    # Imported here: `holter agent --help` needs no event loop.
    from holter.agent.service import HostAgent, HostAgentSettings  # noqa: PLC0415
    from holter.transport.limits import settings_for  # noqa: PLC0415

    uplink = settings_for(args.world_size or LARGE, ours.tls, credentials=ours.nats_credentials)
    settings = HostAgentSettings(path, address, token, run_id, first_s=args.first_s, idle_s=args.idle_s, uplink=uplink)

    async def serve() -> str:
        agent = HostAgent(replace(settings))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, agent.stop)
        return await agent.run()

    reason = asyncio.run(serve())
    logger.info("ending: %s", reason)
    if is_by_hand:
        sys.stderr.write(f"holter: agent ended: {reason}\n")
    return 0


def _whom_to_tell(args: argparse.Namespace, ours: Settings) -> tuple[str, str]:
    """Return the coordinator's address, and the token for reporting to it."""
    address = args.coordinator or ours.coordinator or ours.nats
    if not address:
        raise UsageError("the coordinator's address is needed: --coordinator, HOLTER_COORDINATOR or HOLTER_NATS")
    if address.startswith(("nats://", "tls://")) and not (args.run_id or ours.run_id):
        raise UsageError("one server serves many runs: --run-id or HOLTER_RUN_ID must say which one this is")
    token = secret_in(args.token_file, "--token-file") if args.token_file else ours.token
    if not token:
        raise UsageError("the token to report is needed: --token-file, HOLTER_TOKEN_FILE or HOLTER_TOKEN")
    return address, token


def _socket(named: str, run_id: str, address: str) -> Path:
    if named and named != AUTO:
        return Path(named).absolute()
    if not run_id:
        raise UsageError("--socket or HOLTER_AGENT must say where to listen, or --run-id which run it is")
    return socket_of(run_id, address)
