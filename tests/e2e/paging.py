"""A real Prometheus and a real Alertmanager on free ports, with the configuration of deploy/, and somebody who is paged.

Only addresses, secrets' places and intervals are changed: scrape and evaluation every second, and Alertmanager tells changes of a group after
two seconds instead of five minutes, so that an alert whose labels are not steady would page again while we look.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.conftest import ROOT, wait_for
from tests.free_port import free_port

SECRETS = "/etc/alertmanager/secrets"
TARGETS = "/shared/holter/targets"
LATER = "trainer-0:9400"
"""Address in deploy/prometheus of a job that is reached by its port."""


@dataclass(frozen=True)
class Page:
    """One request to the receiver."""

    at_s: float
    path: str
    token: str
    body: dict[str, Any]

    @property
    def alert(self) -> str:
        """Of Alertmanager's own format, which ours is too."""
        return str(self.body["groupLabels"]["alertname"])

    @property
    def run_id(self) -> str:
        return str(self.body["groupLabels"]["run_id"])


@dataclass
class Stack:
    """What stands between a job and a person."""

    directory: Path
    job_port: int
    """Of the coordinator that Prometheus was told by its port."""
    prometheus: str = ""
    alertmanager: str = ""
    receiver: str = ""
    pages: list[Page] = field(default_factory=list)

    @property
    def targets(self) -> Path:
        """The shared disk."""
        return self.directory / "targets"

    @property
    def token_file(self) -> Path:
        return self.directory / "secrets" / "webhook-token"

    def pages_at(self, path: str, run_id: str = "") -> list[Page]:
        """In order of arrival; of one run, if it is named."""
        return [page for page in self.pages if page.path == path and (not run_id or page.run_id == run_id)]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series that Prometheus gives now."""
        asked = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.prometheus}/api/v1/query?{asked}", timeout=10) as answer:
            return json.load(answer)["data"]["result"]

    def alerts(self) -> list[dict[str, Any]]:
        """What Alertmanager holds."""
        with urllib.request.urlopen(f"{self.alertmanager}/api/v2/alerts", timeout=10) as answer:
            return json.load(answer)

    def raise_alerts(self, alerts: list[dict[str, Any]]) -> None:
        """As a Prometheus would."""
        request = urllib.request.Request(f"{self.alertmanager}/api/v2/alerts", json.dumps(alerts).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200


def programs() -> tuple[str, str]:
    """Prometheus and Alertmanager, or a skip that says which is missing."""
    prometheus = shutil.which("prometheus")
    alertmanager = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    if prometheus is None or alertmanager is None:
        pytest.skip(f"not on PATH: {'prometheus' if prometheus is None else 'prometheus-alertmanager'}")
    return prometheus, alertmanager


@contextlib.contextmanager
def running(directory: Path) -> Iterator[Stack]:
    """All of it, until the end of the block."""
    prometheus, alertmanager = programs()
    job_port, *ports = _ports(3)
    stack = Stack(directory, job_port)
    with _receiver(stack), contextlib.ExitStack() as started:
        started.enter_context(_alertmanager(stack, alertmanager, ports[0]))
        started.enter_context(_prometheus(stack, prometheus, ports[1]))
        yield stack


def _ports(number: int) -> list[int]:
    """Different ones: each is held until all are known."""
    with contextlib.ExitStack() as held:
        found = []
        for _ in range(number):
            found.append(free_port())
            held.enter_context(socket.create_server(("127.0.0.1", found[-1])))
        return found


@contextlib.contextmanager
def _receiver(stack: Stack) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            token = self.headers.get("Authorization", "")
            stack.pages.append(Page(time.time(), self.path, token, json.loads(body)))
            self.send_response(202 if self.path == "/pagerduty" else 200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stack.receiver = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def _alertmanager(stack: Stack, program: str, port: int) -> Iterator[None]:
    folder = ROOT / "deploy" / "alertmanager"
    secrets = stack.directory / "secrets"
    secrets.mkdir()
    (secrets / "slack-url").write_text(f"{stack.receiver}/slack")
    (secrets / "pagerduty-key").write_text("k" * 32)
    stack.token_file.write_text("a secret of ours\n")
    config = yaml.safe_load((folder / "alertmanager.yml").read_text().replace(SECRETS, str(secrets)))
    config["route"] |= {"group_wait": "1s", "group_interval": "2s"}
    for receiver in config["receivers"]:
        for one in receiver.get("pagerduty_configs", []):
            one["url"] = f"{stack.receiver}/pagerduty"
        for one in receiver.get("webhook_configs", []):
            one["url"] = f"{stack.receiver}/alertmanager"
    path = stack.directory / "alertmanager.yml"
    path.write_text(yaml.safe_dump(config))
    shutil.copy(folder / "holter.tmpl", stack.directory)
    stack.alertmanager = f"http://127.0.0.1:{port}"
    arguments = [f"--config.file={path}", f"--storage.path={stack.directory / 'alertmanager'}"]
    arguments += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="]
    with _process(stack, program, arguments, f"{stack.alertmanager}/-/ready"):
        yield


@contextlib.contextmanager
def _prometheus(stack: Stack, program: str, port: int) -> Iterator[None]:
    text = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    text = text.replace(TARGETS, str(stack.targets)).replace(LATER, f"127.0.0.1:{stack.job_port}")
    text = text.replace("../..", str(ROOT)).replace("15s", "1s")
    text = text.replace("alertmanager:9093", stack.alertmanager.removeprefix("http://"))
    stack.targets.mkdir()
    path = stack.directory / "prometheus.yml"
    path.write_text(text)
    stack.prometheus = f"http://127.0.0.1:{port}"
    arguments = [f"--config.file={path}", f"--storage.tsdb.path={stack.directory / 'tsdb'}"]
    arguments += [f"--web.listen-address=127.0.0.1:{port}"]
    with _process(stack, program, arguments, f"{stack.prometheus}/-/ready"):
        yield


@contextlib.contextmanager
def _process(stack: Stack, program: str, arguments: list[str], ready: str) -> Iterator[None]:
    log = stack.directory / f"{Path(program).name}.log"
    environ = {"PATH": os.environ["PATH"], "GOMAXPROCS": "1"}
    with log.open("w") as file:
        process = subprocess.Popen([program, *arguments], stdout=file, stderr=file, env=environ)
    try:
        wait_for(lambda: process.poll() is not None or _answers(ready), 30, f"{program}")
        assert process.poll() is None, log.read_text()[-3000:]
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
