"""The fingerprint's definition: a sum over elements of bits times a key of the position, modulo 2**64.

    H = sum over i of  y(x_i) * K(offset + i)  +  n * D(dtype)                     (mod 2**64)

    y    1-byte elements: the byte.  2-byte: the bits as int16.  4-byte: v ^ (v >> 16).  8-byte: v ^ (v >> 32), then ^ (>> 16).
    K(i) = W(i >> 16) * R((i >> 10) % 64) * T(i % 1024), three odd numbers
    D    an odd number of the dtype

H is a sum over elements, so it does not depend on the order of summation, and shards at any element offset add up to the whole.
y is one-to-one and K is odd, so a change of any single element always changes H. `kernels/README.md` derives what else is
always seen. T is small on purpose for narrow elements: T = A + 2**32 * C with |A|, |C| < 2**11 makes y * T two 16-bit
multiplications whose sums over 32 elements fit in 32 bits (one `pmaddwd` each).

Worked example, a uint8 tensor [1, 0, 2]:
    H = K(0) + 2 * K(2) + 3 * D(uint8), and the shards [1] at 0 and [0, 2] at 1 give K(0) + D and 2 * K(2) + 2 * D.
"""

import numpy as np

from holter_kernels.layout import BLOCK, Format

MASK64 = (1 << 64) - 1
NUM_ROW_KEYS = 64
ROW_SHIFT = 10
GROUP_SHIFT = 16


def mix64(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: a bijection of 64-bit integers that scatters nearby inputs."""
    x = np.asarray(x, np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _stream(name: int, count: int) -> np.ndarray:
    return mix64(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(name << 32))


# Distinct odd numbers in [-2047, 2047], so that two keys of a block never differ by a high power of two.
LOW = (2 * np.argsort(_stream(1, 2 * BLOCK), kind="stable")[:BLOCK] - 2047).astype(np.int16)
HIGH = ((_stream(4, BLOCK) >> np.uint64(32)) % np.uint64(4095)).astype(np.int16) - np.int16(2047)
NARROW = LOW.astype(np.uint64) + (HIGH.astype(np.uint64) << np.uint64(32))
"""T for elements of 1 and 2 bytes."""

WIDE = ((_stream(3, BLOCK) >> np.uint64(33)) | np.uint64(1)).astype(np.uint32)
"""T for elements of 4 and 8 bytes, below 2**31."""

ROWS = ((_stream(5, NUM_ROW_KEYS) >> np.uint64(33)) | np.uint64(1)).astype(np.uint32)
"""R, below 2**31."""


def group_key(group: np.ndarray) -> np.ndarray:
    """W: one 64-bit odd number for every 65,536 elements."""
    return mix64(np.asarray(group, np.uint64) + np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)


def dtype_key(fmt: Format) -> int:
    """D, which also counts the elements."""
    return int(mix64(np.array([0xD7E0 + fmt.code], np.uint64))[0]) | 1


def keys(fmt: Format, index: np.ndarray) -> np.ndarray:
    """K at global element indices."""
    index = np.asarray(index, np.uint64)
    table = NARROW if fmt.bits <= 16 else WIDE.astype(np.uint64)  # noqa: PLR2004
    row = ROWS.astype(np.uint64)[(index >> np.uint64(ROW_SHIFT)) % np.uint64(NUM_ROW_KEYS)]
    return group_key(index >> np.uint64(GROUP_SHIFT)) * row * table[index % np.uint64(BLOCK)]


def spread(fmt: Format, bits: np.ndarray) -> np.ndarray:
    """Y: the element's bits as a 64-bit integer, high bits folded down so that no single-bit change is a high power of two."""
    match fmt.bits:
        case 8:
            return bits.astype(np.uint64)
        case 16:
            return bits.view(np.int16).astype(np.int64).view(np.uint64)
        case 32:
            return (bits ^ (bits >> np.uint32(16))).astype(np.uint64)
    y = bits ^ (bits >> np.uint64(32))
    return y ^ (y >> np.uint64(16))


def fingerprint_bits(fmt: Format, bits: np.ndarray, offset: int = 0) -> int:
    """H of raw elements, by the definition."""
    total = bits.size * dtype_key(fmt)
    for start in range(0, bits.size, 1 << 20):
        piece = bits[start : start + (1 << 20)]
        index = np.arange(piece.size, dtype=np.uint64) + np.uint64(offset + start)
        total += int(np.sum(spread(fmt, piece) * keys(fmt, index), dtype=np.uint64))
    return total & MASK64
