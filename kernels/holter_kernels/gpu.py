"""The pass over GPU tensors: one launch a dtype, results copied to pinned memory on a side stream, polled, never waited for.

    training stream   … backward │ float_pass │ combine_rows │ optimizer …        reads are ordered with the training's own writes
    side stream                                 └▶ copy rows to pinned memory ─▶ event
    training thread   launch() returns at once …………………………………………… poll(): event.query()

The kernels run on the current stream, so that no tensor is changed while it is read; only the copy leaves it. While a CUDA graph is being
captured `launch` does nothing, since a capture must not leave work on another stream.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from holter_kernels import triton_kernels
from holter_kernels.keys import GROUP_SHIFT, NUM_ROW_KEYS, PLACES, ROWS, dtype_key, group_key
from holter_kernels.layout import BFLOAT16, BLOCK, FLOAT16, FLOAT32, FORMATS, NUM_BINS, ROW, Format
from holter_kernels.plan import Plan

JOB_WORDS = 16 * BLOCK
NUM_THREADS = 256
"""A tile of 1024 words is one 128-bit load a thread."""
MAX_REGISTERS = 80
"""NVIDIA: three programs fit on a multiprocessor; the gates in tests/kernels/test_triton_static.py hold at this bound."""
WAVES_PER_UNIT = 5
"""AMD: the same wish, as the number of waves to make room for; 512 registers for 5 waves leave 96 each."""
UNROLL = 4

_BY_CODE = sorted(FORMATS.values(), key=lambda fmt: fmt.code)
_IN_WORD = np.array([max(1, 32 // fmt.bits) for fmt in _BY_CODE], np.uint64)
_DTYPE_KEYS = np.array([dtype_key(fmt) for fmt in _BY_CODE], np.uint64)
_KINDS = {FLOAT32.code: 0, BFLOAT16.code: 1, FLOAT16.code: 2}
_HISTOGRAMS = {"off": 0, "sampled": 1, "exact": 2}
# element_pass counts elements, so its jobs are no longer in elements than float_pass's in words.
_GRAINS = np.array([JOB_WORDS * (32 // fmt.bits if fmt.code in _KINDS else 1) for fmt in _BY_CODE], np.uint64)


class Jobs:
    """The table of jobs of some tensors, and which rows of it each launch takes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.plan = Plan(tensors, _GRAINS)
        chunks = self.plan.chunks
        code, count, offset = chunks["code"], chunks["count"], chunks["offset"]
        table = np.empty((len(chunks), 7), np.uint64)
        table[:, 0] = chunks["address"]
        table[:, 1] = count
        table[:, 2] = offset
        table[:, 3] = chunks["row"]
        table[:, 4] = group_key((offset // _IN_WORD[code]) >> np.uint64(GROUP_SHIFT))
        table[:, 5] = count * _DTYPE_KEYS[code]
        table[:, 6] = np.arange(len(chunks))
        begins_a_block = offset % (np.uint64(BLOCK) * _IN_WORD[code]) == 0
        is_fast = np.isin(code, list(_KINDS)) & begins_a_block & (chunks["address"] % np.uint64(16) == 0)
        launch = code.astype(np.int64) * 2 + is_fast
        order = np.argsort(launch, kind="stable")
        self.table = table[order].view(np.int64)
        edges = [0, *(np.flatnonzero(np.diff(launch[order])) + 1).tolist(), len(chunks)]
        self.launches = [
            (_BY_CODE[launch[order[a]] // 2], bool(launch[order[a]] % 2), a, b) for a, b in pairwise(edges) if b > a
        ]
        self.first_chunk = self.plan.first_chunk.astype(np.int64)


@lru_cache(maxsize=16)
def _key_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    longest = np.arange(NUM_ROW_KEYS + JOB_WORDS // BLOCK) % NUM_ROW_KEYS
    return torch.from_numpy(PLACES.view(np.int32)).to(device), torch.from_numpy(ROWS[longest].view(np.int32)).to(device)


def run_kernels(  # noqa: PLR0913 - the memory is the caller's
    jobs: Jobs,
    table: torch.Tensor,
    first_chunk: torch.Tensor,
    *,
    partials: torch.Tensor,
    rows: torch.Tensor,
    bins: torch.Tensor | None,
    statistics: bool,
    histogram: str,
) -> None:
    """Fill rows and bins on the device of the tables; nothing here waits."""
    places, row_keys = _key_tables(table.device)
    options = launch_options(is_amd=torch.version.hip is not None)
    which = _HISTOGRAMS[histogram] if bins is not None else 0
    if bins is not None:
        bins.zero_()
    for fmt, is_fast, start, end in jobs.launches:
        arguments = (table[start:end], partials, partials if bins is None else bins, places, row_keys)
        if is_fast:
            triton_kernels.float_pass[(end - start,)](
                *arguments, _KINDS[fmt.code], statistics, which, UNROLL, **options
            )
        else:
            triton_kernels.element_pass[(end - start,)](
                *arguments,
                *element_constants(fmt),
                statistics,
                which if fmt.is_float else 0,
                num_warps=options["num_warps"],
            )
    if len(rows):
        triton_kernels.combine_rows[(len(rows),)](partials, first_chunk, rows, 32, num_warps=1)


def launch_options(*, is_amd: bool) -> dict[str, int]:
    """How `float_pass` is compiled."""
    if is_amd:
        return {"num_warps": NUM_THREADS // 64, "waves_per_eu": WAVES_PER_UNIT}
    return {"num_warps": NUM_THREADS // 32, "maxnreg": MAX_REGISTERS}


def element_constants(fmt: Format) -> tuple[int | bool, ...]:
    """The compile-time arguments of `element_pass` that describe a dtype."""
    largest = fmt.largest_finite if fmt.is_float else 0
    is_signed = fmt.name.startswith("int")
    return (
        fmt.bits,
        fmt.is_float,
        is_signed,
        fmt.exponent_bits,
        fmt.mantissa_bits,
        fmt.low_bits,
        largest,
        fmt.has_infinity,
    )


def finish(raw: np.ndarray, *, statistics: bool) -> np.ndarray:
    """Rows as the kernels leave them, with what was not seen made NaN."""
    rows = raw.view(ROW).reshape(-1).copy()
    if not statistics:
        for name in ("min", "max", "absmax", "absmin_nonzero"):
            rows[name] = 0
        return rows
    nothing = rows["min"] > rows["max"]
    for name in ("min", "max", "absmax"):
        rows[name] = np.where(nothing, np.nan, rows[name] + 0.0)
    rows["absmin_nonzero"][np.isinf(rows["absmin_nonzero"])] = np.nan
    return rows


class GpuPass:
    """The rows of some tensors of one device."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], device: torch.device, *, histogram: str, statistics: bool
    ) -> None:
        self._device = device
        self._mode = {"histogram": histogram, "statistics": statistics}
        self._places: list[int] | None = None
        self._side = torch.cuda.Stream(device)
        self._copied: torch.cuda.Event | None = None
        shape = (len(tensors), ROW.itemsize // 8)
        self._rows = torch.zeros(shape, dtype=torch.int64, device=device)
        self._host_rows = torch.zeros(shape, dtype=torch.int64, pin_memory=True)
        self._bins = self._host_bins = None
        if statistics and histogram != "off":
            self._bins = torch.zeros((len(tensors), NUM_BINS), dtype=torch.int64, device=device)
            self._host_bins = torch.zeros((len(tensors), NUM_BINS), dtype=torch.int64, pin_memory=True)

    def launch(self, tensors: list[torch.Tensor], where: list[int]) -> None:
        """Start on the current stream; `where` is `places(tensors)`."""
        if torch.cuda.is_current_stream_capturing():
            return
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            if where != self._places or self._jobs.plan.kept:
                self._prepare(tensors)
                self._places = where
            if self._copied is not None:
                stream.wait_event(self._copied)  # the device waits, not this thread: the last rows may still be leaving
            run_kernels(
                self._jobs,
                self._table,
                self._first_chunk,
                partials=self._partials,
                rows=self._rows,
                bins=self._bins,
                **self._mode,
            )
            self._side.wait_event(stream.record_event())
            with torch.cuda.stream(self._side):
                self._host_rows.copy_(self._rows, non_blocking=True)
                self._rows.record_stream(self._side)
                if self._bins is not None and self._host_bins is not None:
                    self._host_bins.copy_(self._bins, non_blocking=True)
                    self._bins.record_stream(self._side)
                self._copied = self._side.record_event()

    def result(self) -> tuple[np.ndarray, np.ndarray | None] | None:
        """Rows and histograms, the caller's to keep; None while they are under way."""
        if self._copied is None or not self._copied.query():
            return None
        bins = None if self._host_bins is None else self._host_bins.numpy().view(np.uint64).copy()
        return finish(self._host_rows.numpy(), statistics=bool(self._mode["statistics"])), bins

    def _prepare(self, tensors: list[torch.Tensor]) -> None:
        self._jobs = Jobs(tensors)
        pinned = [torch.from_numpy(array).pin_memory() for array in (self._jobs.table, self._jobs.first_chunk)]
        self._table, self._first_chunk = (array.to(self._device, non_blocking=True) for array in pinned)
        self._partials = torch.empty((len(self._jobs.table), ROW.itemsize // 8), dtype=torch.int64, device=self._device)
