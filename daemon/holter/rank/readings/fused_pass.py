"""The fused pass over a list of tensors: it is started now and answered when it is ready, on the CPU at once, on a device some steps later.

The training thread never waits: a device's answer is polled at the next hook, and answers are handed out in the order in which the readings were
made. Only for checkpoints, tensors are read one at a time and waited for.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from holter_kernels import Pass, Reading, Table, fingerprint, summarize
from holter_kernels.layout import FORMATS

_outline: Callable[[np.ndarray], tuple[bool, bool, float]] | None
try:
    from holter.rank._rows import outline as _outline
except ImportError:
    # There was no compiler.
    _outline = None

logger = logging.getLogger("holter")
KEPT = frozenset({"parameters_before", "parameters_after"})
"""Names of readings whose tables are kept for other readers."""
MOST_HELD_BACK = 64
"""Number of answers that may wait for an older one. Beyond it the older one is given up: a lost device must not silence the others."""


@dataclass(slots=True)
class _Owed:
    name: str
    reading: Reading
    then: Callable[[Table], None]


class Readings:
    """Keeps the passes between steps, and their readings that a device has not answered yet."""

    def __init__(self, make_pass: Callable[..., Pass] = Pass) -> None:
        self._make_pass = make_pass
        self.device_s = 0.0
        """Seconds of device time that the answered readings have cost."""
        self.vitals_s = 0.0
        """The part of `device_s` that vitals cost, which have a schedule of their own."""
        self.declined: Counter[str] = Counter()
        """Number of readings that were not made, by reason: a graph was being captured, the device lags eight readings behind, the pass raised."""
        self.left_out = 0
        """Number of tensors that could not be read, in all readings together."""
        self._passes: dict[str, Pass] = {}
        self._open: deque[_Owed] = deque()
        """Readings that a device has not answered, oldest first, with the functions that get their tables."""
        self.kept: dict[str, tuple[list[int], Table]] = {}
        """Last table of each reading in `KEPT` that was answered at once, with its tensors' ids; of use while the tensors are unchanged."""

    def read(
        self, name: str, tensors: Sequence[torch.Tensor], then: Callable[[Any], None], *, histogram: str = "off"
    ) -> Reading | Table | None:
        """Read these tensors, at least one; `then` gets the table, now or from a later `poll`, in the order of the readings.

        None, and `then` is never called, if nothing could be started: that is counted in `declined`.
        """
        if self._open:
            self.poll()
        kept = self._passes.get(name)
        if kept is None:
            kept = self._passes[name] = self._make_pass(tensors, histogram=histogram)
        started: Reading | Table | None = None
        try:
            if type(kept) is Pass and not self._open:
                started = kept.at_once(tensors)
            if started is None:
                started = kept.start(tensors)
        except Exception as error:  # noqa: BLE001 - no reading may stop the step from being told
            self._give_up(name, error)
            return None
        if started is None:
            self.declined.update(kept.declined)
            kept.declined.clear()
        elif isinstance(started, Table):
            self._keep(name, tensors, started)
            self.left_out += started.left_out
            then(started)
        elif not self._open and (table := started.poll()) is not None:
            self._keep(name, tensors, table)
            self._hand_out(_Owed(name, started, then), table)
        else:
            self._open.append(_Owed(name, started, then))
        return started

    def _keep(self, name: str, tensors: Sequence[torch.Tensor], table: Table) -> None:
        if name in KEPT:
            self.kept[name] = list(map(id, tensors)), table

    def poll(self) -> None:
        """Hand out the answers that have become ready, oldest first; a ready one waits for an older one that is not."""
        if not self._open:
            return
        num_answered = sum(owed.reading.poll() is not None for owed in self._open)
        if num_answered > MOST_HELD_BACK and self._open[0].reading.poll() is None:
            self._open.popleft()
            self.declined["unanswered"] += 1
        # Whoever gets a table may read again, and so call this function again.
        while self._open and (table := self._open[0].reading.poll()) is not None:
            self._hand_out(self._open.popleft(), table)

    def _give_up(self, name: str, error: Exception) -> None:
        if not self.declined["raised"]:
            logger.warning("holter cannot read %s: %s: %s", name, type(error).__name__, error)
        self.declined["raised"] += 1

    def _hand_out(self, owed: _Owed, table: Table) -> None:
        spent_s = owed.reading.device_s() or 0.0
        self.device_s += spent_s
        self.vitals_s += spent_s * owed.name.startswith("vitals.")
        self.left_out += table.left_out
        owed.then(table)


class TableOutline(NamedTuple):
    """What every step needs to know of a table."""

    has_nonfinite: bool
    """Whether one of the tensors is not finite."""
    has_zero: bool
    """Whether one of the tensors is zero everywhere."""
    square_sum: float
    """Sum of squares over all finite elements."""


def outline(table: Any) -> TableOutline:
    """Return the outline of a pass's table. The native code, where it was built, does it in one call instead of some ten of numpy's."""
    return outline_by_numpy(table) if _outline is None else TableOutline(*_outline(table.rows))


def outline_by_numpy(table: Any) -> TableOutline:
    """Do the same with numpy: the definition of what the native code computes."""
    is_zero = (table.zeros == table.numel) & (table.numel > 0)
    bad = table.nans + table.pos_infs + table.neg_infs
    return TableOutline(bool(bad.any()), bool(is_zero.any()), float(table.square_sum.sum()))


def has_nonfinite(table: Any) -> bool:
    """Whether one of the tensors of a pass is not finite."""
    return outline(table).has_nonfinite


def fingerprint_of(tensor: torch.Tensor) -> str:
    """Return the fingerprint of the elements that this rank holds: 64 bits in hexadecimal. Raises ValueError if they cannot be read."""
    return f"{fingerprint(_plain(tensor)):016x}"


def count_nonfinite(tensor: torch.Tensor) -> int:
    """Return how many elements are NaN or infinite. Raises ValueError if they cannot be read."""
    nans, infs = _counts(tensor)
    return nans + infs


def count_nan(tensor: torch.Tensor) -> int:
    """Return how many elements are NaN; a mask may well be infinite. Raises ValueError if they cannot be read."""
    return _counts(tensor)[0]


def largest(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude; 0 if the tensor is empty or not floating-point. Raises ValueError if its elements cannot be read."""
    plain = _plain(tensor)
    return float(summarize([plain], histogram="off").absmax[0]) if plain.is_floating_point() and plain.numel() else 0.0


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    plain = _plain(tensor)
    if not (plain.is_floating_point() or plain.is_complex()):
        return 0, 0
    table = summarize([plain], histogram="off")
    return int(table.nans[0]), int(table.pos_infs[0]) + int(table.neg_infs[0])


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local elements in a dtype that can be read; those of another dtype as bytes."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local = local.detach()
    if local.dtype in FORMATS or local.is_complex():
        return local
    if local.layout is not torch.strided or local.is_quantized:
        raise ValueError(f"a tensor of {local.dtype}, {local.layout} has no elements to read one by one")
    return local.contiguous().reshape(-1).view(torch.uint8)
