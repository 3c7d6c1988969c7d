"""Collectives that one rank leaves out."""

from typing import Any

from holter.testing.injection import Injection, replace


def skip_collective(operation: str = "all_reduce", after: int = 0, times: int = 1) -> Injection:
    """Leave out calls of `torch.distributed.<operation>` in this process: `times` of them, when `after` more were made.

    The caller gets None, as a call that is done gives. Collectives that DistributedDataParallel calls by itself come from native code
    and are not reached: skip one of the script's own.
    """
    import torch.distributed as dist  # noqa: PLC0415  whoever rehearses has it; importing us must not

    if not hasattr(dist, operation):
        raise ValueError(f"torch.distributed has no operation {operation!r}")
    if after < 0 or times < 1:
        raise ValueError(f"after must not be negative and times must be positive, got {after} and {times}")
    call = getattr(dist, operation)
    made = 0

    def skipping(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        if after < made <= after + times:
            return None
        return call(*args, **kwargs)

    return replace(dist, operation, skipping)
