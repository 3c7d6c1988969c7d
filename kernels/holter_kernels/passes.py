"""One pass over a list of tensors, kept between steps.

p = Pass(tensors)                    # tables are made once
…each step:
reading = p.start(tensors)           # CPU: computes now. A device: starts on the current stream, waits for nothing
table = reading.poll()               # a Table, or None while the device still works; an older reading can be asked as well
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from holter_kernels.cpu import CpuPass
from holter_kernels.layout import NUM_BINS, ROW
from holter_kernels.placement import Placement
from holter_kernels.table import Table

_CPU = torch.device("cpu")
_POLL_S = 0.0002
HISTOGRAMS = ("off", "sampled", "exact")
Answer = tuple[np.ndarray, np.ndarray | None]


class Claim(Protocol):
    """The answer of one device to one start, once it is available."""

    flag: torch.Tensor | None

    def fetch(self) -> Answer | None:
        """Return rows and histograms; None while the device still works."""

    def device_s(self) -> float | None:
        """Return the seconds that the device spent, once fetched; None if not known."""


class Part(Protocol):
    """The tensors of one device."""

    left_out: int

    def start(self, tensors: Sequence[torch.Tensor], placement: Placement) -> "Claim | str":
        """Read these tensors, or return the reason why not.

        `placement` is this part's own and knows how the tensors lie.
        """


class Reading:
    """The answer of one `Pass.start`; later starts do not change it."""

    __slots__ = ("__weakref__", "_claims", "_is_whole", "_left_out", "_num_rows", "_table", "flag")

    def __init__(self, claims: list[tuple[list[int] | None, Claim]], num_rows: int, left_out: int) -> None:
        self._claims, self._num_rows, self._left_out = claims, num_rows, left_out
        self._table: Table | None = None
        self._is_whole = len(claims) == 1 and claims[0][0] is None
        self.flag = claims[0][1].flag if len(claims) == 1 else None
        """On a device: a float32 of shape (), in the form in which fused optimizers want found_inf, written in stream
        order: 1.0 if anything read was not finite. It belongs to the slot, so the eighth start after this one
        overwrites it. None on the CPU."""

    def poll(self) -> Table | None:
        """Return the table, the same at every call; None while the device has not answered. Never waits."""
        if self._table is None and self._is_whole:
            if (answer := self._claims[0][1].fetch()) is not None:
                self._table = Table(*answer, left_out=self._left_out)
        elif self._table is None:
            answers = [(positions, claim.fetch()) for positions, claim in self._claims]
            if all(answer is not None for _, answer in answers):
                rows, bins = self._joined(answers)  # type: ignore[arg-type]
                self._table = Table(rows, bins, left_out=self._left_out)
        return self._table

    def wait(self, seconds: float) -> Table | None:
        """Return the table, waiting at most so many seconds by polling, without any call that synchronises the device."""
        deadline = time.monotonic() + seconds
        while (table := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return table

    def device_s(self) -> float | None:
        """Return the seconds that devices spent on it, once the table is there; None on the CPU."""
        if self._is_whole:
            return self._claims[0][1].device_s() if self._table is not None else None
        spent = [claim.device_s() for _, claim in self._claims]
        known = [seconds for seconds in spent if seconds is not None]
        return sum(known) if known and self._table is not None else None

    def _joined(self, answers: list[tuple[list[int] | None, Answer]]) -> Answer:
        rows = np.zeros(self._num_rows, ROW)
        has_bins = any(part_bins is not None for _, (_, part_bins) in answers)
        bins = np.zeros((self._num_rows, NUM_BINS), np.uint64) if has_bins else None
        for positions, (part_rows, part_bins) in answers:
            rows[positions] = part_rows
            if bins is not None and part_bins is not None:
                bins[positions] = part_bins
        return rows, bins


class Pass:
    """Reads the statistics of a list of tensors of any dtypes and devices, with tables cached between starts.

    It holds no tensor: a gradient that was dropped is not kept alive. Tensors that are not contiguous are copied at
    each start, and the copies dropped. A tensor that cannot be read (meta, sparse, a wrapper without memory) has the
    row of an empty one and is counted in `Table.left_out`.

    `statistics=False` computes fingerprints alone. The constructor raises ValueError for an unknown histogram; `start`
    never raises because of a tensor's kind.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], histogram: str = "sampled", *, statistics: bool = True) -> None:
        if histogram not in HISTOGRAMS:
            raise ValueError(f"histogram must be one of {', '.join(HISTOGRAMS)}, got {histogram!r}")
        self._mode = {"histogram": histogram, "statistics": statistics}
        self.declined: Counter[str] = Counter()
        """How many times `start` gave no reading, by reason: "capturing", "under way", "warming up", "out of
        memory"."""
        self._parts: list[tuple[list[int] | None, Part, Placement]] = []
        self._devices: list[torch.device] | torch.device | None = None
        self._divide(tensors)

    def start(self, tensors: Sequence[torch.Tensor]) -> Reading | None:
        """Read these tensors; on the CPU this computes everything, on a device it returns at once.

        None if it declined; `declined` counts the reasons.
        """
        if not (len(self._parts) == 1 and self._parts[0][2].is_as_before(tensors)):
            self._divide(tensors)
        claims: list[tuple[list[int] | None, Claim]] = []
        num_left_out = 0
        for positions, part, placement in self._parts:
            mine = tensors
            if positions is not None:
                mine = [tensors[k] for k in positions]
                placement.is_as_before(mine)
            claim = part.start(mine, placement)
            if isinstance(claim, str):
                self.declined[claim] += 1
                return None
            claims.append((positions, claim))
            num_left_out += part.left_out
        return Reading(claims, len(tensors), num_left_out)

    def at_once(self, tensors: Sequence[torch.Tensor]) -> Table | None:
        """The table, if all of these lie in host memory as those of the last start did, but for their addresses; None: `start` has to be asked."""
        if len(self._parts) == 1:
            positions, part, placement = self._parts[0]
            if type(part) is CpuPass and positions is None and placement.is_as_before(tensors):
                return Table(*part.compute(tensors, placement), left_out=part.left_out)
        return None

    def _divide(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make a part for each device of these tensors, unless the devices are the same as last time."""
        first = tensors[0].device if tensors else _CPU
        found: list[torch.device] | torch.device = first
        if not all(tensor.device == first for tensor in tensors):
            found = [tensor.device for tensor in tensors]
        if found == self._devices and self._parts:
            return
        self._devices = found
        if isinstance(found, torch.device):
            self._parts = [(None, _part(found, **self._mode), Placement())]
            return
        places: dict[torch.device, list[int]] = {}
        for position, device in enumerate(found):
            places.setdefault(device, []).append(position)
        self._parts = [(positions, _part(device, **self._mode), Placement()) for device, positions in places.items()]


def _part(device: torch.device, *, histogram: str, statistics: bool) -> Part:
    if device.type in {"cpu", "meta"}:
        return CpuPass(histogram=histogram, statistics=statistics)
    from holter_kernels.gpu import DevicePass  # noqa: PLC0415 - for devices only

    return DevicePass(device, histogram=histogram, statistics=statistics)
