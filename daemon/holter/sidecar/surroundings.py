"""What the kernel says of the things around a process: its control group, and the pressure on its host."""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
_BYTES = 4096


class CachedFile:
    """A small file of the kernel's that is held open and read from its beginning every time."""

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def read(self) -> str:
        """What it says now; empty where it cannot be read, or what it told of is gone."""
        if self._fd < 0:
            return ""
        try:
            return os.pread(self._fd, _BYTES, 0).decode("utf-8", "replace")
        except OSError:
            return ""

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class Pressure:
    """Of the host, as the kernel measures it; a kernel that does not measures nothing."""

    def __init__(self) -> None:
        self._files = {name: CachedFile(f"/proc/pressure/{name}") for name in ("cpu", "memory", "io")}

    def read(self) -> dict[str, float]:
        """Share of the last ten seconds in which some task waited, 0 to 1."""
        found = {name: _some_avg10(file.read()) for name, file in self._files.items()}
        return {name: share for name, share in found.items() if share is not None}


def cgroup_files(membership: str, name: str, controller: str = "") -> Iterator[Path]:
    """Where a file of a process's control group may lie, by its /proc/PID/cgroup: version 2, alone or beside version 1."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") > 1 else ("", "-", "")
        if controllers == controller == "":
            yield CGROUPS / path.lstrip("/") / name
            yield CGROUPS / "unified" / path.lstrip("/") / name
        elif controller and controller in controllers.split(","):
            yield CGROUPS / controller / path.lstrip("/") / name


def is_frozen(membership: str) -> bool:
    """Whether the process's control group is frozen, itself or by one above it."""
    events = _first(cgroup_files(membership, "cgroup.events"))
    if "frozen 1" in events.splitlines():
        return True
    return _first(cgroup_files(membership, "freezer.state", "freezer")).strip() == "FROZEN"


def _first(paths: Iterator[Path]) -> str:
    """The text of the first that there is."""
    for path in paths:
        try:
            return path.read_text(encoding="utf-8")
        except OSError:
            continue
    return ""


def _some_avg10(text: str) -> float | None:
    """From `some avg10=1.39 avg60=…`."""
    _, found, rest = text.partition("some avg10=")
    return float(rest.split(maxsplit=1)[0]) / 100 if found else None
