"""The pass over CPU tensors: native code if it was built, otherwise the reference.

`start` computes at once. The pointer table is kept between starts: tensors that only moved get new addresses in it,
other tensors get a new table.
"""

import ctypes
import warnings
from collections.abc import Sequence

import numpy as np
import torch

from holter_kernels import reference
from holter_kernels.keys import fingerprint_bits
from holter_kernels.layout import FORMATS, NUM_BINS, ROW, Format, blank
from holter_kernels.placement import Placement
from holter_kernels.plan import Plan

try:
    from holter_kernels import native
except ImportError:
    native = None  # type: ignore[assignment]

_BY_CODE = {fmt.code: fmt for fmt in FORMATS.values()}
_settings = {"num_threads": 1, "warned": False}


def set_num_threads(num_threads: int) -> None:
    """Set how many threads a native pass may use, including the calling one; the default is 1."""
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    _settings["num_threads"] = num_threads


def backend() -> str:
    """Return what reads CPU tensors: the instruction set of the native code, or "reference"."""
    return native.instruction_set() if native else "reference"


def warn_if_slow() -> None:
    """Warn once if there is no native code."""
    if native is None and not _settings["warned"]:
        _settings["warned"] = True
        warnings.warn(
            "holter_kernels was installed without its native code (no C compiler at build time?): "
            "statistics of CPU tensors take the reference path, about a hundred times slower",
            RuntimeWarning,
            stacklevel=4,
        )


class Done:
    """An answer that is available at once."""

    __slots__ = ("_answer", "flag")

    def __init__(self, rows: np.ndarray, bins: np.ndarray | None) -> None:
        self._answer = rows, bins
        self.flag: torch.Tensor | None = None

    def fetch(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return rows and histograms."""
        return self._answer

    def device_s(self) -> float | None:
        """Return None, because no device took part."""
        return None


class CpuPass:
    """Computes the rows of some CPU tensors, at once."""

    def __init__(self, *, histogram: str, statistics: bool) -> None:
        warn_if_slow()
        self._mode = histogram
        self._statistics = statistics
        self._wants_bins = statistics and histogram != "off"
        self._generation = -1
        self._plan = Plan()
        self._partials = np.empty(0, ROW)
        self.left_out = 0

    def start(self, tensors: Sequence[torch.Tensor], placement: Placement) -> "Done":
        """Compute the rows now."""
        return Done(*self.compute(tensors, placement))

    def compute(self, tensors: Sequence[torch.Tensor], placement: Placement) -> tuple[np.ndarray, np.ndarray | None]:
        """Rows and histograms."""
        sources = placement.sources if placement.is_known else placement.look(tensors)
        self.left_out = len(sources.left_out)
        if self._generation != placement.generation:
            self._plan = Plan(sources=sources)
            self._partials = np.empty(len(self._plan.chunks), ROW)
            self._generation = placement.generation
        plan = self._plan
        plan.bases = placement.bases
        rows = np.empty(len(plan.bases), ROW)
        bins = np.empty((len(rows), NUM_BINS), np.uint64) if self._wants_bins else None
        if native is None:
            self._run_reference(plan, rows, bins)
        else:
            native.run(
                plan,
                rows,
                bins,
                self._partials,
                statistics=self._statistics,
                sampled=self._mode == "sampled",
                num_threads=_settings["num_threads"],
            )
        return blank(rows, sources.bits_only) if sources.bits_only else rows, bins

    def _run_reference(self, plan: Plan, rows: np.ndarray, all_bins: np.ndarray | None) -> None:
        chunks, first = plan.chunks, plan.first_chunk
        for row in range(len(rows)):
            mine = chunks[int(first[row]) : int(first[row + 1])]
            parts = [(_BY_CODE[int(c["code"])], _memory(c, int(plan.bases[row])), int(c["offset"])) for c in mine]
            rows[row], bins = reference.combine(parts, self._mode)
            if all_bins is not None:
                all_bins[row] = bins
        if not self._statistics:
            for name in set(ROW.names or ()) - {"numel", "fingerprint"}:
                rows[name] = 0


def _memory(chunk: np.void, base: int) -> np.ndarray:
    fmt = _BY_CODE[int(chunk["code"])]
    size = int(chunk["count"]) * fmt.bits // 8
    raw = (ctypes.c_char * size).from_address(base + int(chunk["address"]))
    return np.frombuffer(raw, f"u{fmt.bits // 8}")


def fingerprint_memory(fmt: Format, address: int, count: int, offset: int) -> int:
    """Return the fingerprint of `count` elements at an address."""
    if native is not None:
        return native.fingerprint(address, count, offset, fmt.code, fmt.bits // 8)
    warn_if_slow()
    raw = (ctypes.c_char * (count * fmt.bits // 8)).from_address(address) if count else b""
    return fingerprint_bits(fmt, np.frombuffer(raw, f"u{fmt.bits // 8}"), offset)
