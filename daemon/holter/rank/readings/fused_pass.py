"""The fused pass over a list of tensors: started now, answered when it is ready, at once on the CPU, some steps later on a device.

The training thread never waits: a device's answer is polled at the next hook. For checkpoints, one tensor at a time is read and waited for.
"""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, TypeVar

import torch

from holter import clock
from holter_kernels import Pass, Table, fingerprint, summarize
from holter_kernels.layout import FORMATS

KEPT = frozenset({"parameters_before", "parameters_after"})
"""Readings that another may use."""
Key = TypeVar("Key")


class Readings:
    """Passes under way, and their cached pointer tables."""

    def __init__(self, make_pass: Callable[..., Pass] = Pass) -> None:
        self._make_pass = make_pass
        self.spent_s = 0.0
        """Seconds of the training thread that went into reading."""
        self.device_s = 0.0
        """Seconds of devices that went into readings that were answered."""
        self._passes: dict[str, Pass] = {}
        self._open: list[tuple[Pass, Callable[[Table], None]]] = []
        """Passes that a device has not answered, and who gets their tables."""
        self.kept: dict[str, tuple[list[int], Table]] = {}
        """Last readings that were answered at once and may be of use to another, while the tensors are as they were: ids and table."""

    def read(
        self, name: str, tensors: Sequence[torch.Tensor], then: Callable[[Any], None], *, histogram: str = "off"
    ) -> Pass | None:
        """Read these tensors, at least one; `then` gets the table, now or from a later `poll`."""
        assert tensors, "a reading of nothing would be owed for ever"
        started = clock.monotonic_s()
        in_use = [reading for reading, _ in self._open]
        reading = launch(self._passes, name, tensors, in_use, make_pass=self._make_pass, histogram=histogram)
        self.poll()
        table = reading.poll()
        if table is None:
            self._open.append((reading, then))
        else:
            if name in KEPT:
                self.kept[name] = [id(tensor) for tensor in tensors], table
            then(table)
        self.spent_s += clock.monotonic_s() - started
        return reading

    def poll(self) -> None:
        """Hand out what has become ready."""
        if not self._open:
            return
        answers = [(reading, then, reading.poll()) for reading, then in self._open]
        self._open = [(reading, then) for reading, then, table in answers if table is None]
        for _, then, table in answers:
            if table is not None:
                then(table)


def launch(  # noqa: PLR0913 - a pass, and where it is kept
    passes: MutableMapping[Key, Pass],
    key: Key,
    tensors: Sequence[torch.Tensor],
    in_use: Iterable[Pass],
    *,
    make_pass: Callable[..., Pass] = Pass,
    histogram: str = "off",
) -> Pass:
    """Start the pass of this key over these tensors; a new one if it was made for others, or if a device has not answered it yet."""
    reading = passes.get(key)
    # While a device has not answered, it still writes to the buffers of the pass.
    is_free = reading is not None and not any(reading is other for other in in_use)
    if reading is None or not is_free or not reading.launch_on(tensors):
        reading = passes[key] = make_pass(tensors, histogram=histogram)
        reading.launch()
    return reading


def has_nonfinite(table: Any) -> bool:
    """Whether one of the tensors of a pass is not finite."""
    return bool((table.nans + table.pos_infs + table.neg_infs).any())


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
