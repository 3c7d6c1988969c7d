"""Attach holter to this process, once, whatever the framework.

    standing halt obeyed -> page made -> sidecar started -> hooks installed -> coordinator's address through the job's store

If a step fails, training stays as it was and one sentence is printed. `holter.watch` is the explicit way: attaching
twice has the effect of once, and what is passed to it is watched in addition.
"""

import contextlib
import dataclasses
import importlib.util
import os
import secrets
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

import holter
from holter import clock
from holter.config import Settings, usable, visible_devices
from holter.errors import PageError
from holter.frameworks import halts, place, startup
from holter.frameworks.all import ALL
from holter.frameworks.loggers import Loggers
from holter.frameworks.place import RankPlace
from holter.frameworks.tracker_marks import TrackerMarks
from holter.halting import halt_record
from holter.page import PageWriter
from holter.rank.context import ObservationWriter
from holter.rank.flight_server import FlightServer
from holter.rank.guard import say
from holter.rank.hold.halt_agent import HaltAgent
from holter.rank.hold.peers import own_address
from holter.rank.hooks.endings import is_interactive
from holter.rank.hooks.signals import CrashNotice, allow_stacks
from holter.rank.monitor import Monitor
from holter.rank.rendezvous import Rendezvous
from holter.records import EXIT_CODE, Attached
from holter.redaction import without_secrets
from holter.sidecar import spawn
from holter.sidecar.process import started_ticks
from holter.sidecar.spawn import Bootstrap
from holter.transport.tls import SCHEME

RANK_PID = "HOLTER_RANK_PID"
"""Environment variable that marks a rank, so that its children know that they are none."""
RUNS = Path("holter-runs")
SAYS_S = 30.0
"""Seconds for which other ranks wait for rank 0, which explains the halt and may still be importing: a launcher ends
all ranks when the first has left."""


@dataclass
class Attachment:
    """What watches this process."""

    monitor: Monitor
    run_dir: str
    """Path of the run directory; empty on ranks that learn it from rank 0."""


_attachment: Attachment | None = None
_has_failed = False


def attach(framework: str = "loop") -> Attachment | None:
    """Watch this process; a second call returns the first attachment.

    None if that failed; then training continues unobserved.
    """
    global _attachment, _has_failed  # noqa: PLW0603  a process has one
    if _attachment is not None or _has_failed:
        return _attachment
    # Set before the try: however it ends, even by the end of the process, it is not tried again in the middle of
    # training.
    _has_failed = True
    try:
        settings, here = _settings(), place.find()
        obey_standing_halt(settings, here, os.environ)
        _attachment = _attach(settings, here, framework)
    except Exception as error:  # noqa: BLE001  the loop must go on
        say(f"cannot watch this process, training goes on unobserved: {type(error).__name__}: {error}")
    _has_failed = _attachment is None
    return _attachment


def obey_standing_halt(settings: Settings, here: RankPlace, environ: Mapping[str, str]) -> None:
    """End with 93 if a halt stands for this job, whatever the action is; lift the halt if the user said so.

    HOLTER_RESUME=1 says so at a first start. At a restart, a standing halt belongs to this same job, and nobody has
    looked at it.
    """
    stands = halt_record.find(settings.run_dir, RUNS, halt_record.job_names(environ, os.getppid(), is_start=True))
    if stands is None:
        return
    run_dir, halt = stands
    if settings.resume and not halt_record.is_restart(environ):
        if here.rank == 0:
            halt_record.lift(run_dir)
        return
    if here.rank == 0:
        for sentence in halt_record.sentences(run_dir, halt, environ):
            say(sentence)
    else:
        threading.Event().wait(SAYS_S)
    raise SystemExit(EXIT_CODE)


def begin_life(run_dir: str, environ: Mapping[str, str]) -> None:
    """Record the names of this job, by which its next start looks for a halt."""
    halt_record.begin(Path(run_dir))
    halt_record.introduce(Path(run_dir), halt_record.job_names(environ, os.getppid()))


def _settings() -> Settings:
    settings, wrong = usable()
    for sentence in wrong:
        say(f"{sentence}; the rest is used, the action is {settings.action}")
    for warning in settings.warnings():
        say(warning)
    if settings.is_nats and importlib.util.find_spec("nats") is None:
        say("HOLTER_NATS needs the package nats-py, and this run is not watched without it: pip install 'holter[nats]'")
    if (problem := settings.tls.problem()) is not None:
        say(f"{problem}; nothing is sent in the clear instead, so this run is not watched")
    if settings.action == "halt" and is_interactive():
        # A halt ends the process, and with it everything that the person has in the session.
        say("this is an interactive session, which a halt would end: the action is notify")
        settings = dataclasses.replace(settings, action="notify")
    return settings


def _attach(settings: Settings, here: RankPlace, framework: str) -> Attachment | None:
    try:
        page = PageWriter.create(
            rank=here.rank,
            world_size=here.world_size,
            pid=os.getpid(),
            started_ticks=started_ticks(os.getpid()),
            ring_bytes=settings.ring_bytes,
        )
    except PageError as error:
        say(f"rank {here.rank} trains unobserved: {error}")
        return None
    bootstrap, listener = _bootstrap(settings, here)
    recorder_path, crash_notice = _serve_recorder(), CrashNotice()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    send = _start_sidecar(
        settings,
        here,
        page=page,
        listener=listener,
        recorder_path=recorder_path,
        crash_notice=crash_notice,
        orders=theirs,
    )
    crash_notice.install()
    if bootstrap is not None:
        send(spawn.encode_bootstrap(bootstrap))
    recorder = ObservationWriter(page, here.rank)
    recorder.say(0, _introduce(here, framework))
    monitor = Monitor(
        recorder,
        world_size=here.world_size,
        budget=settings.overhead_budget,
        floor_s=settings.overhead_floor_s,
        threads=settings.threads,
        local_buffers=settings.local_buffers,
        frozen=settings.frozen,
        mesh=settings.mesh,
        snapshot_every=settings.snapshot_every,
        snapshot_bytes=settings.snapshot_bytes,
        guard_wait_s=settings.guard_wait_s,
        frameworks=ALL,
    )
    try:
        # Empty if not known yet, or if the coordinator existed before the job and has a directory of its own.
        run_dir = "" if bootstrap is None or settings.coordinator else bootstrap.run_dir
        agent = halts.open_agent(settings, here, monitor, ours, run_dir)
        monitor.install()
        marks = TrackerMarks(run_dir, monitor.context.guard) if here.rank == 0 and run_dir else None
        Loggers(monitor, marks).install()
        for each in ALL:
            each.attach(monitor)
        _meet(monitor, here, bootstrap, send, agent)
    except Exception:
        _detach(monitor, ours)
        raise
    os.environ[RANK_PID] = str(os.getpid())
    if here.rank == 0 and bootstrap is not None:
        say(
            f"watching {here.world_size} rank{'s' * (here.world_size > 1)} · {bootstrap.url} · {_short(bootstrap.run_dir)}"
        )
    return Attachment(monitor, bootstrap.run_dir if bootstrap else "")


def _detach(monitor: Monitor, orders: socket.socket) -> None:
    """Undo a partial attachment, so that no step is held and no order is heard."""
    monitor.context.hold.agent = None
    with contextlib.suppress(Exception):
        monitor.uninstall()
    with contextlib.suppress(OSError):
        # It is not closed, because the agent's thread may be listening.
        orders.shutdown(socket.SHUT_RDWR)


def _bootstrap(settings: Settings, here: RankPlace) -> tuple[Bootstrap | None, socket.socket | None]:
    """Return how to reach the coordinator: known from the start on rank 0, and on every rank if a coordinator was named.

    Other ranks get None and look for it. The second value is the listening socket for a coordinator to be started.
    """
    run_id = settings.run_id or f"{clock.compact(clock.wall_ns())}-{secrets.token_hex(2)}"
    run_dir = str(Path(settings.run_dir or RUNS / run_id).absolute())
    if settings.coordinator:
        address = settings.coordinator.removeprefix("http://").rstrip("/")
        return Bootstrap(
            address=address, token=settings.token, run_id=settings.run_id, run_dir=run_dir, action=settings.action
        ), None
    if here.rank != 0:
        return None, None
    listener, warning = place.listen(_listen_host(settings, here), settings.port)
    if warning:
        say(warning)
    _check_writable(run_dir)
    begin_life(run_dir, os.environ)
    served = f"{SCHEME if settings.tls.is_on else ''}{_reached_at(settings, here)}:{listener.getsockname()[1]}"
    return Bootstrap(
        address=settings.nats or served,
        page=served,
        token=settings.token or secrets.token_hex(16),
        run_id=run_id,
        run_dir=run_dir,
        action=settings.action,
        save_deadline_s=settings.save_deadline_s,
        starts_coordinator=True,
    ), listener


def _listen_host(settings: Settings, here: RankPlace) -> str:
    """Return the address to listen on, for the coordinator (ranks on other hosts) and each sidecar (Prometheus)."""
    if settings.listen_host or here.is_one_host:
        return settings.listen_host or "127.0.0.1"
    try:
        return own_address(here.address)[0]
    except OSError:
        return "0.0.0.0"  # noqa: S104 - a name that this host cannot resolve may be its own


def _reached_at(settings: Settings, here: RankPlace) -> str:
    """Return where ranks find the coordinator: the job's meeting point, unless it listens on one named interface."""
    named = settings.listen_host
    if named in {"", "0.0.0.0", "::"}:  # noqa: S104 - compared, not listened on
        return here.address
    return f"[{named}]" if ":" in named else named


def _check_writable(run_dir: str) -> None:
    try:
        Path(run_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = Path(run_dir) / ".writable"
        probe.write_text("", encoding="utf-8")
        probe.unlink()
    except OSError as error:
        say(f"cannot write to {run_dir} ({error.strerror}): incidents are shown live but not kept")


def _serve_recorder() -> str:
    """Serve copies of the Flight Recorder; return the path of the socket, empty if that is not possible."""
    server = FlightServer()
    try:
        server.start()
    except (OSError, RuntimeError) as error:
        say(f"the Flight Recorder cannot be copied, a hang is explained without it: {error}")
    return server.path


def _start_sidecar(  # noqa: PLR0913 - what is handed down
    settings: Settings,
    here: RankPlace,
    *,
    page: PageWriter,
    listener: socket.socket | None,
    recorder_path: str,
    crash_notice: CrashNotice,
    orders: socket.socket,
) -> "Pipe":
    read_end, write_end = os.pipe()
    arguments = ["sidecar", "--page", str(page.fd), "--bootstrap-fd", str(read_end)]
    arguments += ["--clock-base-ns", str(clock.base_ns())]
    arguments += ["--crash-fd", str(crash_notice.sidecar_fd), "--orders-fd", str(orders.fileno())]
    pass_fds = [page.fd, read_end, crash_notice.sidecar_fd, orders.fileno()]
    arguments += ["--local-rank", str(here.local_rank)]
    if (visible := visible_devices()) is not None:
        # As one word, because a list that begins with -1 would be taken for an option.
        arguments.append(f"--visible-devices={visible}")
    if recorder_path:
        arguments += ["--recorder", recorder_path]
    if listener is not None:
        arguments += ["--listen-fd", str(listener.fileno())]
        pass_fds.append(listener.fileno())
    if settings.metrics_port:
        arguments += ["--metrics-port", str(settings.metrics_port + here.local_rank)]
    arguments += ["--metrics-host", _listen_host(settings, here)]
    if here.rank == 0 and (terminal := _terminal()):
        arguments += ["--terminal", terminal]
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE", ""):
        arguments += ["--error-file", error_file]
    errors = _own_stderr() if here.rank == 0 else -1
    if errors >= 0:
        arguments += ["--stderr-fd", str(errors)]
        pass_fds.append(errors)
    try:
        allow_stacks(spawn.start(arguments, pass_fds=pass_fds, environ=os.environ))
    finally:
        os.close(read_end)
        if errors >= 0:
            os.close(errors)
        orders.close()
        if listener is not None:
            listener.close()
    return Pipe(write_end)


class Pipe:
    """The rank's end of the pipe to its sidecar; it sends one line and closes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, line: bytes) -> None:
        """Send the line."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            # If the sidecar is gone, the pipe is broken; its missing heartbeat is noticed elsewhere.
            with contextlib.suppress(OSError):
                os.write(descriptor, line)
            os.close(descriptor)


def _meet(monitor: Monitor, here: RankPlace, bootstrap: Bootstrap | None, send: Pipe, agent: HaltAgent) -> None:
    if here.world_size == 1 or (bootstrap is not None and not bootstrap.starts_coordinator):
        return
    published = None
    if bootstrap is not None:
        published = spawn.encode_bootstrap(msgspec.structs.replace(bootstrap, starts_coordinator=False))

    def found(line: bytes) -> None:
        send(line)
        agent.run_dir = spawn.decode_bootstrap(line).run_dir

    Rendezvous(monitor.context, message=published, found=found).install()


def _introduce(here: RankPlace, framework: str) -> Attached:
    return Attached(
        pid=os.getpid(),
        host=socket.gethostname(),
        world_size=here.world_size,
        local_rank=here.local_rank,
        command=without_secrets(sys.argv),
        versions={
            "holter": holter.__version__,
            "torch": str(torch.__version__),
            "python": ".".join(map(str, sys.version_info[:3])),
        },
        framework=framework,
        environment=startup.environment(os.environ) if here.rank == 0 else {},
        code=startup.code(sys.argv[0] if sys.argv else "") if here.rank == 0 else {},
    )


def _own_stderr() -> int:
    """Return a copy of standard error's descriptor; -1 if there is none."""
    try:
        return os.dup(2)
    except OSError:
        return -1


def _terminal() -> str:
    """Return the terminal that the launcher was started from, if standard error still goes there and can draw; else empty."""
    try:
        return os.ttyname(2) if os.isatty(2) and os.environ.get("TERM", "dumb") != "dumb" else ""
    except OSError:
        return ""


def _short(path: str) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        # The path is elsewhere, or the current directory was deleted.
        return path


class Watch:
    """The result of `holter.watch(model, optimizer)`."""

    def log(self, **values: Any) -> None:
        """Report what only the script knows; each value is a number or a tensor, or a module for ema.

        kl, entropy, vocabulary, rewards and advantages ([groups, samples]), ratio, ema, rollout (the weights that
        generate), loss_terms={...}, codebook_usage ([codes] counts); other names are kept as plain series.
        """
        log(values)


def watch(first: Any, optimizer: Any = None, *, mesh: Any = None) -> Any:
    """Attach: `watch(accelerator)` returns the accelerator; `watch(model, optimizer)` returns a Watch.

    `mesh` says how ranks are laid out if no wrapper does: a DeviceMesh, or names and sizes (`{"pp": 2, "dp": 2}`),
    outermost first.
    """
    is_accelerator = hasattr(first, "prepare") and hasattr(first, "backward")
    attachment = attach("accelerate" if is_accelerator else "loop")
    models = list(getattr(first, "_models", ())) if is_accelerator else [first]
    if attachment is not None:
        if mesh is not None:
            attachment.monitor.context.models.said.said = mesh
        for model in models:
            attachment.monitor.add_model(model)
    del optimizer  # It becomes known when it first steps.
    return first if is_accelerator else Watch()


def log(values: Mapping[str, Any]) -> None:
    """Report these numbers, tensors or modules for the step they belong to; never raises."""
    attachment = attach()
    if attachment is not None:
        attachment.monitor.logs.log(values)
