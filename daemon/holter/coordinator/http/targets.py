"""Whom Prometheus shall scrape: every sidecar at `/sd`, and where hosts share a disk one file a run, the coordinator in it too."""

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from holter.coordinator.disk import Disk
from holter.coordinator.roster import Member, Roster
from holter.files import write_whole

ANY = ("0.0.0.0", "::", "")  # noqa: S104 - what was bound, not a choice
"""A sidecar that listens everywhere is reached by the name of its host."""

LOOK_EVERY = 10
"""Calls of `write`, of which there is one a second, between two looks whether the file is still there."""

Targets = list[dict[str, Any]]


def sidecar_targets(roster: Roster, run_id: str) -> Targets:
    """The sidecars in the form of Prometheus' HTTP and file service discovery; ranks that ended are left out, lost ones are not."""
    return [
        _group(_address(member), run_id, role="sidecar", rank=str(rank), host=member.hello.host)
        for rank, member in sorted(roster.members.items())
        if member.state != "ended" and member.hello.metrics_address
    ]


def all_targets(roster: Roster, run_id: str, address: str) -> Targets:
    """The coordinator at this address, and every sidecar."""
    return [_group(urlsplit(address).netloc, run_id, role="coordinator"), *sidecar_targets(roster, run_id)]


class TargetsFile:
    """`<folder>/holter-<run id>.json`, written when ranks come and go, taken away at the end."""

    def __init__(self, folder: Path, run_id: str, address: str, disk: Disk) -> None:
        self._path = folder / ("holter-" + re.sub(r"[^\w.-]", "_", run_id) + ".json")
        self._run_id, self._address, self._disk = run_id, address, disk
        self._serial, self._content, self._num_unchanged = -1, b"", 0

    def write(self, roster: Roster) -> None:
        """Write the file if anything changed; now and then also if somebody removed it."""
        if roster.serial != self._serial:
            self._serial, self._num_unchanged = roster.serial, 0
            self._content = msgspec.json.encode(all_targets(roster, self._run_id, self._address))
            self._disk.submit(partial(_write, self._path, self._content))
            return
        self._num_unchanged += 1
        if self._num_unchanged % LOOK_EVERY == 0:
            self._disk.submit(partial(_write_if_gone, self._path, self._content))

    def remove(self) -> None:
        """The run has ended: its targets are no more. A new life of it may have written its own meanwhile."""
        self._disk.submit(partial(_remove, self._path, urlsplit(self._address).netloc))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)


def _write_if_gone(path: Path, content: bytes) -> None:
    if not path.exists():
        _write(path, content)


def _remove(path: Path, coordinator: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        groups = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
        if any(coordinator in group.get("targets", ()) for group in groups):
            path.unlink()


def _group(target: str, run_id: str, **about: str) -> dict[str, Any]:
    return {"targets": [target], "labels": dict(_meta({"run_id": run_id, **about}))}


def _meta(labels: dict[str, str]) -> Iterator[tuple[str, str]]:
    return ((f"__meta_holter_{name}", value) for name, value in labels.items())


def _address(member: Member) -> str:
    host, _, port = member.hello.metrics_address.rpartition(":")
    host = member.hello.host if host.strip("[]") in ANY else host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
