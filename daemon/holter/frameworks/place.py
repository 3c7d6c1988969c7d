"""Which rank this process is, of how many, and where: from the process group if it exists, else from the launcher's variables."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class RankPlace:
    """A rank's place among its peers."""

    rank: int
    world_size: int
    local_rank: int
    is_one_host: bool
    address: str
    """Address by which the other ranks reach rank 0's host."""
    neighbours: frozenset[int] = frozenset()
    """Ranks that the same launcher started, including this one."""
    restarts: int = 0
    """How often an elastic agent has restarted this rank."""
    is_restarted: bool = False
    """Whether an elastic agent would restart it again."""


def find(environ: Mapping[str, str] = os.environ) -> RankPlace:
    """Return this process's place."""
    rank, world_size = _group() or (_number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1))
    master = environ.get("MASTER_ADDR", "") or "127.0.0.1"
    restarts = _number(environ, "TORCHELASTIC_RESTART_COUNT", 0)
    is_one_host = world_size == 1 or master in LOOPBACK or _number(environ, "LOCAL_WORLD_SIZE", 0) == world_size
    return RankPlace(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", rank),
        is_one_host=is_one_host,
        address="127.0.0.1" if is_one_host else master,
        neighbours=_neighbours(environ, rank),
        restarts=restarts,
        is_restarted=restarts < _number(environ, "TORCHELASTIC_MAX_RESTARTS", 0),
    )


def listen(host: str, port: int) -> tuple[socket.socket, str | None]:
    """Return a listening socket for the coordinator.

    A port in use is replaced by a free one; then the second value is a sentence that says so.
    """
    try:
        return _bind(host, port), None
    except OSError as error:
        if not port:
            raise
        free = _bind(host, 0)
        where = f"the coordinator is on {free.getsockname()[1]}"
        return free, f"port {port} on {host} cannot be used ({error.strerror}); {where}"


def _bind(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(1024)
    except OSError:
        bound.close()
        raise
    return bound


def _group() -> tuple[int, int] | None:
    import torch.distributed as dist  # noqa: PLC0415  torch is there when a rank asks for its place

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None


def _neighbours(environ: Mapping[str, str], rank: int) -> frozenset[int]:
    """Return the ranks of this launcher: launchers number the ranks of a host consecutively."""
    first = rank - _number(environ, "LOCAL_RANK", 0)
    return frozenset(range(first, first + _number(environ, "LOCAL_WORLD_SIZE", 1)))


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        return default
