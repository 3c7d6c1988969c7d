"""How each dtype is read, and what one row of results looks like in memory.

Every implementation works on raw bits, never on a dtype's arithmetic: an element is an integer of `bits` bits, and a floating
format is (exponent bits, mantissa bits, bias, largest finite magnitude). The native code and the GPU kernels write rows of
`ROW`, so that no result is converted on its way to Python.

    float32   s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm     magnitude = bits without the sign
              zero: magnitude 0                      subnormal: exponent field 0, mantissa not 0
              finite: magnitude <= 0x7F7FFFFF        infinity: 0x7F800000     NaN: above
"""

from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 1024
"""Number of elements that share a row key of the fingerprint; also the unit of sampling and of summation."""

SAMPLE_EVERY = 16
"""The sampled histogram reads only every so many blocks of a tensor: 0, 16, 32, …"""

NUM_BINS = 256

ROW = np.dtype(
    [
        ("numel", np.uint64),
        ("zeros", np.uint64),
        ("subnormals", np.uint64),
        ("nans", np.uint64),
        ("pos_infs", np.uint64),
        ("neg_infs", np.uint64),
        ("low_mantissa_zero", np.uint64),
        ("fingerprint", np.uint64),
        ("min", np.float64),
        ("max", np.float64),
        ("absmax", np.float64),
        ("absmin_nonzero", np.float64),
        ("sum", np.float64),
        ("abs_sum", np.float64),
        ("square_sum", np.float64),
        ("reserved", np.uint64),
    ]
)


@dataclass(frozen=True, slots=True)
class Format:
    """The bit layout of one dtype."""

    code: int
    """Number of the dtype in the native code's switch and in the fingerprint."""
    name: str
    bits: int
    exponent_bits: int = 0
    """Number of exponent bits; 0 for an integer."""
    mantissa_bits: int = 0
    low_bits: int = 0
    """Number of low mantissa bits that `low_mantissa_zero` tests; 0 if the test makes no sense for this dtype."""
    has_infinity: bool = True

    @property
    def is_float(self) -> bool:
        """Whether the dtype has NaN and exponents to count."""
        return self.exponent_bits > 0

    @property
    def bias(self) -> int:
        """Exponent field of 1.0."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def largest_finite(self) -> int:
        """Magnitude bits above which nothing is finite."""
        all_ones = ((1 << self.exponent_bits) - 1) << self.mantissa_bits
        # e4m3fn has no infinities: only the very last magnitude is not a number.
        return all_ones - 1 if self.has_infinity else (1 << (self.bits - 1)) - 2


FLOAT32 = Format(0, "float32", 32, 8, 23, low_bits=16)  # fits bfloat16
FLOAT64 = Format(1, "float64", 64, 11, 52, low_bits=29)  # fits float32
BFLOAT16 = Format(2, "bfloat16", 16, 8, 7, low_bits=4)  # fits the 3 bits of e4m3
FLOAT16 = Format(3, "float16", 16, 5, 10, low_bits=7)  # fits the 3 bits of e4m3
FLOAT8_E4M3 = Format(4, "float8_e4m3fn", 8, 4, 3, has_infinity=False)
FLOAT8_E5M2 = Format(5, "float8_e5m2", 8, 5, 2)
INT32 = Format(6, "int32", 32)
INT64 = Format(7, "int64", 64)
UINT8 = Format(8, "uint8", 8)
BOOL = Format(9, "bool", 8)
INT8 = Format(10, "int8", 8)
INT16 = Format(11, "int16", 16)

FORMATS: dict[torch.dtype, Format] = {
    torch.float32: FLOAT32,
    torch.float64: FLOAT64,
    torch.bfloat16: BFLOAT16,
    torch.float16: FLOAT16,
    torch.float8_e4m3fn: FLOAT8_E4M3,
    torch.float8_e5m2: FLOAT8_E5M2,
    torch.int32: INT32,
    torch.int64: INT64,
    torch.uint8: UINT8,
    torch.bool: BOOL,
    torch.int8: INT8,
    torch.int16: INT16,
}

BITS_DTYPE = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the elements of a CPU tensor in logical order, as unsigned integers of their width."""
    fmt = FORMATS[tensor.dtype]
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(BITS_DTYPE[fmt.bits]).numpy().view(f"u{fmt.bits // 8}")


def blank(rows: np.ndarray, bits_only: list[int]) -> np.ndarray:
    """Blank the statistics of tensors that were read as integers of unknown meaning; only numel and fingerprint stay."""
    if bits_only:
        for name in set(ROW.names or ()) - {"numel", "fingerprint"}:
            rows[name][bits_only] = np.nan if ROW[name].kind == "f" else 0
    return rows
