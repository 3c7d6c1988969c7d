"""The fused pass over a list of tensors: started now, answered when it is ready, at once on the CPU, some steps later on a device.

The training thread never waits: a device's answer is polled at the next hook, and answers are handed out in the order in which the readings were made. For checkpoints, one tensor at a time is read and waited for.
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
"""Readings that another may use."""
MOST_HELD_BACK = 64
"""Answers that wait for an older one; beyond that the older one is given up: a device that was lost must not silence the others."""


@dataclass(slots=True)
class _Owed:
    name: str
    reading: Reading
    then: Callable[[Table], None]


class Readings:
    """Passes that are kept between steps, and the readings of them that a device has not answered."""

    def __init__(self, make_pass: Callable[..., Pass] = Pass) -> None:
        self._make_pass = make_pass
        self.device_s = 0.0
        """Seconds of devices that went into readings that were answered since."""
        self.vitals_s = 0.0
        """Of these, into vitals, which have a schedule of their own."""
        self.declined: Counter[str] = Counter()
        """Readings that were not made, by why: a graph was being captured, a device that lags eight readings behind, one that raised."""
        self.left_out = 0
        """Tensors that could not be read, in all readings together."""
        self._passes: dict[str, Pass] = {}
        self._open: deque[_Owed] = deque()
        """Readings that a device has not answered, oldest first, and who gets their tables."""
        self.kept: dict[str, tuple[list[int], Table]] = {}
        """Last readings that were answered at once and may be of use to another, while the tensors are as they were: ids and table."""

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
        """Hand out what has become ready, oldest first: what is ready behind something that is not waits for it."""
        if not self._open:
            return
        num_answered = sum(owed.reading.poll() is not None for owed in self._open)
        if num_answered > MOST_HELD_BACK and self._open[0].reading.poll() is None:
            self._open.popleft()
            self.declined["unanswered"] += 1
        # Whoever gets a table may read again, and so come by here.
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
    """What every step asks of a table."""

    has_nonfinite: bool
    """One of its tensors is not finite."""
    has_zero: bool
    """One of its tensors is zero everywhere."""
    square_sum: float
    """Over what is finite in all of them."""


def outline(table: Any) -> TableOutline:
    """Of all tensors of a pass. By the native code, where it was built: one call instead of some ten of numpy's."""
    return outline_by_numpy(table) if _outline is None else TableOutline(*_outline(table.rows))


def outline_by_numpy(table: Any) -> TableOutline:
    """The definition."""
    is_zero = (table.zeros == table.numel) & (table.numel > 0)
    bad = table.nans + table.pos_infs + table.neg_infs
    return TableOutline(bool(bad.any()), bool(is_zero.any()), float(table.square_sum.sum()))


def has_nonfinite(table: Any) -> bool:
    """Whether one of the tensors of a pass is not finite."""
    return outline(table).has_nonfinite


def fingerprint_of(tensor: torch.Tensor) -> str:
    """64 bits in hexadecimal, of the elements that this rank holds, as if they were a tensor by themselves. Raises ValueError."""
    return f"{fingerprint(_plain(tensor)):016x}"


def count_nonfinite(tensor: torch.Tensor) -> int:
    """How many elements are NaN or infinite. Raises ValueError."""
    nans, infs = _counts(tensor)
    return nans + infs


def count_nan(tensor: torch.Tensor) -> int:
    """How many elements are NaN: a mask may well be infinite. Raises ValueError."""
    return _counts(tensor)[0]


def largest(tensor: torch.Tensor) -> float:
    """The largest magnitude among what is finite. Raises ValueError."""
    plain = _plain(tensor)
    return float(summarize([plain], histogram="off").absmax[0]) if plain.is_floating_point() and plain.numel() else 0.0


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    plain = _plain(tensor)
    if not (plain.is_floating_point() or plain.is_complex()):
        return 0, 0
    table = summarize([plain], histogram="off")
    return int(table.nans[0]), int(table.pos_infs[0]) + int(table.neg_infs[0])


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The local elements in a dtype that can be read; the bits of one that cannot."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local = local.detach()
    if local.dtype in FORMATS or local.is_complex():
        return local
    if local.layout is not torch.strided or local.is_quantized:
        raise ValueError(f"a tensor of {local.dtype}, {local.layout} has no elements to read one by one")
    return local.contiguous().reshape(-1).view(torch.uint8)
