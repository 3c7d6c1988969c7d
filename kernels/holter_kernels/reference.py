"""The slow definition of every statistic: each faster implementation is a claim about this file.

For the elements x of a tensor, F its finite ones (for integers: all):

    numel, zeros, subnormals, nans, pos_infs, neg_infs   counts, by bits
    min, max, absmax       over F, as float64 (int64 rounds to nearest); -0 counts as 0; NaN where F is empty
    absmin_nonzero         smallest |x| > 0 over F; NaN where there is none
    sum, abs_sum, square_sum                             over F, exact up to the float64 summation used here
    low_mantissa_zero      elements whose low mantissa bits (16 of float32's, 29 of float64's, 4 of bfloat16's, 7 of float16's)
                           are all zero: how much of a tensor would survive the next smaller format unchanged. Zeros and infinities
                           count. 0 for float8 and integers.
    histogram[e]           elements of exponent field e, moved to float32's bias and clamped to 1..254; bin 0: zeros and
                           subnormals; bin 255: NaN and infinities. Integers: all zero. "sampled": only elements whose global
                           index i has (i // 1024) % 16 == 0.

Worked example, float32 [0, -2, 3, inf]: numel 4, zeros 1, pos_infs 1; F = {0, -2, 3}: min -2, max 3, absmax 3,
absmin_nonzero 2, sum 1, abs_sum 5, square_sum 13; all four have 16 low zero bits; histogram: bin 0: 1 (the zero), bin 128: 2
(2 and 3 are in [2**1, 2**2)), bin 255: 1.
"""

from collections.abc import Sequence

import numpy as np
import torch

from holter_kernels.keys import fingerprint_bits
from holter_kernels.layout import BLOCK, FORMATS, NUM_BINS, ROW, SAMPLE_EVERY, Format, bits_of

_FLOAT32_BIAS = 127
COUNTS = ("numel", "zeros", "subnormals", "nans", "pos_infs", "neg_infs", "low_mantissa_zero")


def error_bound(fmt: Format, numel: int) -> float:
    """Return how far a sum may be from the exact one, as a share of the sum of magnitudes; derived in kernels/README.md.

    Formats of at most 32 bits are added in float32 within a block of 1024 and in float64 beyond; the others in float64
    throughout.
    """
    if fmt.bits in (16, 32) and fmt.is_float:
        return 260 * 2.0**-24
    return (BLOCK + 2 + numel / BLOCK) * 2.0**-53


def values(fmt: Format, bits: np.ndarray) -> np.ndarray:
    """Return the elements as float64; int64 is rounded."""
    match fmt.name:
        case "bfloat16":
            bits, name = bits.astype(np.uint32) << np.uint32(16), "float32"
        case "bool":
            return bits.astype(np.float64)
        case "float8_e4m3fn" | "float8_e5m2":
            every_byte = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(getattr(torch, fmt.name))
            return every_byte.to(torch.float64).numpy()[bits]
        case _:
            name = fmt.name
    with np.errstate(invalid="ignore"):  # a signalling NaN is nothing to warn of
        return bits.view(name).astype(np.float64)


def bins(fmt: Format, bits: np.ndarray) -> np.ndarray:
    """Return the histogram bin of each element of a floating format."""
    magnitude = bits.astype(np.uint64) & np.uint64((1 << (fmt.bits - 1)) - 1)
    field = (magnitude >> np.uint64(fmt.mantissa_bits)).astype(np.int64)
    shifted = np.clip(field - fmt.bias + _FLOAT32_BIAS, 1, NUM_BINS - 2)
    shifted[field == 0] = 0
    shifted[magnitude > np.uint64(fmt.largest_finite)] = NUM_BINS - 1
    return shifted


def _classify(row: np.ndarray, fmt: Format, bits: np.ndarray) -> np.ndarray:
    """Fill in the counts of a floating format; return which elements are finite."""
    sign = (bits >> np.asarray(fmt.bits - 1, bits.dtype)) != 0
    magnitude = bits.astype(np.uint64) & np.uint64((1 << (fmt.bits - 1)) - 1)
    finite = magnitude <= np.uint64(fmt.largest_finite)
    infinite = magnitude == np.uint64(fmt.largest_finite + 1) if fmt.has_infinity else np.zeros_like(finite)
    row["zeros"] = np.count_nonzero(magnitude == 0)
    row["subnormals"] = np.count_nonzero((magnitude > 0) & (magnitude < np.uint64(1 << fmt.mantissa_bits)))
    row["pos_infs"] = np.count_nonzero(infinite & ~sign)
    row["neg_infs"] = np.count_nonzero(infinite & sign)
    row["nans"] = np.count_nonzero(~finite & ~infinite)
    if fmt.low_bits:
        row["low_mantissa_zero"] = np.count_nonzero((magnitude & np.uint64((1 << fmt.low_bits) - 1)) == 0)
    return finite


def statistics(fmt: Format, bits: np.ndarray, offset: int, histogram: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return one row of `ROW`, and the 256 bins unless `histogram` is "off"."""
    row = np.zeros((), ROW)
    row["numel"] = bits.size
    row["fingerprint"] = fingerprint_bits(fmt, bits, offset)
    x = values(fmt, bits)
    if fmt.is_float:
        x = x[_classify(row, fmt, bits)]
    else:
        row["zeros"] = np.count_nonzero(bits == 0)
    nonzero = np.abs(x[x != 0])
    row["min"] = x.min() + 0.0 if x.size else np.nan
    row["max"] = x.max() + 0.0 if x.size else np.nan
    row["absmax"] = np.abs(x).max() if x.size else np.nan
    row["absmin_nonzero"] = nonzero.min() if nonzero.size else np.nan
    with np.errstate(over="ignore"):
        exact = x.astype(np.longdouble)
        row["sum"], row["abs_sum"], row["square_sum"] = exact.sum(), np.abs(exact).sum(), np.square(exact).sum()
    if histogram == "off":
        return row, None
    counts = np.zeros(NUM_BINS, np.uint64)
    if fmt.is_float:
        if histogram == "sampled":
            index = np.arange(bits.size, dtype=np.uint64) + np.uint64(offset)
            bits = bits[(index // np.uint64(BLOCK)) % np.uint64(SAMPLE_EVERY) == 0]
        counts += np.bincount(bins(fmt, bits), minlength=NUM_BINS).astype(np.uint64)
    return row, counts


def combine(parts: Sequence[tuple[Format, np.ndarray, int]], histogram: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the row and histogram of a tensor that lies in pieces of (format, bits, offset)."""
    if len(parts) == 1:
        return statistics(*parts[0], histogram)
    rows = np.array([np.zeros((), ROW)] * len(parts), ROW)
    bins = np.zeros(NUM_BINS, np.uint64)
    for k, part in enumerate(parts):
        rows[k], counts = statistics(*part, histogram)
        bins += 0 if counts is None else counts
    total = np.zeros((), ROW)
    for name in (*COUNTS, "fingerprint", "sum", "abs_sum", "square_sum"):
        total[name] = rows[name].sum()
    for name, best in (("min", np.fmin), ("absmin_nonzero", np.fmin), ("max", np.fmax), ("absmax", np.fmax)):
        total[name] = best.reduce(rows[name]) if len(parts) else np.nan
    return total, None if histogram == "off" else bins


def summarize_one(
    tensor: torch.Tensor, offset: int = 0, histogram: str = "sampled"
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the row and histogram of one CPU tensor."""
    return statistics(FORMATS[tensor.dtype], bits_of(tensor), offset, histogram)
