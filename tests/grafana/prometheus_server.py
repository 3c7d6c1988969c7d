"""A real Prometheus with a directory and a port of its own, and the questions that Grafana would ask it."""

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from free_port import free_port

RATE_INTERVAL = "5s"
"""What Grafana would put for $__rate_interval: four times the scrape interval, and a little."""
READY_S = 60.0


class RefusedError(Exception):
    """Prometheus does not take the question."""


class Prometheus:
    """Scrapes every second, from `with` to its end."""

    def __init__(
        self, directory: Path, targets: Mapping[str, Sequence[str]], relabelling: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._directory = directory
        self._targets = targets
        self._relabelling = list(relabelling)
        """Of everything that is scraped."""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        jobs = [
            {"job_name": name, "static_configs": [{"targets": list(them)}], "metric_relabel_configs": self._relabelling}
            for name, them in self._targets.items()
        ]
        config = self._directory / "prometheus.json"
        # JSON is YAML.
        config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
        log = (self._directory / "prometheus.log").open("wb")
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={self._directory / 'data'}"]
        command.append(f"--web.listen-address={self.url.removeprefix('http://')}")
        self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + READY_S
        while not self._is_ready():
            assert time.monotonic() < deadline, (self._directory / "prometheus.log").read_text()
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(timeout=30)

    def at(self, expr: str, at_s: float) -> list[dict[str, Any]]:
        """One moment: [{"metric": labels, "value": [time, text]}]."""
        return self._ask("query", query=expr, time=at_s)

    def between(self, expr: str, start_s: float, end_s: float, step_s: float = 1.0) -> list[dict[str, Any]]:
        """A span: [{"metric": labels, "values": [[time, text], …]}]."""
        return self._ask("query_range", query=expr, start=start_s, end=end_s, step=step_s)

    def _ask(self, path: str, **values: object) -> list[dict[str, Any]]:
        try:
            with urllib.request.urlopen(
                f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(values)}", timeout=30
            ) as got:
                answer = json.load(got)["data"]
        except urllib.error.HTTPError as error:
            raise RefusedError(json.load(error)["error"]) from None
        if answer["resultType"] == "scalar":
            return [{"metric": {}, "value": answer["result"]}]
        return answer["result"]

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1):
                return True
        except OSError:
            return False


def filled_in(expr: str, run_id: str) -> str:
    """The expression as Grafana sends it, with all ranks chosen."""
    for name, value in {"$__rate_interval": RATE_INTERVAL, "$run": run_id, "$rank": ".*"}.items():
        expr = expr.replace(name, value)
    return expr
