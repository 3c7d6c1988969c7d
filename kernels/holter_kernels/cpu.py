"""The pass over CPU tensors: the native code where it was built, the reference where it was not.

`launch` computes at once. The pointer table is kept between launches and made anew when a tensor has moved, so that a list whose
memory stays where it is costs three attribute reads a tensor.
"""

import ctypes
import warnings
from collections.abc import Sequence

import numpy as np
import torch

from holter_kernels import reference
from holter_kernels.keys import fingerprint_bits
from holter_kernels.layout import FORMATS, NUM_BINS, ROW, Format
from holter_kernels.plan import Plan

try:
    from holter_kernels import native
except ImportError:
    native = None  # type: ignore[assignment]

_BY_CODE = {fmt.code: fmt for fmt in FORMATS.values()}
_settings = {"num_threads": 1, "warned": False}


def set_num_threads(num_threads: int) -> None:
    """How many threads, the calling one among them, a native pass may use; 1 unless told."""
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    _settings["num_threads"] = num_threads


def backend() -> str:
    """Which implementation reads CPU tensors: the instruction set of the native code, or "reference"."""
    return native.instruction_set() if native else "reference"


def warn_if_slow() -> None:
    """Say once that there is no native code."""
    if native is None and not _settings["warned"]:
        _settings["warned"] = True
        warnings.warn(
            "holter_kernels was installed without its native code (no C compiler at build time?): "
            "statistics of CPU tensors take the reference path, about a hundred times slower",
            RuntimeWarning,
            stacklevel=4,
        )


class CpuPass:
    """The rows of some CPU tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, histogram: str, statistics: bool) -> None:
        warn_if_slow()
        self._mode = histogram
        self._statistics = statistics
        self._places: list[int] = []
        self._plan: Plan | None = None
        self._partials = np.empty(0, ROW)
        self._rows = np.zeros(len(tensors), ROW)
        wants_bins = statistics and histogram != "off"
        self._bins = np.zeros((len(tensors), NUM_BINS), np.uint64) if wants_bins else None

    def launch(self, tensors: Sequence[torch.Tensor], where: list[int]) -> None:
        """Compute now; `where` is `places(tensors)`."""
        if self._plan is None or where != self._places:
            if self._plan is None or not self._has_moved(tensors, where):
                self._plan = Plan(tensors)
                self._partials = np.empty(len(self._plan.chunks), ROW)
            self._places = where
        plan = self._plan
        if native is None:
            self._run_reference(plan)
        else:
            native.run(
                plan,
                self._rows,
                self._bins,
                self._partials,
                statistics=self._statistics,
                sampled=self._mode == "sampled",
                num_threads=_settings["num_threads"],
            )
        if plan.kept:  # copies: of no use for the next launch
            self._plan = None

    def _has_moved(self, tensors: Sequence[torch.Tensor], where: list[int]) -> bool:
        """Whether only the addresses are others, and the plan now has them."""
        count = len(tensors)
        return (
            where[count:] == self._places[count:] and self._plan is not None and self._plan.move(tensors, where[:count])
        )

    def result(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Rows and histograms, the caller's to keep."""
        return self._rows.copy(), None if self._bins is None else self._bins.copy()

    def _run_reference(self, plan: Plan) -> None:
        chunks, first = plan.chunks, plan.first_chunk
        for row in range(len(self._rows)):
            mine = chunks[int(first[row]) : int(first[row + 1])]
            parts = [(_BY_CODE[int(c["code"])], _memory(c), int(c["offset"])) for c in mine]
            self._rows[row], bins = reference.combine(parts, self._mode)
            if self._bins is not None:
                self._bins[row] = bins
        if not self._statistics:
            for name in set(ROW.names or ()) - {"numel", "fingerprint"}:
                self._rows[name] = 0


def _memory(chunk: np.void) -> np.ndarray:
    fmt = _BY_CODE[int(chunk["code"])]
    size = int(chunk["count"]) * fmt.bits // 8
    raw = (ctypes.c_char * size).from_address(int(chunk["address"]))
    return np.frombuffer(raw, f"u{fmt.bits // 8}")


def fingerprint_memory(fmt: Format, address: int, count: int, offset: int) -> int:
    """The fingerprint of `count` elements at an address."""
    if native is not None:
        return native.fingerprint(address, count, offset, fmt.code, fmt.bits // 8)
    warn_if_slow()
    raw = (ctypes.c_char * (count * fmt.bits // 8)).from_address(address) if count else b""
    return fingerprint_bits(fmt, np.frombuffer(raw, f"u{fmt.bits // 8}"), offset)
