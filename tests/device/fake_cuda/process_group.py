"""`init_process_group("nccl")` on the device: gloo underneath, in stream order (csrc/process_group.h)."""

from datetime import timedelta
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def install(device: ModuleType) -> None:
    """NCCL is there, for all that `torch.distributed` asks."""

    class Options(dist.Backend.Options if hasattr(dist.Backend, "Options") else object):
        def __init__(self, *, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = timedelta(minutes=10)
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""

    class IsOurs(type):
        def __instancecheck__(cls, made: Any) -> bool:
            return isinstance(made, dist._Backend) and made.name() == "nccl"

    class ProcessGroupNCCL(metaclass=IsOurs):
        def __new__(cls, store: dist.Store, rank: int, size: int, options: Options) -> Any:
            gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
            return device.make_process_group(gloo)

    ProcessGroupNCCL.Options = Options
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL
    dist.ProcessGroupNCCL = ProcessGroupNCCL
