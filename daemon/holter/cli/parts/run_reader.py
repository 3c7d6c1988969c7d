"""Find the run that RUN means and read it: a run directory, a coordinator's address, or the newest run in ./holter-runs.

If the run's coordinator answers, it is believed first; another run's coordinator that has taken over the port is not.
Otherwise the files are read.
"""

import http.client
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from holter import config
from holter.coordinator.identity import ACCESS, Access
from holter.errors import UsageError
from holter.files import read_json, read_plain
from holter.records import Diagnosis
from holter.transport.tls import SCHEME

RUNS = Path("holter-runs")
DEADLINE_S = 3.0
"""Seconds that a coordinator may take to answer."""
POST_DEADLINE_S = 10.0
"""Seconds that it may take to accept a request."""


@dataclass(frozen=True)
class RunReader:
    """A run, as far as it can be read."""

    directory: Path | None
    address: str
    """`host:port` of its coordinator, with `https://` in front if it uses TLS; empty if not known."""
    identity: dict[str, Any]
    """Content of run.json; empty if there is none."""

    @property
    def name(self) -> str:
        """Name of the run for people."""
        return str(self.identity.get("run_id") or self.directory or self.address)

    @property
    def url(self) -> str:
        """Address of the coordinator for a browser."""
        return self.address if self.address.startswith(SCHEME) else f"http://{self.address}"

    def ask(self, path: str) -> Any:
        """Return the coordinator's decoded answer to GET; None if none answers, or one of another run."""
        token = self._read_token()
        if not self.address or (
            self.directory and _get(self.address, "/api/v1/status", token, "run_id") != self.identity.get("run_id")
        ):
            return None
        return _get(self.address, path, token)

    def _read_token(self) -> str:
        """Return the token to read, but only for the address in coordinator.json or one that the user named."""
        given = config.load().read_token
        known = self.access()
        if self.directory is None or (known is not None and known.address.removeprefix("http://") == self.address):
            return given or (known.read_token if known else "")
        return ""

    def access(self) -> Access | None:
        """Return coordinator.json; None if it cannot be read."""
        return read_json(self.directory / ACCESS, Access) if self.directory else None

    def post(self, path: str, body: dict[str, str], token: str, address: str) -> tuple[int, dict[str, Any]]:
        """Send a POST request; return status and content of the answer. Raises UsageError."""
        try:
            status, content = _request(address, path, POST_DEADLINE_S, token, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UsageError(f"the coordinator at {address} did not answer: {error}") from None
        return status, content if isinstance(content, dict) else {}

    def diagnoses(self) -> list[Diagnosis]:
        """Return every incident, oldest first: from the coordinator if it answers, else from the files."""
        told = self.ask("/api/v1/incidents")
        if told is not None:
            return _understood(told, self.address)
        if self.directory is None:
            raise UsageError(f"no coordinator answers at {self.address}")
        paths = sorted(self.directory.glob("incidents/*/diagnosis.json"))
        found = [read_json(path, Diagnosis) for path in paths]
        for path in [path for path, one in zip(paths, found, strict=True) if one is None]:
            # Otherwise a run whose incidents cannot be read would look like one without any.
            sys.stderr.write(f"holter: {path} cannot be read: there was an incident, and it is not shown\n")
        return sorted((one for one in found if one is not None), key=lambda one: (one.opened_at, one.id))


def locate(run: str | None, runs: Path = RUNS) -> RunReader:
    """Return the run that the user means: the newest one if `run` is None."""
    if run is None:
        return _of_directory(_newest(runs))
    if Path(run).is_dir():
        return _of_directory(Path(run))
    address = run.removeprefix("http://").rstrip("/")
    host, colon, port = address.removeprefix(SCHEME).rpartition(":")
    if colon and host and port.isascii() and port.isdigit() and int(port[:6]) < 2**16 and "/" not in host:
        return RunReader(None, address, {})
    raise UsageError(f"{run} is neither a run directory nor an address such as host:port")


def has_open_critical(diagnoses: list[Diagnosis]) -> bool:
    """Whether a critical incident is open, which decides between exit codes 0 and 1."""
    return any(one.severity == "critical" and one.closed_at is None for one in diagnoses)


def _newest(runs: Path) -> Path:
    found = [(str(_identity(path.parent).get("started_at", "")), path.parent) for path in runs.glob("*/run.json")]
    if not found:
        raise UsageError(f"there is no run below ./{runs}; name a run directory or a coordinator's address")
    return max(found)[1]


def _of_directory(directory: Path) -> RunReader:
    identity = _identity(directory)
    if not identity and not (directory / "incidents").is_dir():
        raise UsageError(f"{directory} is not a run directory: it has no run.json")
    address = str(identity.get("coordinator", "")).removeprefix("http://")
    return RunReader(directory, "" if identity.get("ended_at") else address, identity)


def _identity(directory: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_plain(directory / "run.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _understood(told: Any, address: str) -> list[Diagnosis]:
    try:
        return msgspec.convert(told, list[Diagnosis])
    except msgspec.ValidationError as error:
        raise UsageError(f"what answers at {address} speaks another version: {error}") from None


def _get(address: str, path: str, token: str, field: str | None = None) -> Any:
    """Return decoded JSON or one field of it; None if there is no answer, it is no success, or no JSON."""
    try:
        status, content = _request(address, path, DEADLINE_S, token)
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return None
    content = content if status == http.client.OK else None
    if field is None:
        return content
    return content.get(field) if isinstance(content, dict) else None


def _request(
    address: str, path: str, deadline_s: float, token: str, body: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Return status and decoded JSON of a GET, or of a POST if there is a body.

    Raises OSError, HTTPException, ValueError.
    """
    host, _, port = address.removeprefix(SCHEME).rpartition(":")
    connection: http.client.HTTPConnection
    if address.startswith(SCHEME):
        trust = config.load().tls.client()
        connection = http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=deadline_s, context=trust)
    else:
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=deadline_s)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        if body is None:
            connection.request("GET", path, headers=headers)
        else:
            connection.request("POST", path, json.dumps(body), headers | {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()
