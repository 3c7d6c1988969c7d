"""The C extension, with its keys set; importing this fails where the extension was not built."""

import numpy as np

from holter_kernels import _native
from holter_kernels.keys import HIGH, LOW, NARROW, ROWS, WIDE, dtype_key
from holter_kernels.layout import FORMATS

_STATISTICS, _SAMPLED = 1, 4
_WIDTHS = {fmt.code: fmt.bits // 8 for fmt in FORMATS.values()}
_BY_CODE = sorted(FORMATS.values(), key=lambda fmt: fmt.code)

_native.set_keys(LOW, HIGH, WIDE, NARROW, ROWS, np.array([dtype_key(fmt) for fmt in _BY_CODE], np.uint64))

available = _native.available
select = _native.select
instruction_set = _native.selected


def run(  # noqa: PLR0913
    chunks: np.ndarray,
    partials: np.ndarray,
    first_chunk: np.ndarray,
    jobs: np.ndarray,
    rows: np.ndarray,
    bins: np.ndarray | None,
    *,
    statistics: bool,
    sampled: bool,
    num_threads: int,
) -> None:
    """Fill rows and bins from a plan, without the interpreter lock."""
    mode = _STATISTICS * statistics | _SAMPLED * sampled
    _native.run(chunks, partials, first_chunk, jobs, rows, bins, mode, num_threads)


def fingerprint(address: int, count: int, offset: int, code: int) -> int:
    """The fingerprint of elements at an address."""
    return _native.fingerprint(address, count, offset, code, _WIDTHS[code])
