"""The same rows by torch operations, for devices that Triton cannot serve or compile for.

Many operations a tensor, on the current stream, none of which waits. Integers and extremes are bit-equal to the definition, the fingerprint too: 64-bit integers wrap around in torch as
they do there. Where a device has no float64 (MPS), sums and extremes are float32.

    v ^ v >> 16, the fold of a 4-byte element, is written (v ^ (v >> 16)) on int64 values that were masked to 32 bits: torch's >> repeats the sign.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from holter_kernels.gpu import key_tables, upload
from holter_kernels.keys import MASK64, dtype_key
from holter_kernels.layout import BITS_DTYPE, FORMATS, NUM_BINS, SAMPLE_EVERY, Format
from holter_kernels.sources import Run, readable, runs

PIECE = 1 << 22
"""Number of elements processed at a time, which bounds the memory for intermediate results: about a dozen times 32
MB."""
_BLOCK_SHIFT, _GROUP_SHIFT, _ROW_MASK, _PLACE_MASK = 10, 16, 63, 1023
_FLOAT32_BIAS = 127
NUM_INTEGERS, NUM_FLOATS = 8, 7


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned number."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


@lru_cache(maxsize=16)
def float_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype that sums are added in: float64, or float32 on a device without it."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


@torch.no_grad()
def run_operations(  # noqa: PLR0913 - the memory is the caller's
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    *,
    rows: torch.Tensor,
    bins: torch.Tensor | None,
    flag: torch.Tensor,
    statistics: bool,
    histogram: str,
) -> list[int]:
    """Fill rows, bins and flag; return the positions of tensors that this device's operations could not read."""
    rows.zero_()
    if bins is not None:
        bins.zero_()
    failed = []
    for position, tensor in enumerate(tensors):
        try:
            integers, floats = _read(
                tensor, device, None if bins is None else bins[position], histogram if statistics else None
            )
        except Exception:  # noqa: BLE001 - an operation that this device has not, a tensor without values: that one is left out
            failed.append(position)
            integers, floats = _nothing(device)
        rows[position, :NUM_INTEGERS] = integers
        wide = floats if floats.dtype is torch.float64 else floats.view(torch.int32).to(torch.int64)
        rows[position, NUM_INTEGERS : NUM_INTEGERS + NUM_FLOATS] = wide.view(torch.int64)
    flag.copy_((rows[:, 3:6].sum() > 0).to(torch.float32))
    return failed


def _nothing(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    infinity = float("inf")
    start = [infinity, -infinity, 0.0, infinity, 0.0, 0.0, 0.0]
    floats = torch.zeros(NUM_FLOATS, dtype=float_dtype(device), device=device)
    for k, value in enumerate(start):
        if value:
            floats[k].fill_(
                value
            )  # a fill travels as a number; a tensor made of a list would be copied, and waited for
    return torch.zeros(NUM_INTEGERS, dtype=torch.int64, device=device), floats


def _read(
    tensor: torch.Tensor, device: torch.device, bins: torch.Tensor | None, histogram: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one tensor's row; `histogram` None means without statistics."""
    part = readable(tensor)
    if part.dtype not in FORMATS:
        part = part.view(BITS_DTYPE[part.element_size() * 8])
    fmt, flat = FORMATS[part.dtype], part.reshape(-1)
    integers, floats = _nothing(device)
    where = runs(tensor)
    offsets = None if len(where) <= 1 else upload(device, np.array([offset for _, _, offset in where], np.int64))[0]
    for start in range(0, flat.numel(), PIECE):
        piece = flat[start : start + PIECE]
        index = _index(start, piece.numel(), where, offsets, device)
        bits = piece.view(BITS_DTYPE[fmt.bits]).to(torch.int64)
        if fmt.bits < 64:  # noqa: PLR2004
            bits = bits & ((1 << fmt.bits) - 1)
        integers[0] += piece.numel()
        integers[7] += _fingerprint(fmt, bits, index, device)
        if histogram is not None:
            _observe(fmt, piece, bits, integers, floats)
            if bins is not None and fmt.is_float:
                _count_exponents(fmt, bits, index, bins, histogram)
    if histogram is not None:
        floats[2] = torch.maximum(floats[1], -floats[0])
    return integers, floats


def _index(
    start: int, count: int, where: list[Run], offsets: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Return the place of each element in the whole tensor; the runs of a shard have equal lengths."""
    local = torch.arange(start, start + count, device=device)
    if offsets is None:
        return local + where[0][2] if where and where[0][2] else local
    length = where[0][1]
    return offsets[local // length] + local % length


def _fingerprint(fmt: Format, bits: torch.Tensor, index: torch.Tensor, device: torch.device) -> torch.Tensor:
    places, rows = key_tables(device)
    in_word = max(1, 32 // fmt.bits)
    if fmt.bits == 64:  # noqa: PLR2004
        y = bits ^ _shift(bits, 32)
        y = y ^ _shift(y, 16)
    else:
        y = (bits ^ (bits >> (fmt.bits // 2))) << (fmt.bits * (index % in_word))
    word = index // in_word
    group = _mix64((word >> _GROUP_SHIFT) + _signed(0x9E3779B97F4A7C15)) | 1
    key = group * rows[(word >> _BLOCK_SHIFT) & _ROW_MASK].to(torch.int64) * places[word & _PLACE_MASK].to(torch.int64)
    return (y * key).sum() + _signed(bits.numel() * dtype_key(fmt))


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right, bringing in zeros."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _observe(
    fmt: Format, piece: torch.Tensor, bits: torch.Tensor, integers: torch.Tensor, floats: torch.Tensor
) -> None:
    x = piece.to(floats.dtype)
    if not fmt.is_float:
        integers[1] += (bits == 0).sum()
        finite, has_size = torch.ones_like(bits, dtype=torch.bool), bits != 0
    else:
        magnitude = bits & ((1 << (fmt.bits - 1)) - 1)
        finite = magnitude <= fmt.largest_finite
        infinite = (magnitude == fmt.largest_finite + 1) if fmt.has_infinity else torch.zeros_like(finite)
        is_negative = magnitude != bits
        has_size = finite & (magnitude != 0)
        integers[1] += (magnitude == 0).sum()
        integers[2] += ((magnitude != 0) & (magnitude < (1 << fmt.mantissa_bits))).sum()
        integers[3] += (~finite & ~infinite).sum()
        integers[4] += (infinite & ~is_negative).sum()
        integers[5] += (infinite & is_negative).sum()
        if fmt.low_bits:
            integers[6] += ((magnitude & ((1 << fmt.low_bits) - 1)) == 0).sum()
        x = torch.where(finite, x, 0)
    infinity, size = float("inf"), x.abs()
    floats[0] = torch.minimum(floats[0], torch.where(finite, x, infinity).min())
    floats[1] = torch.maximum(floats[1], torch.where(finite, x, -infinity).max())
    floats[3] = torch.minimum(floats[3], torch.where(has_size, size, infinity).min())
    floats[4] += x.sum()
    floats[5] += size.sum()
    floats[6] += (size * size).sum()


def _count_exponents(fmt: Format, bits: torch.Tensor, index: torch.Tensor, bins: torch.Tensor, histogram: str) -> None:
    magnitude = bits & ((1 << (fmt.bits - 1)) - 1)
    field = magnitude >> fmt.mantissa_bits
    bin_ = (field - fmt.bias + _FLOAT32_BIAS).clamp(1, NUM_BINS - 2)
    bin_ = torch.where(field == 0, 0, torch.where(magnitude > fmt.largest_finite, NUM_BINS - 1, bin_))
    chosen = torch.ones_like(bin_)
    if histogram == "sampled":
        chosen = ((index >> _BLOCK_SHIFT) % SAMPLE_EVERY == 0).to(torch.int64)
    bins.scatter_add_(0, bin_, chosen)
