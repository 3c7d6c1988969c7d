"""Check whether an order makes sense to this rank. A nonsensical order is refused, and training continues without it."""

import math
import re
from pathlib import PurePosixPath

from holter.records import Order

PARTIAL = re.compile(r"\.\d+(\.\d+)?\.partial")
"""Name of a checkpoint that is still being written, in a run's `checkpoints`."""
MAX_DEADLINE_S = 86400.0
MAX_NUMBER = 2**53


def refusal(order: Order, *, rank: int, world_size: int, run_dir: str = "") -> str | None:
    """Return why this order is not obeyed; None if it is.

    A rank that does not know its run directory accepts a checkpoint path that looks like a run's.
    """
    ranks = (*order.savers, *order.lost)
    first = 0 if order.kind == "abort" else 1
    if not first <= order.halt < MAX_NUMBER or not 0 <= order.step < MAX_NUMBER:
        return f"halt {order.halt} at step {order.step} cannot be"
    if any(not 0 <= named < world_size for named in ranks) or len(set(ranks)) < len(ranks):
        return f"savers {order.savers} and lost {order.lost} are not ranks of {world_size}"
    if not (math.isfinite(order.deadline_s) and 0 <= order.deadline_s <= MAX_DEADLINE_S):
        return f"nobody waits for {order.deadline_s} s"
    if not -1 <= order.snapshot <= order.step:
        return f"step {order.step} has no snapshot of {order.snapshot} completed steps"
    return _refuse_save(order, rank, run_dir) if order.kind in ("commit", "rescue") else None


def _refuse_save(order: Order, rank: int, run_dir: str) -> str | None:
    if order.kind == "commit" and rank not in order.savers:
        return "a commit is for every rank"
    return None if _is_of_run(order.directory, run_dir) else f"{order.directory!r} is no checkpoint of this run"


def _is_of_run(directory: str, run_dir: str) -> bool:
    path = PurePosixPath(directory)
    if "\0" in directory or ".." in path.parts or not path.is_absolute() or not PARTIAL.fullmatch(path.name):
        return False
    return path.parent == PurePosixPath(run_dir) / "checkpoints" if run_dir else path.parent.name == "checkpoints"
