"""The fingerprint's definition: a sum over elements of bits times a key of the position, modulo 2**64.

    H = sum over i of  y_i * K(k_i)  +  n * D(dtype)                                                (mod 2**64)

    bytes of x_i = v    y_i                                        k_i, with i counted from the start of the whole tensor
    1                   (v ^ (v >> 4)) * 2**(8 * (i % 4))          i // 4
    2                   (v ^ (v >> 8)) * 2**(16 * (i % 2))         i // 2
    4                   v ^ (v >> 16)                              i
    8                   v ^ (v >> 32), then ^ (>> 16)              i

    K(k) = W(k >> 16) * R((k >> 10) % 64) * T(k % 1024), three odd numbers;  D, an odd number of the dtype

Narrow elements share a 32-bit word and its key: a word times a key is the sum of its parts times the key, so a loop may take a whole
word with one multiplication, and a shard that begins in the middle of a word still adds up. H is a sum over elements, so it does not
depend on the order of summation. y is one-to-one and K is odd, so a change of any one element, or of any elements
of one word, always changes H. `kernels/README.md` derives what else is always seen.

Worked example, a uint8 tensor [16, 0, 2]: the elements fold to 17, 0, 2, all in word 0, so H = (17 + 2 * 2**16) * K(0) + 3 * D(uint8);
the shards [16] at 0 and [0, 2] at 1 give 17 * K(0) + D and 2 * 2**16 * K(0) + 2 * D.
"""

import numpy as np

from holter_kernels.layout import BLOCK, Format

MASK64 = (1 << 64) - 1
NUM_ROW_KEYS = 64
ROW_SHIFT = 10
GROUP_SHIFT = 16


def mix64(x: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64, a bijection of 64-bit integers that scatters nearby inputs."""
    x = np.asarray(x, np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _stream(name: int, count: int) -> np.ndarray:
    return mix64(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(name << 32))


PLACES = ((_stream(3, BLOCK) >> np.uint64(33)) | np.uint64(1)).astype(np.uint32)
"""T: distinct odd numbers below 2**31."""

ROWS = ((_stream(5, NUM_ROW_KEYS) >> np.uint64(33)) | np.uint64(1)).astype(np.uint32)
"""R: distinct odd numbers below 2**31."""


def group_key(group: np.ndarray) -> np.ndarray:
    """Return W, a 64-bit odd number for every 65,536 elements."""
    return mix64(np.asarray(group, np.uint64) + np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)


def dtype_key(fmt: Format) -> int:
    """Return D, an odd number for each dtype, which also makes the number of elements count."""
    return int(mix64(np.array([0xD7E0 + fmt.code], np.uint64))[0]) | 1


def keys(index: np.ndarray) -> np.ndarray:
    """Return K at positions k."""
    index = np.asarray(index, np.uint64)
    row = ROWS.astype(np.uint64)[(index >> np.uint64(ROW_SHIFT)) % np.uint64(NUM_ROW_KEYS)]
    place = PLACES.astype(np.uint64)[index % np.uint64(BLOCK)]
    return group_key(index >> np.uint64(GROUP_SHIFT)) * row * place


def spread(bits: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return y: high bits are folded down, so that no one-bit change is a high power of two, and moved to their place in the word."""
    width = bits.itemsize
    half = bits.dtype.type(bits.itemsize * 4)
    folded = (bits ^ (bits >> half)).astype(np.uint64)
    if width == 8:  # noqa: PLR2004
        return folded ^ (folded >> np.uint64(16))
    return folded << (np.uint64(8 * width) * (index % np.uint64(4 // width)))


def fingerprint_bits(fmt: Format, bits: np.ndarray, offset: int = 0) -> int:
    """Return H of raw elements, computed by the definition."""
    total = bits.size * dtype_key(fmt)
    in_word = np.uint64(max(1, 4 // bits.itemsize))
    for start in range(0, bits.size, 1 << 20):
        piece = bits[start : start + (1 << 20)]
        index = np.arange(piece.size, dtype=np.uint64) + np.uint64(offset + start)
        total += int(np.sum(spread(piece, index) * keys(index // in_word), dtype=np.uint64))
    return total & MASK64
