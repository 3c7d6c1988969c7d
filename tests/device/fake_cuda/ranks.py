"""Ranks of a job inside one test: forked, with the environment that a launcher gives them."""

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from fake_cuda.control import count


def run_ranks(work: Callable[[int], Any], num_ranks: int = 2) -> list[Any]:
    """What `work(rank)` returns on each rank. Forks, so the device must not have been used before in this process."""
    assert count()["allocations"] == 0, "ranks are forked: use the device in them, not before"
    from free_port import free_port  # noqa: PLC0415 - beside the tests, where no job looks

    port = free_port()
    files = [tempfile.TemporaryFile() for _ in range(num_ranks)]  # noqa: SIM115 - closed below
    children = [_fork(work, rank, num_ranks, port, file) for rank, file in enumerate(files)]
    statuses = [os.waitpid(child, 0)[1] for child in children]
    results = []
    for rank, (file, status) in enumerate(zip(files, statuses, strict=True)):
        file.seek(0)
        written = file.read()
        file.close()
        assert written, f"rank {rank} died: {os.waitstatus_to_exitcode(status)}"
        result, failure = pickle.loads(written)  # noqa: S301
        assert not failure, f"rank {rank}:\n{failure}"
        results.append(result)
    return results


def _fork(work: Callable[[int], Any], rank: int, num_ranks: int, port: int, file: Any) -> int:
    child = os.fork()
    if child:
        return child
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        outcome = work(rank), ""
    except BaseException:  # noqa: BLE001 - told by the parent
        outcome = None, traceback.format_exc()
    file.write(pickle.dumps(outcome))
    file.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
