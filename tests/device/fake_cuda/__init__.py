"""A CUDA device that is none: `install()` puts it under `torch.cuda` of a torch that was built for the CPU alone.

    import fake_cuda

    fake_cuda.install()                    # before triton is imported; or TESTS_DEVICE=1 and this folder's parent on PYTHONPATH
    x = torch.ones(3, device="cuda")
    with fake_cuda.closed():               # nothing runs on the device meanwhile
        y = x + 1
    fake_cuda.syncs()                      # what made the host wait, by name

See tests/device/README.md.
"""

from fake_cuda.build import Unavailable
from fake_cuda.control import (
    closed,
    count,
    delayed,
    drain,
    launches,
    make_external_stream,
    num_waiting,
    set_delay,
    set_gate,
    syncs,
)
from fake_cuda.environment import environment
from fake_cuda.ranks import run_ranks
from fake_cuda.setup import install, is_installed

__all__ = [
    "Unavailable",
    "closed",
    "count",
    "delayed",
    "drain",
    "environment",
    "install",
    "is_installed",
    "launches",
    "make_external_stream",
    "num_waiting",
    "run_ranks",
    "set_delay",
    "set_gate",
    "syncs",
]
