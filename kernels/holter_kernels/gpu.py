"""The pass over device tensors: one launch a dtype, results copied to pinned memory on a side stream, polled, never waited for.

    training stream   … backward │ bases │ read_pass │ combine_rows  │ optimizer …        reads are ordered with the training's own writes
    side stream                                         └▶ copy rows to the slot's pinned memory ─▶ event
    training thread   start() returns at once …………………………………………… poll(): event.query()

The kernels run on the current stream, so that no tensor is changed while it is read; only the copy leaves it. The tables stay on the device as long as the tensors
have the same sizes, and serve every pass over tensors of those sizes; what travels at a start is the address of each tensor's first element, and not even that if the
device has these addresses already: of gradients that are read as they are made, reduced and applied they are sent once. While a graph is being captured nothing is started.
"""

import hashlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from holter_kernels import devices
from holter_kernels.keys import NUM_ROW_KEYS, PLACES, ROWS, dtype_key
from holter_kernels.layout import BFLOAT16, BLOCK, FLOAT16, FLOAT32, FORMATS, ROW, Format
from holter_kernels.pinned import PINNED, PinnedPiece
from holter_kernels.placement import Placement
from holter_kernels.slots import Ring, Slot, Ticket

JOB_WORDS = 16 * BLOCK
NUM_THREADS = 256
"""Threads of a program of `read_pass`: a tile of 1024 words is then one 128-bit load for each thread."""
MAX_REGISTERS = 80
"""On NVIDIA: with this limit three programs fit on a multiprocessor; the gates in tests/kernels/test_triton_static.py
hold at it."""
WAVES_PER_UNIT = 5
"""The same on AMD, as the number of waves to make room for: 512 registers for 5 waves leave 96 for each."""
UNROLL = 4
SEGMENT = 1024
"""Number of partial rows that one program of `combine_rows` adds up. A tensor with more has several segments, and the
last program adds those up."""
COMBINE_TILE = 64
COMBINE_THREADS = 128
_ALIGNMENT = np.uint64(16)
"""Alignment in bytes that the fast loads need."""

_BY_CODE = sorted(FORMATS.values(), key=lambda fmt: fmt.code)
_IN_WORD = np.array([max(1, 32 // fmt.bits) for fmt in _BY_CODE], np.int64)
_DTYPE_KEYS = np.array([dtype_key(fmt) for fmt in _BY_CODE], np.uint64).view(np.int64)
KINDS = {FLOAT32.code: 0, BFLOAT16.code: 1, FLOAT16.code: 2}
HISTOGRAMS = {"off": 0, "sampled": 1, "exact": 2}
# What is read slowly is counted in elements: a job has as many elements as the others have words.
GRAINS = np.array([JOB_WORDS * (32 // fmt.bits if fmt.code in KINDS else 1) for fmt in _BY_CODE], np.int64)


class Tables:
    """Tables that tell each program what to read; they contain no addresses.

    jobs       for each program of a launch, its run
    runs       start in bytes from the base of its row, offset, elements, row, its first program, its first partial row less that,
               D of its dtype, whether it is read fast
    segments   for each program of combine_rows: row, first and last partial row, the row's first segment and their number
    """

    def __init__(self, runs: np.ndarray, bases: np.ndarray, num_rows: int) -> None:
        runs = _split_heads(runs)
        code, grain = runs["code"], GRAINS[runs["code"]]
        pieces = (runs["offset"] + runs["count"] - 1) // grain - runs["offset"] // grain + 1
        is_fast = np.isin(code, list(KINDS)) & (runs["offset"] % (BLOCK * _IN_WORD[code]) == 0)
        is_fast &= (bases[runs["row"]] + runs["start"]) % int(_ALIGNMENT) == 0
        self.must_align = np.zeros(num_rows, bool)
        self.must_align[runs["row"][is_fast]] = True
        order = np.argsort(code, kind="stable")
        first_partial = np.cumsum(pieces) - pieces
        first_job = np.empty_like(pieces)
        codes, first_run = np.unique(code[order], return_index=True)
        ends = [*first_run.tolist(), len(runs)][1:]
        jobs: list[np.ndarray] = []
        self.launches: list[tuple[Format, str, int, int]] = []
        """One launch for each dtype: dtype, kernel, and the range of its jobs."""
        start = 0
        for kind, a, b in zip(codes.tolist(), first_run.tolist(), ends, strict=True):
            num_jobs = pieces[order[a:b]]
            first_job[order[a:b]] = np.cumsum(num_jobs) - num_jobs
            mine = np.repeat(np.arange(a, b, dtype=np.int32), num_jobs)
            # Triton compiles a kernel again for a pointer that is not a multiple of 16 bytes, so each launch's jobs
            # begin at one.
            jobs += [mine, np.zeros(-len(mine) % 4, np.int32)]
            fast = is_fast[order[a:b]]
            kernel = "element" if kind not in KINDS else "float" if fast.all() else "mixed"
            self.launches.append((_BY_CODE[kind], kernel, start, start + len(mine)))
            start += len(mine) + -len(mine) % 4
        self.jobs = np.concatenate([np.zeros(0, np.int32), *jobs])
        fields = (runs["start"], runs["offset"], runs["count"], runs["row"], first_job, first_partial - first_job)
        self.runs = np.stack([*fields, _DTYPE_KEYS[code], is_fast.astype(np.int64)], axis=1)[order]
        self.num_partials = int(pieces.sum())
        first = np.searchsorted(np.repeat(runs["row"], pieces), np.arange(num_rows + 1))
        self.segments = _segments(first.astype(np.int64))


def _split_heads(runs: np.ndarray) -> np.ndarray:
    """Split runs that begin in the middle of a block: they are read slowly up to the end of the first job, and fast from there."""
    code, end = runs["code"], runs["offset"] + runs["count"]
    grain = GRAINS[code]
    edge = (runs["offset"] // grain + 1) * grain
    splits = np.isin(code, list(KINDS)) & (runs["offset"] % (BLOCK * _IN_WORD[code]) != 0) & (edge < end)
    if not splits.any():
        return runs
    heads, tails = runs.copy(), runs[splits].copy()
    heads["count"][splits] = (edge - runs["offset"])[splits]
    width = np.array([fmt.bits // 8 for fmt in _BY_CODE])[tails["code"]]
    tails["start"] += heads["count"][splits] * width
    tails["offset"], tails["count"] = edge[splits], (end - edge)[splits]
    return np.insert(heads, np.flatnonzero(splits) + 1, tails)


def _segments(first: np.ndarray) -> np.ndarray:
    """Return rows of (row, first partial row, last, the row's first segment, its number of segments); an empty row has one."""
    length = np.diff(first)
    num = np.maximum(1, -(-length // SEGMENT))
    row = np.repeat(np.arange(len(num)), num)
    first_segment = np.cumsum(num) - num
    begin = first[row] + (np.arange(len(row)) - first_segment[row]) * SEGMENT
    end = np.minimum(begin + SEGMENT, first[row + 1])
    return np.stack([row, begin, end, first_segment[row], num[row]], axis=1).astype(np.int64)


class DeviceTables:
    """The tables on a device, with the memory that the kernels work in."""

    def __init__(self, tables: Tables, device: torch.device, num_rows: int) -> None:
        self.must_align, self.launches = tables.must_align, tables.launches
        self.jobs, self.runs, self.segments = upload(device, tables.jobs, tables.runs, tables.segments)
        self.slices = [self.jobs[start:end] for _, _, start, end in self.launches]
        row = ROW.itemsize // 8
        self.partials = torch.empty((max(1, tables.num_partials), row), dtype=torch.int64, device=device)
        self.seconds = torch.empty((len(tables.segments), row), dtype=torch.int64, device=device)
        self.tickets = torch.zeros(num_rows, dtype=torch.int32, device=device)


_uploading: list[tuple[Any, torch.device, PinnedPiece]] = []
_keys: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Copy arrays to a device on the current stream, from pinned memory that is given back once the copies are done."""
    _uploading[:] = [one for one in _uploading if not devices.is_past(one[0], one[1])]
    found = []
    for array in arrays:
        piece = PINNED.take(array.nbytes)
        if piece is None:
            raise MemoryError("holter's pinned memory is full")
        staged = piece.memory[: array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        staged.numpy()[:] = array
        found.append(torch.empty(array.shape, dtype=staged.dtype, device=device))
        found[-1].copy_(staged, non_blocking=True)
        event = devices.new_event(device)
        devices.record(event, devices.current_stream(device))
        _uploading.append((event, device, piece))
    return found


def key_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return T, and R repeated past its end, on a device; they are copied only once."""
    if device not in _keys:
        longest = np.arange(NUM_ROW_KEYS + JOB_WORDS // BLOCK) % NUM_ROW_KEYS
        arrays = PLACES.view(np.int32), ROWS[longest].view(np.int32)
        if device.type == "cpu":
            _keys[device] = torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])
        else:
            places, rows = upload(device, *arrays)
            _keys[device] = places, rows
    return _keys[device]


def run_kernels(  # noqa: PLR0913 - the memory is the caller's
    tables: DeviceTables,
    bases: torch.Tensor,
    *,
    rows: torch.Tensor,
    bins: torch.Tensor | None,
    flag: torch.Tensor,
    statistics: bool,
    histogram: str,
) -> None:
    """Fill rows, bins and flag on the device of the tables, without waiting."""
    from holter_kernels import triton_kernels  # noqa: PLC0415 - needs triton

    if bases.device.type != "cpu" and devices.reads_as_host(triton_kernels.read_pass):
        raise RuntimeError(
            "TRITON_INTERPRET=1 reads addresses of the device as the host's, which would end the process"
        )
    keys = key_tables(bases.device)
    options = launch_options(is_amd=torch.version.hip is not None)
    which = HISTOGRAMS[histogram] if bins is not None else 0
    if bins is not None:
        bins.zero_()
    if not tables.launches:
        flag.zero_()
    for (fmt, kernel, start, end), jobs in zip(tables.launches, tables.slices, strict=True):
        memory = (jobs, tables.runs, bases, tables.partials, tables.partials if bins is None else bins, flag, *keys)
        function, constants, how = kernel_of(fmt, kernel, statistics=statistics, histogram=which)
        getattr(triton_kernels, function)[(end - start,)](*memory, *constants, **how)
    if len(rows):
        triton_kernels.combine_rows[(len(tables.segments),)](
            tables.partials, tables.segments, tables.seconds, tables.tickets, rows, flag, COMBINE_TILE,
            num_warps=combine_warps(options["num_warps"]),
        )  # fmt: skip


def launch_options(*, is_amd: bool) -> dict[str, int]:
    """Return the options with which `read_pass` is compiled if some jobs are read fast."""
    if is_amd:
        return {"num_warps": NUM_THREADS // 64, "waves_per_eu": WAVES_PER_UNIT}
    return {"num_warps": NUM_THREADS // 32, "maxnreg": MAX_REGISTERS}


def kernel_of(
    fmt: Format, kernel: str, *, statistics: bool, histogram: int
) -> tuple[str, tuple[Any, ...], dict[str, int]]:
    """Return the function that reads a dtype in one way ("float", "element", "mixed"), its compile-time arguments and options."""
    options = launch_options(is_amd=torch.version.hip is not None)
    kinds = kernel != "element", kernel != "float", KINDS.get(fmt.code, 0)
    constants = (*kinds, UNROLL, *element_constants(fmt), statistics, histogram if fmt.is_float else 0)
    return "read_pass", constants, {"num_warps": options["num_warps"]} if kernel == "element" else options


def combine_warps(num_warps: int) -> int:
    """Return the number of warps for `combine_rows` if `read_pass` has `num_warps`."""
    return max(1, COMBINE_THREADS * num_warps // NUM_THREADS)


def element_constants(fmt: Format) -> tuple[int | bool, ...]:
    """Return the compile-time arguments of `read_pass` that describe a dtype."""
    largest = fmt.largest_finite if fmt.is_float else 0
    is_signed = fmt.name.startswith("int")
    return (
        int(GRAINS[fmt.code]),
        fmt.bits,
        fmt.is_float,
        is_signed,
        fmt.exponent_bits,
        fmt.mantissa_bits,
        fmt.low_bits,
        largest,
        fmt.has_infinity,
    )


MOST_SENT = 8
"""Lists of addresses that are looked through for one that a device has already."""
MOST_LANES = 4
LOCK_S = 1.0


class StreamShare:
    """What the passes on one stream share: the device does all of their work in order, so the same memory serves them in turn."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Autograd's threads launch too: between the choice of memory and the launch that uses it nobody else may choose."""
        self.tables: weakref.WeakValueDictionary[bytes, DeviceTables] = weakref.WeakValueDictionary()
        """By the runs, and how they are aligned: one for gradients however often they are read, parameters and their like."""
        self.sent: list[tuple[np.ndarray, torch.Tensor]] = []
        """Addresses that were last used, the latest at the end, and where they lie on the device."""


_shares: weakref.WeakValueDictionary[tuple[torch.device, int | None], StreamShare] = weakref.WeakValueDictionary()


class Lane:
    """The memory of one pass on one stream: nothing in it waits for another stream."""

    def __init__(self, key: tuple[torch.device, int | None], num_rows: int, *, has_bins: bool) -> None:
        self._device, self._num_rows = key[0], num_rows
        self.share = _shares.get(key) or _shares.setdefault(key, StreamShare())
        self._ring = Ring(self._device, num_rows, has_bins=has_bins)
        self._generation = -1
        self._tables: DeviceTables | None = None
        self._sent: tuple[np.ndarray, torch.Tensor] | None = None
        self.next_slot = self._ring.next

    def prepare(self, placement: Placement) -> DeviceTables:
        """The tables, others if the tensors have other sizes, or one lies where it cannot be read 16 bytes at a time any more."""
        tables = self._tables
        if (
            tables is None
            or self._generation != placement.generation
            or (placement.bases[tables.must_align] % _ALIGNMENT).any()
        ):
            runs, bases = placement.sources.table(), placement.bases
            name = hashlib.blake2b((bases % _ALIGNMENT).tobytes() + runs.tobytes()).digest()
            tables = self.share.tables.get(name)
            if tables is None:
                made = Tables(runs, bases.view(np.int64), self._num_rows)
                tables = self.share.tables[name] = DeviceTables(made, self._device, self._num_rows)
            self._tables, self._generation = tables, placement.generation
        return tables

    def aim(self, placement: Placement, slot: Slot) -> torch.Tensor:
        """The addresses on the device; sent only if they are not there, from an earlier reading of this pass or another's."""
        bases, share = placement.bases.view(np.int64), self.share
        found = next((one for one in share.sent if np.array_equal(one[0], bases)), None)
        if found is None and self._sent is not None and np.array_equal(self._sent[0], bases):
            found = self._sent
        if found is None:
            slot.bases_array[:] = bases
            slot.bases.copy_(slot.host_bases, non_blocking=True)
            found = self._sent = bases.copy(), slot.bases
        # Whatever else this memory held is gone.
        share.sent = [*[one for one in share.sent if one[1] is not found[1]][1 - MOST_SENT :], found]
        return found[1]


class DevicePass:
    """The rows of some tensors of one device."""

    def __init__(self, device: torch.device, *, histogram: str, statistics: bool) -> None:
        self._device = device
        self._histogram, self._statistics = histogram, statistics
        self._has_bins = statistics and histogram != "off"
        self._lanes: dict[tuple[torch.device, int | None], Lane] = {}
        self._num_rows = -1
        self._is_narrow = False
        self.left_out = 0
        if devices.implementation(device) == "torch":
            devices.say_slow(device)
        else:
            devices.prepare_triton_cache()

    def start(self, tensors: Sequence[torch.Tensor], placement: Placement) -> Ticket | str:
        """Read these on the current stream; or why not."""
        if devices.is_capturing(self._device):
            return "capturing"
        if self._device in devices.warming:
            return "warming up"
        with devices.on(self._device):
            try:
                return self._start(tensors, placement)
            except (MemoryError, torch.OutOfMemoryError):
                return "out of memory"

    def _start(self, tensors: Sequence[torch.Tensor], placement: Placement) -> Ticket | str:
        stream = devices.current_stream(self._device)
        lane = self._lane(stream, len(tensors))
        if not lane.share.lock.acquire(timeout=LOCK_S):
            return "under way"
        try:
            return self._start_on(lane, stream, tensors, placement)
        finally:
            lane.share.lock.release()

    def _start_on(self, lane: Lane, stream: Any, tensors: Sequence[torch.Tensor], placement: Placement) -> Ticket | str:
        slot = lane.next_slot()
        if slot is None:
            return "under way"
        sources = placement.look(tensors)
        devices.record(slot.began, stream)
        left_out = set(sources.left_out) | set(self._read(tensors, placement, slot, lane))
        self.left_out = len(left_out)
        devices.record(slot.ended, stream)
        self._copy_out(slot)
        return slot.claim(statistics=self._statistics, bits_only=sources.bits_only, is_narrow=self._is_narrow)

    def _lane(self, stream: Any, num_rows: int) -> Lane:
        if num_rows != self._num_rows:
            self._num_rows = num_rows
            self._lanes.clear()
        key = self._device, getattr(stream, "stream_id", None)
        lane = self._lanes.get(key)
        if lane is None:
            if len(self._lanes) >= MOST_LANES:
                del self._lanes[next(iter(self._lanes))]
            lane = self._lanes[key] = Lane(key, num_rows, has_bins=self._has_bins)
        return lane

    def _read(self, tensors: Sequence[torch.Tensor], placement: Placement, slot: Slot, lane: Lane) -> list[int]:
        """By Triton's kernels, or by torch operations where those cannot be had; returns which tensors were left out."""
        memory = {"rows": slot.rows, "bins": slot.bins if self._has_bins else None, "flag": slot.flag}
        mode = {"statistics": self._statistics, "histogram": self._histogram}
        if devices.implementation(self._device) == "triton":
            try:
                run_kernels(lane.prepare(placement), lane.aim(placement, slot), **memory, **mode)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # noqa: BLE001 - no compiler, no driver, a version that refuses: whatever it is, it is said
                devices.give_up_triton(error)
            else:
                return []
        from holter_kernels.torch_pass import float_dtype, run_operations  # noqa: PLC0415 - it imports this file

        self._is_narrow = float_dtype(self._device) is torch.float32
        return run_operations(tensors, self._device, **memory, **mode)

    def _copy_out(self, slot: Slot) -> None:
        side = devices.side_stream(self._device)
        if side is None:
            self._copy(slot)
            devices.record(slot.copied, None)
            return
        side.wait_event(slot.ended)
        with devices.on_stream(side, self._device):
            self._copy(slot)
            slot.copied.record(side)

    def _copy(self, slot: Slot) -> None:
        slot.host_rows.copy_(slot.rows, non_blocking=True)
        if self._has_bins:
            slot.host_bins.copy_(slot.bins, non_blocking=True)
