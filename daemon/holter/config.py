"""All settings, in one place. Command-line options win over the environment, that over `holter.toml`, that over the defaults.

A field `overhead_budget` is `HOLTER_OVERHEAD_BUDGET` in the environment and `overhead_budget` in the file. Nothing else in holter reads
the environment. A value that cannot be used is named as the user wrote it:

    ConfigError: HOLTER_OVERHEAD_BUDGET must be a number between 0 and 1, got 'fast'
"""

import dataclasses
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args
from urllib.parse import unquote

from holter.errors import ConfigError
from holter.files import read_plain
from holter.records import Action
from holter.redaction import cleaned
from holter.transport.otlp import OtlpSettings
from holter.transport.tls import TlsFiles

PREFIX = "HOLTER_"
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that a user can choose."""

    run_dir: str = ""
    """This run's own directory; empty: `./holter-runs/<run_id>`."""
    run_id: str = ""
    """Name of the run; empty: the start time and a few random letters."""
    coordinator: str = ""
    """Address (`host:port`) of a coordinator that already runs; empty: rank 0's sidecar starts one."""
    agent: str = ""
    """Whether the sidecars of a host report through an agent, for jobs of thousands of ranks: `auto` (the host's first sidecar starts one), or the path of the unix socket of one that already runs; empty: each reports to the coordinator itself."""
    token: str = ""
    """Secret that sidecars show to the coordinator; empty: made at start and passed through the job's rendezvous store."""
    token_file: str = ""
    """File that holds the token, so that it is in no process listing."""
    halt_token_file: str = ""
    """File with the secret that `holter halt` shows; empty: the coordinator makes one and writes it to coordinator.json, which only its owner can read."""
    read_token: str = ""
    """Secret without which page, API and metrics of the coordinator cannot be read; empty: whoever reaches the port may read."""
    read_token_file: str = ""
    """File that holds the read token."""
    tls_certificate: str = ""
    """File (PEM) with the certificate that coordinator and sidecars serve with; empty: everything is sent over the network in the clear."""
    tls_key: str = ""
    """File (PEM) with the certificate's key."""
    tls_ca: str = ""
    """File (PEM) with the authority whose certificates are trusted; empty: only `tls_certificate` itself is, whatever the name of its host."""
    public_url: str = ""
    """Address by which people reach the coordinator, for example through a proxy; requests for any other host name are refused."""
    action: Action = "halt"
    """What may be done about a critical cause that was observed directly: observe, notify or halt."""
    overhead_budget: float = 0.01
    """Share of step time that holter may take in the rank; it reads fewer tensors, less often, to stay below."""
    overhead_floor_s: float = 0.0005
    """Seconds (and small multiples of them) that reading may take of a step even if the budget allows less, so that short steps are watched too."""
    port: int = 0
    """Port of the coordinator; 0: a free one."""
    metrics_port: int = 0
    """Port of a sidecar's own /metrics, plus the local rank; 0: a free one."""
    listen_host: str = ""
    """Address that the coordinator binds; empty: loopback if all ranks are on this host, else the interface through which the job's ranks meet."""
    ring_bytes: int = 4 << 20
    """Size in bytes of the ring between a rank and its sidecar; what does not fit is dropped and counted."""
    threads: int = 1
    """Number of threads that the statistics may use in the rank, beside the training's own."""
    local_buffers: tuple[str, ...] = ()
    """Names (globs, separated by commas, or a list in the file) of buffers that are meant to differ between ranks."""
    frozen: tuple[str, ...] = ()
    """Names (in the same form) of parameters that are not supposed to train."""
    mesh: str = ""
    """How ranks are laid out if no wrapper says it: axes with their sizes, outermost first (`pp=2,dp=2`). Plain parameters are compared along axes with data-parallel names (`dp`, `data`, `replicate`), or marked like `dp:replicate=2`; `x:split=2` says that they differ along `x`."""
    memory: str = ""
    """File with the incidents of earlier runs, searched when a new one opens; empty: memory.sqlite beside the run directories; `off`: none."""
    webhook: str = ""
    """Address to which the coordinator sends incidents, in the form of Alertmanager's webhooks; empty: none are sent."""
    webhook_token_file: str = ""
    """File with the secret that is shown to the webhook as a bearer token."""
    notify: str = ""
    """Phones and chats that are told of incidents: addresses as apprise knows them (`slack://…`, `discord://…`, `mailto://…`, `pagerduty://…`), separated by spaces or commas. Needs `pip install holter[notify]`."""
    notify_file: str = ""
    """File that holds the addresses for `notify`, because they are secrets."""
    step_spans: int = 0
    """Number of steps between two that are sent as spans, if events go to OpenTelemetry (OTEL_EXPORTER_OTLP_ENDPOINT); 0: none."""
    runbooks: str = ""
    """Address below which `grafana/runbooks` is served, for the links in messages to the webhook; empty: one that leads nowhere."""
    targets_dir: str = ""
    """Directory, on a disk that Prometheus reads, for a file with the run's scrape targets; empty: none is written."""
    linger_s: float = 60.0
    """Seconds for which the coordinator of a run that ended with an incident or a halt still answers, so that the last state is scraped."""
    halt_signals: tuple[str, ...] = ()
    """Signals (`SIGTERM`, `SIGUSR1`) on which a rank asks for a halt at an agreed step instead of ending at once."""
    save_deadline_s: float = 300.0
    """Seconds that a save may take in a halt; after that the run is halted without it."""
    snapshot_every: int = 0
    """Steps between two copies of the training state in memory; a halt goes back to one if the live weights are poisoned or partly updated. 0: none."""
    snapshot_bytes: int = 0
    """Bytes of a host's memory that such copies may take for each rank; 0: two copies, whatever their size."""
    guard_wait_s: float = 600.0
    """Seconds that a step waits at most for a device to say whether its gradients are finite, if the optimizer cannot skip a step by itself (torch's fused ones can) or ranks apply shards. 0: it never waits."""
    resume: int = 0
    """1: start although this run was halted."""
    kernel_log: str = "/dev/kmsg"
    """Log of the host's kernel in which sidecars look for faults of devices, if they may read it: a file, or `off`."""
    nats: str = ""
    """Servers of NATS (`nats://host:4222`, several separated by commas, `tls://` for TLS) through which sidecars and coordinator communicate; empty: they connect to each other."""
    nats_credentials: str = ""
    """File of credentials for the NATS servers: a `.creds` file, a seed, or `user:password`. `{who}` in its path becomes `rank-3`, `coordinator` or `reader`."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        The error carries the field's name; `load` turns it into the name that the user wrote.
        """
        _require(0 < self.overhead_budget <= 1, "overhead_budget", "a number between 0 and 1", self.overhead_budget)
        _require(self.overhead_floor_s >= 0, "overhead_floor_s", "zero or more seconds", self.overhead_floor_s)
        _require(0 <= self.port < 2**16, "port", "a port between 0 and 65535", self.port)
        _require(0 <= self.metrics_port < 2**16, "metrics_port", "a port between 0 and 65535", self.metrics_port)
        _require(self.ring_bytes >= 1 << 16, "ring_bytes", "at least 65536", self.ring_bytes)
        _require(1 <= self.threads <= 64, "threads", "between 1 and 64", self.threads)  # noqa: PLR2004
        _require(self.action in get_args(Action), "action", "observe, notify or halt", self.action)
        _require(self.save_deadline_s > 0, "save_deadline_s", "more than zero seconds", self.save_deadline_s)
        _require(self.linger_s >= 0, "linger_s", "zero or more seconds", self.linger_s)
        _require(self.snapshot_every >= 0, "snapshot_every", "zero or more steps", self.snapshot_every)
        _require(self.step_spans >= 0, "step_spans", "zero or more steps", self.step_spans)
        _require(self.snapshot_bytes >= 0, "snapshot_bytes", "zero or more bytes", self.snapshot_bytes)
        _require(0 <= self.guard_wait_s <= 3600, "guard_wait_s", "seconds between 0 and 3600", self.guard_wait_s)  # noqa: PLR2004
        for name in ("webhook", "runbooks", "public_url"):
            value = getattr(self, name)
            is_address = not value or value.startswith(("http://", "https://"))
            _require(is_address, name, "an address that begins with http:// or https://", value)
        for name in ("nats", "coordinator"):
            value = getattr(self, name)
            is_plain = "@" not in value if _is_nats(value) or name == "nats" else True
            _require(is_plain, name, "without a password, which goes into the file of HOLTER_NATS_CREDENTIALS", value)
        is_servers = not self.nats or all(_is_nats(part.strip()) for part in self.nats.split(","))
        _require(is_servers, "nats", "addresses that begin with nats:// or tls://", self.nats)
        has_name = bool(self.run_id) or not _is_nats(self.coordinator)
        _require(has_name, "coordinator", "given together with HOLTER_RUN_ID where it is NATS", self.coordinator)
        has_key = bool(self.tls_certificate) == bool(self.tls_key)
        _require(has_key, "tls_certificate", "given together with tls_key", self.tls_certificate)
        _require(self.resume in (0, 1), "resume", "0 or 1", self.resume)
        _require(_is_mesh(self.mesh), "mesh", "axes and sizes such as pp=2,dp=4", self.mesh)
        known = {"SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"}
        _require(
            set(self.halt_signals) <= known, "halt_signals", f"some of {', '.join(sorted(known))}", self.halt_signals
        )
        is_name = not set(self.run_id) & set("/\\ \n") and self.run_id not in {".", ".."}
        _require(is_name, "run_id", "a name without slashes or spaces", self.run_id)

    @property
    def tls(self) -> TlsFiles:
        """The three TLS files together."""
        return TlsFiles(self.tls_certificate, self.tls_key, self.tls_ca)

    @property
    def is_nats(self) -> bool:
        """Whether ranks report through NATS."""
        return _is_nats(self.coordinator) or (bool(self.nats) and not self.coordinator)

    def warnings(self) -> list[str]:
        """Return a sentence for each setting that cannot take effect."""
        said = []
        if self.nats and self.coordinator:
            said.append("HOLTER_NATS takes no effect for ranks: HOLTER_COORDINATOR names where they report")
        if self.nats_credentials and not self.is_nats:
            said.append("HOLTER_NATS_CREDENTIALS takes no effect without HOLTER_NATS")
        if self.coordinator and self.port:
            said.append("HOLTER_PORT takes no effect: HOLTER_COORDINATOR names a coordinator that already runs")
        said += [
            f"HOLTER_{name.upper()} takes no effect here: it is the coordinator's, which already runs"
            for name in ("webhook", "notify", "notify_file", "step_spans", "runbooks", "targets_dir")
            if self.coordinator and getattr(self, name)
        ]
        if self.webhook_token_file and not self.webhook:
            said.append("HOLTER_WEBHOOK_TOKEN_FILE takes no effect without HOLTER_WEBHOOK")
        if self.runbooks and not self.webhook:
            said.append("HOLTER_RUNBOOKS takes no effect without HOLTER_WEBHOOK; rules take `holter alerts --runbooks`")
        return said


def _is_nats(address: str) -> bool:
    return address.startswith(("nats://", "tls://"))


def otlp(environ: Mapping[str, str] = os.environ) -> tuple[OtlpSettings | None, list[str]]:
    """Return the OpenTelemetry settings, None if no endpoint is set, and sentences on variables that take no effect."""
    base = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip().rstrip("/")
    signals = {
        name: environ.get(f"OTEL_EXPORTER_OTLP_{name.upper()}_ENDPOINT", "").strip() for name in ("logs", "traces")
    }
    logs, traces = (signals[name] or (f"{base}/v1/{name}" if base else "") for name in signals)
    is_off = (
        environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or environ.get("OTEL_LOGS_EXPORTER") == "none"
    )
    if not logs or is_off:
        return None, []
    if not logs.startswith(("http://", "https://")):
        return None, ["OTEL_EXPORTER_OTLP_ENDPOINT takes no effect: it does not begin with http:// or https://"]
    protocol = environ.get("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    if protocol == "grpc":
        return None, [
            "OTEL_EXPORTER_OTLP_ENDPOINT takes no effect: holter speaks OTLP over HTTP, and its protocol is grpc"
        ]
    said = []
    timeout = environ.get("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT") or environ.get("OTEL_EXPORTER_OTLP_TIMEOUT") or "10000"
    try:
        timeout_s = _finite(timeout) / 1000
    except ValueError:
        timeout_s = 0.0
    if timeout_s <= 0:
        said.append("OTEL_EXPORTER_OTLP_TIMEOUT takes no effect: it must be milliseconds; 10 s are used")
        timeout_s = 10.0
    headers = _pairs(environ.get("OTEL_EXPORTER_OTLP_LOGS_HEADERS") or environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""))
    resource = {"service.name": "holter"} | _pairs(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    if environ.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = environ["OTEL_SERVICE_NAME"]
    return OtlpSettings(logs, traces or logs, headers, timeout_s, resource), said


def _pairs(text: str) -> dict[str, str]:
    """Parse `a=1,b=%20x`, the format of W3C's baggage."""
    words = (word.partition("=") for word in text.split(","))
    return {name.strip(): unquote(value.strip()) for name, equals, value in words if equals and name.strip()}


class _BadValueError(ValueError):
    def __init__(self, name: str, must_be: str, value: object) -> None:
        super().__init__(name, must_be, value)
        self.name, self.must_be, self.value = name, must_be, value


def _require(is_fine: bool, name: str, must_be: str, value: object) -> None:  # noqa: FBT001
    if not is_fine:
        raise _BadValueError(name, must_be, value)


def _globs(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        raise ValueError
    return tuple(part.strip() for part in parts if part.strip())


def _finite(value: Any) -> float:
    if not math.isfinite(found := float(value)):
        raise ValueError
    return found


_PARSERS: dict[type, tuple[Callable[[Any], Any], str]] = {
    int: (int, "a whole number"),
    float: (_finite, "a number"),
    str: (str, "a text"),
    tuple: (_globs, "names separated by commas"),
}
_FIELDS = {field.name: _PARSERS.get(type(field.default), _PARSERS[str]) for field in dataclasses.fields(Settings)}


def load(
    environ: Mapping[str, str] = os.environ, options: Mapping[str, Any] | None = None, directory: Path | None = None
) -> Settings:
    """Return the settings from command-line options, the environment and the file, strongest first. Raises ConfigError."""
    settings, wrong = usable(environ, options, directory)
    if wrong:
        raise ConfigError(wrong[0])
    return settings


def usable(
    environ: Mapping[str, str] = os.environ, options: Mapping[str, Any] | None = None, directory: Path | None = None
) -> tuple[Settings, list[str]]:
    """Return the usable settings, and a sentence for each value that cannot be used.

    A run must never be halted by mistake: if the action, or the file that may set it, cannot be read, the action is
    notify.
    """
    origin: dict[str, str] = {}
    values: dict[str, Any] = {}
    wrong: list[str] = []
    is_action_known = True
    try:
        from_file = _from_file(environ, directory or Path())
    except ConfigError as error:
        wrong.append(str(error))
        from_file, is_action_known = {}, False
    for source in (from_file, _from_environment(environ), _from_options(options or {})):
        for name, (value, written) in source.items():
            try:
                values[name], origin[name] = _parse(name, value, written), written
            except ConfigError as error:
                wrong.append(str(error))
                values.pop(name, None)
                is_action_known &= name != "action"
    while True:
        try:
            settings = Settings(**({} if is_action_known else {"action": "notify"}) | values)
            break
        except _BadValueError as bad:
            wrong.append(f"{origin[bad.name]} must be {bad.must_be}, got {_told(bad.value)}")
            del values[bad.name]
            is_action_known &= bad.name != "action"
    try:
        for name in ("token", "read_token", "notify"):
            settings = _with_secret(settings, name, origin)
    except ConfigError as error:
        wrong.append(str(error))
    return settings, wrong


def _is_mesh(text: str) -> bool:
    sizes = [word.partition("=")[::2] for word in text.split(",")] if text else []
    return all(name.strip() and size.strip().isdigit() and int(size) > 0 for name, size in sizes)


def wants_color(*, is_terminal: bool) -> bool:
    """Whether output may be coloured: not if NO_COLOR is set to anything, nor on a dumb terminal."""
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") != "dumb"


def is_enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether HOLTER=1 is set, so that holter attaches to an unmodified command."""
    return environ.get("HOLTER", "").strip().lower() in {"1", "true", "yes", "on"}


def visible_devices(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the devices that this process was given, as the variable names them; None if no variable is set."""
    return next((environ[name] for name in VISIBLE if name in environ), None)


Source = dict[str, tuple[Any, str]]


def _from_environment(environ: Mapping[str, str]) -> Source:
    return {
        name: (environ[PREFIX + name.upper()], PREFIX + name.upper())
        for name in _FIELDS
        if environ.get(PREFIX + name.upper(), "") != ""
    }


def _from_options(options: Mapping[str, Any]) -> Source:
    return {name: (value, "--" + name.replace("_", "-")) for name, value in options.items() if value is not None}


def _from_file(environ: Mapping[str, str], directory: Path) -> Source:
    named = environ.get("HOLTER_CONFIG", "")
    path = Path(named) if named else directory / "holter.toml"
    if not named and not path.is_file():
        return {}
    try:
        content = tomllib.loads(read_plain(path).decode())
    except OSError as error:
        raise ConfigError(f"HOLTER_CONFIG: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        # Not only TOMLDecodeError: lists within lists, numbers of thousands of digits.
        raise ConfigError(f"{path} is not TOML: {error}") from None
    source: Source = {}
    for key, value in content.items():
        source[key.lower().removeprefix(PREFIX.lower())] = (value, f"{path}: {key}")
    return source


def _parse(name: str, value: Any, written: str) -> Any:
    if name not in _FIELDS:
        raise ConfigError(f"{written}: there is no such setting; there are {', '.join(sorted(_FIELDS))}")
    parse, kind = _FIELDS[name]
    kinds = (str, list, tuple) if parse is _globs else (str, int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ConfigError(f"{written} must be {kind}, got {_told(value)}")
    try:
        return parse(value)
    except (ValueError, OverflowError):
        raise ConfigError(f"{written} must be {kind}, got {_told(value)}") from None


def _told(value: object) -> str:
    """Quote a value for a complaint without its secrets: complaints go into the job's log, where nobody expects passwords."""
    return repr(cleaned(value) if isinstance(value, str) else value)


def _with_secret(settings: Settings, name: str, origin: Mapping[str, str]) -> Settings:
    """Return the settings with the content of this secret's file, unless the secret itself was given."""
    path = getattr(settings, f"{name}_file")
    if not path or getattr(settings, name):
        return settings
    found: dict[str, Any] = {name: secret_in(path, origin[f"{name}_file"])}
    return dataclasses.replace(settings, **found)


def secret_in(path: str, written: str) -> str:
    """Read a file that holds one secret. Raises ConfigError, which names the setting as the user wrote it."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{written}: cannot read {path}: {why}") from None
