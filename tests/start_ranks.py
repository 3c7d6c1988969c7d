"""Starts ranks as a batch scheduler does: one process each, told its place by the environment, no agent, no torch to import.

    python tests/start_ranks.py 2 -m holter train.py …

Ends with the first code that is not 0, after the other ranks were stopped.
"""

import os
import subprocess
import sys
import time

from free_port import free_port


def main() -> int:
    """Start, wait, pass the code on."""
    world_size, command = int(sys.argv[1]), sys.argv[2:]
    port = free_port()
    place = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for rank in range(world_size):
        environ = {
            **os.environ,
            **{name: str(value) for name, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()},
        }
        ranks.append(subprocess.Popen([sys.executable, *command], env=environ))
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(0.02)
    failed = next((code for rank in ranks if (code := rank.poll())), 0)
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
        rank.wait()
    return failed if failed >= 0 else 128 - failed


if __name__ == "__main__":
    sys.exit(main())
