"""How much memory the rank holds, at every step, and which names of the script hold more and more when it grows.

A step's reading is one small file of /proc, which is kept open; what is left on the host and in the container is read at every 16th step. Only when
memory has grown by much are the script's own names looked at, several times: lists, dictionaries and the like that are global in its modules or
local in running functions. Nothing is asked of them but their length.
"""

import inspect
import os
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from holter.rank import accelerator
from holter.rank.context import Context
from holter.rank.own_code import is_own
from holter.rank.search import variables
from holter.records import Hoard

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LEFT_EVERY = 16
DEVICE_EVERY = 4
"""Steps between two readings of the device's memory; each builds a large dictionary of the allocator's counters."""
WARM_UP = 16
"""Number of steps in which allocators and caches fill up; growth is counted from then on."""
GROWN_BYTES = 48 << 20
BETWEEN = 24
"""Number of steps from one look at names to the next."""
MAX_LOOKS = 4
MAX_NAMES = 2000
CONTAINERS = (list, dict, set, deque, bytearray)


class MemoryProbe:
    """Reads the rank's memory once a step, and looks for what grows."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._statm = _opened("/proc/self/statm")
        self._step = -1
        self._warm_bytes = 0
        self._lengths: dict[tuple[str, str], int] = {}
        self._looked_step = -1
        self._num_looks = 0

    def look(self) -> None:
        """Read the memory, at the first backward pass of a step."""
        log = self._context.log
        if log.step == self._step or self._statm < 0:
            return
        self._step = log.step
        held = int(os.pread(self._statm, 128, 0).split()[1]) * PAGE_BYTES
        numbers = log.now.numbers
        numbers["memory.host_bytes"] = float(held)
        if log.step % LEFT_EVERY == 0:
            numbers["memory.host_left_bytes"] = float(host_left_bytes())
        if log.step % DEVICE_EVERY == 0 and (found := accelerator.memory()) is not None:
            numbers |= _device_numbers(found)
        if log.step == WARM_UP:
            self._warm_bytes = held
        is_due = self._looked_step < 0 or log.step - self._looked_step >= BETWEEN
        if self._warm_bytes and held - self._warm_bytes > GROWN_BYTES and is_due and self._num_looks < MAX_LOOKS:
            self._look_at_names(log.step)

    def _look_at_names(self, step: int) -> None:
        """Report the name that grew most since the last look, if it grew by at least one element every two steps."""
        now = {(name, where): len(thing) for name, where, thing in _containers()}
        before, since = self._lengths, self._looked_step
        self._lengths, self._looked_step, self._num_looks = now, step, self._num_looks + 1
        grown = {key: length - before[key] for key, length in now.items() if key in before}
        if since < 0 or not grown:
            return
        key = max(grown, key=lambda name: grown[name])
        if grown[key] >= (step - since) // 2:
            hoard = Hoard(name=key[0], where=key[1], length=now[key], grown=grown[key], num_steps=step - since)
            self._context.writer.say(step, hoard)


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _device_numbers(found: accelerator.Memory) -> dict[str, float]:
    """Return the device memory that tensors hold, that the allocator has reserved, and that is left if nobody else uses the device."""
    return {
        "memory.device_bytes": float(found.held),
        "memory.device_cached_bytes": float(found.reserved),
        "memory.device_left_bytes": float(found.total - found.held),
    }


def host_left_bytes() -> int:
    """Return the memory left on the host or under the container's limit, whichever is less; 0 if neither is known."""
    found = [_available(), _cgroup_left()]
    return min((left for left in found if left is not None), default=0)


def _available() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith("MemAvailable:")), "")
    return int(line.split()[1]) * 1024 if line else None


def _cgroup_left() -> int | None:
    """Return the bytes left in the process's control group; None if it has no limit."""
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8").rpartition("::")[2].strip().lstrip("/")
        folder = Path("/sys/fs/cgroup") / own
        limit, held = ((folder / name).read_text(encoding="utf-8").strip() for name in ("memory.max", "memory.current"))
        return int(limit) - int(held) if limit.isdigit() else None
    except (OSError, ValueError):
        return None


def _containers() -> Iterator[tuple[str, str, Any]]:
    """Yield (name, where, container) for locals of the script's running functions, then globals of its modules, and one level of their attributes."""
    num = 0
    for owner, names in _namespaces():
        for name, thing in list(names.items()):
            num += 1
            if num > MAX_NAMES:
                return
            if name.startswith("__"):
                continue
            if isinstance(thing, CONTAINERS):
                yield name, owner, thing
            elif type(thing).__module__ not in ("builtins", "torch") and not isinstance(thing, torch.nn.Module | type):
                for part, held in list(getattr(thing, "__dict__", {}).items())[:50]:
                    if isinstance(held, CONTAINERS):
                        yield f"{name}.{part}", owner, held


def _namespaces() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield namespaces, those of running functions first: a large project has more globals than are looked at."""
    yield from _running_functions()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and is_own(file):
            yield file, vars(module)


def _running_functions() -> Iterator[tuple[str, dict[str, Any]]]:
    frame = inspect.currentframe()
    for _ in range(100):
        if frame is None:
            return
        if is_own(frame.f_code.co_filename) and frame.f_code.co_name != "<module>":
            yield f"{frame.f_code.co_filename} in {frame.f_code.co_name}", variables(frame)
        frame = frame.f_back
