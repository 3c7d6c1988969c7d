"""`holter sidecar`: watch one rank. The rank starts it; by hand it watches a rank whose page is named."""

import argparse
import asyncio
import sys

import holter
from holter import clock
from holter.cli.parts.logs import log_to
from holter.cli.parts.numbers import port
from holter.config import usable
from holter.errors import PageError, UsageError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--page", required=True, help="file descriptor number, or a path such as /proc/PID/fd/N")
    parser.add_argument("--bootstrap-fd", type=int, default=-1, help="pipe that tells where the coordinator is")
    parser.add_argument("--listen-fd", type=int, default=-1, help="socket for the coordinator that this sidecar starts")
    parser.add_argument("--recorder", default="", help="unix socket on which the rank's Flight Recorder can be copied")
    parser.add_argument("--crash-fd", type=int, default=-1, help="socket on which a crashing rank says so")
    parser.add_argument("--orders-fd", type=int, default=-1, help="socket of the rank's halt agent")
    parser.add_argument("--metrics-host", default="127.0.0.1", help="address of /metrics (default: %(default)s)")
    parser.add_argument("--metrics-port", type=port, default=0, help="port of /metrics; 0: a free one")
    parser.add_argument("--terminal", default="", help="terminal device for the live line")
    parser.add_argument("--error-file", default="", help="from which the launcher tells why the rank failed")
    parser.add_argument("--local-rank", type=int, default=0, help="which of the host's ranks it is")
    parser.add_argument(
        "--visible-devices", default=None, help="as CUDA_VISIBLE_DEVICES has them; not given: it is not set"
    )
    parser.add_argument("--clock-base-ns", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--stderr-fd", type=int, default=-1, help="the rank's standard error, for the last line")


def run(args: argparse.Namespace) -> int:
    """Watch the rank until it has ended."""
    # Imported here: `holter sidecar --help` needs no event loop.
    from holter.sidecar.service import Sidecar, SidecarSettings  # noqa: PLC0415
    from holter.sidecar.state import MetricsSettings  # noqa: PLC0415

    if args.clock_base_ns is not None:
        # A rank and its sidecar compare times, but the host's clock may have been set since the rank started.
        clock.go_on_from(args.clock_base_ns)
    # The rank has already complained about wrong settings.
    ours, _ = usable()
    page: int | str = int(args.page) if args.page.isdigit() else args.page
    settings = SidecarSettings(
        page=page,
        bootstrap_fd=args.bootstrap_fd,
        listen_fd=args.listen_fd,
        recorder=args.recorder,
        crash_fd=args.crash_fd,
        orders_fd=args.orders_fd,
        metrics=MetricsSettings(args.metrics_host, args.metrics_port, ours.tls, ours.read_token),
        terminal=args.terminal,
        stderr_fd=args.stderr_fd,
        error_file=args.error_file,
        version=holter.__version__,
        credentials=ours.nats_credentials,
        local_rank=args.local_rank,
        visible_devices=args.visible_devices,
        kernel_log="" if ours.kernel_log == "off" else ours.kernel_log,
        agent=ours.agent,
    )
    try:
        sidecar = Sidecar(settings, log_to)
    except (PageError, OSError) as error:
        raise UsageError(f"cannot watch this rank: {error}") from None
    asyncio.run(sidecar.run())
    sys.stdout.flush()
    return 0
