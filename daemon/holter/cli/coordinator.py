"""`holter coordinator`: watch one run. Rank 0's sidecar starts it with a socket; by hand it binds an address of its own."""

import argparse
import asyncio
import gc
import logging
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args
from urllib.parse import urlsplit

import holter
from holter import clock
from holter.cli.parts.logs import log_to
from holter.cli.parts.numbers import count, port, seconds
from holter.config import Settings, load, otlp, secret_in, usable
from holter.errors import ConfigError, UsageError
from holter.files import read_json
from holter.records import Action
from holter.transport.nats.line import NatsPlace
from holter.transport.tls import SCHEME

if TYPE_CHECKING:
    from holter.coordinator.announcer import AnnouncerSettings
    from holter.coordinator.identity import Access, RunSettings
    from holter.coordinator.service import ServiceSettings

GARBAGE_THRESHOLDS = (100_000, 50, 1000)
"""What a job of thousands of ranks says every second is no garbage in cycles: looking for those took two thirds of the time of reading it."""

logger = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--run-dir", required=True, help="directory of this run; made if it is not there")
    parser.add_argument("--run-id", default="", help="name of the run (default: the directory's name)")
    parser.add_argument(
        "--world-size", type=count, default=0, help="number of ranks (default: what the first one says)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port, default=0, help="port to listen on; 0: a free one")
    parser.add_argument(
        "--fd", type=int, default=-1, help="listening socket that was inherited, instead of host and port"
    )
    parser.add_argument(
        "--token-file", default="", help="file with the token; - reads standard input; default: a new token"
    )
    parser.add_argument(
        "--action",
        choices=get_args(Action),
        default=None,
        help="the most that may be done (default: HOLTER_ACTION, else halt)",
    )
    parser.add_argument(
        "--save-deadline-s",
        type=seconds,
        default=300.0,
        help="how long a save may take in a halt (default: %(default)s)",
    )
    parser.add_argument(
        "--idle-s",
        type=seconds,
        default=30.0,
        help="end after so many seconds without a sidecar (default: %(default)s)",
    )
    parser.add_argument(
        "--webhook", help="address to tell of incidents (default: HOLTER_WEBHOOK, or the settings file)"
    )
    parser.add_argument("--webhook-token-file", help="file with the webhook's secret (default: likewise)")
    parser.add_argument("--runbooks", help="where the pages that messages lead to are served (default: likewise)")
    parser.add_argument("--targets-dir", help="directory for a file with Prometheus' targets (default: likewise)")
    parser.add_argument("--goes-on", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--clock-base-ns", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument(
        "--first-s", type=seconds, default=120.0, help="end if no sidecar has come by then (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until the run has ended."""
    run_dir, is_by_hand = Path(args.run_dir).absolute(), args.fd < 0
    if args.clock_base_ns is not None:
        clock.go_on_from(args.clock_base_ns)
    listener = _listener(args)
    _prepare(run_dir, is_by_hand=is_by_hand)
    log_to(run_dir / "logs" / "coordinator.log", is_by_hand=is_by_hand)
    settings = _settings(args)
    place = _place(settings)
    # Imported here, and in what is called from here: wrong use is told at once, and `--help` needs no event loop.
    from holter.coordinator.identity import ACCESS, Access  # noqa: PLC0415
    from holter.coordinator.service import serve  # noqa: PLC0415

    # A coordinator that takes over speaks to sidecars that know the token of the former one.
    former = read_json(run_dir / ACCESS, Access) if place is not None else None
    service = _service(args, settings, former)
    about = _about(args, settings, run_dir, _address(listener, is_tls=settings.tls.is_on))
    if is_by_hand:
        sys.stderr.write(
            f"holter: coordinator of {about.run_id} at {about.address}; the tokens are in {run_dir}/coordinator.json\n"
        )
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    if place is not None:
        from holter.coordinator.standby import serve_with_lease  # noqa: PLC0415

        reason = asyncio.run(serve_with_lease(about, service, listener, place))
    else:
        reason = asyncio.run(serve(about, service, listener))
    if is_by_hand:
        sys.stderr.write(f"holter: coordinator ended: {reason}\n")
    return 0


def _place(settings: Settings) -> NatsPlace | None:
    """Return where NATS is, if it is to be used; refuse to serve in the clear if TLS was requested but cannot be used."""
    if (problem := settings.tls.problem()) is not None:
        logger.error("%s", problem)
        raise UsageError(problem)
    if not settings.nats:
        return None
    place = NatsPlace(settings.nats, settings.nats_credentials, settings.tls)
    if (problem := place.problem()) is not None:
        raise UsageError(problem)
    return place


def _about(args: argparse.Namespace, settings: Settings, run_dir: Path, address: str) -> "RunSettings":
    from holter.cli.parts.earlier import earlier_runs  # noqa: PLC0415
    from holter.coordinator.identity import RunSettings  # noqa: PLC0415

    return RunSettings(
        run_dir,
        args.run_id or run_dir.name,
        address,
        args.world_size,
        args.action or settings.action,
        args.save_deadline_s,
        goes_on=args.goes_on,
        earlier=earlier_runs(run_dir, settings.memory),
        public_url=settings.public_url,
    )


def _service(args: argparse.Namespace, settings: Settings, former: "Access | None") -> "ServiceSettings":
    from holter.coordinator.http.doors import DoorSettings, raise_descriptor_limit  # noqa: PLC0415
    from holter.coordinator.service import Limits, ServiceSettings  # noqa: PLC0415

    token = _token(args.token_file, former)
    try:
        limits = Limits(first_s=args.first_s, idle_s=args.idle_s, linger_s=settings.linger_s)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if (too_few := raise_descriptor_limit(args.world_size)) is not None:
        logger.warning("%s", too_few)
    return ServiceSettings(
        doors=DoorSettings(
            report_token=token,
            read_token=settings.read_token,
            hosts=[urlsplit(settings.public_url).hostname or ""] if settings.public_url else [],
            tls=settings.tls,
        ),
        halt_token=_halt_token(settings, former),
        version=holter.__version__,
        has_run_clock=args.clock_base_ns is not None,
        is_only_one=args.fd < 0,
        limits=limits,
        announcing=_announcing(settings),
    )


def _announcing(settings: Settings) -> "AnnouncerSettings":
    from holter.coordinator.announcer import AnnouncerSettings, WebhookSettings  # noqa: PLC0415
    from holter.exporters.alert_text import RUNBOOKS  # noqa: PLC0415

    collector, wrong = otlp()
    for sentence in wrong:
        logger.warning("%s", sentence)
    return AnnouncerSettings(
        webhook=WebhookSettings(settings.webhook, settings.webhook_token_file) if settings.webhook else None,
        targets_dir=Path(settings.targets_dir).absolute() if settings.targets_dir else None,
        runbooks=settings.runbooks.rstrip("/") or RUNBOOKS,
        notify=settings.notify,
        otlp=collector,
        step_spans=settings.step_spans,
        version=holter.__version__,
    )


def _halt_token(settings: Settings, former: "Access | None") -> str:
    """Return the token for halts.

    Inside a job nobody can repair a file that cannot be read: then a token is made, as if no file was named.
    """
    if settings.halt_token_file:
        try:
            return secret_in(settings.halt_token_file, "HOLTER_HALT_TOKEN_FILE")
        except ConfigError as error:
            logger.warning("%s; another token is in coordinator.json", error)
    return (former.halt_token if former is not None else "") or secrets.token_urlsafe(32)


def _token(source: str, former: "Access | None") -> str:
    """Return the token for reports. It is never an argument, because process listings show those."""
    if not source:
        return former.token if former is not None else secrets.token_urlsafe(32)
    try:
        text = sys.stdin.readline() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {source}: cannot be read: {error}") from None
    if not text.strip():
        raise UsageError(f"--token-file {source}: holds no token")
    return text.strip()


def _settings(args: argparse.Namespace) -> Settings:
    """Load the settings. Inside a job wrong settings do not stop the coordinator; if they are rank 0's own, it has complained already."""
    options = {name: getattr(args, name) for name in ("webhook", "webhook_token_file", "runbooks", "targets_dir")}
    if args.fd < 0:
        return load(options=options)
    settings, wrong = usable(options=options)
    for sentence in wrong:
        logger.warning("%s; the rest is used", sentence)
    return settings


def _listener(args: argparse.Namespace) -> socket.socket:
    try:
        if args.fd >= 0:
            return socket.socket(fileno=args.fd)
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        return socket.create_server((args.host, args.port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        where = f"--fd {args.fd}" if args.fd >= 0 else f"{args.host}:{args.port}"
        # asyncio and socket add the address to strerror, but it is in the message already.
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "ports end at 65535"
        raise UsageError(f"cannot listen on {where}: {reason}") from None


def _prepare(run_dir: Path, *, is_by_hand: bool) -> None:
    """Make the run directory.

    Inside a job an unusable one does not stop the coordinator: the problem is counted and shown, and the run is served
    from memory.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_writable = os.access(run_dir, os.W_OK | os.X_OK)
        reason = "it is not writable"
    except OSError as error:
        is_writable, reason = False, str(error.strerror)
    if is_by_hand and not is_writable:
        raise UsageError(f"cannot use {run_dir} as run directory: {reason}")


def _address(listener: socket.socket, *, is_tls: bool) -> str:
    host, port = listener.getsockname()[:2]
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - what was bound, not a choice
        host = socket.gethostname()
    scheme = SCHEME if is_tls else "http://"
    return f"{scheme}[{host}]:{port}" if ":" in host else f"{scheme}{host}:{port}"
