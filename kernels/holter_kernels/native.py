"""The C extension with its keys set. Importing this module fails if the extension was not built."""

import numpy as np

from holter_kernels import _native
from holter_kernels.keys import PLACES, ROWS, dtype_key
from holter_kernels.layout import FORMATS, ROW
from holter_kernels.plan import Plan

_STATISTICS, _SAMPLED, _READ_ONLY = 1, 4, 8
_BY_CODE = sorted(FORMATS.values(), key=lambda fmt: fmt.code)

_native.set_keys(PLACES, ROWS, np.array([dtype_key(fmt) for fmt in _BY_CODE], np.uint64))

available = _native.available
select = _native.select
instruction_set = _native.selected
fingerprint = _native.fingerprint
"""Fingerprint of elements at an address; arguments: address, count, offset, code and bytes of the dtype."""


def run(  # noqa: PLR0913 - the memory is the caller's
    plan: Plan,
    rows: np.ndarray,
    bins: np.ndarray | None,
    partials: np.ndarray,
    *,
    statistics: bool,
    sampled: bool,
    num_threads: int,
) -> None:
    """Fill rows and bins from a plan without holding the interpreter lock; `partials` has room for a row of each chunk."""
    mode = _STATISTICS * statistics | _SAMPLED * sampled
    _native.run(plan.chunks, partials, plan.first_chunk, plan.jobs, rows, plan.bases, bins, mode, num_threads)


def read(plan: Plan, num_threads: int) -> None:
    """Read all the memory of a plan and do nothing with it, as the bound that benchmarks compare with."""
    rows = len(plan.first_chunk) - 1
    partials = np.empty(len(plan.chunks), ROW)
    _native.run(
        plan.chunks,
        partials,
        plan.first_chunk,
        plan.jobs,
        np.empty(rows, ROW),
        plan.bases,
        None,
        _READ_ONLY,
        num_threads,
    )
