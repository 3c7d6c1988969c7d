"""Fingerprints and counts of tensors that lie in host memory or on a device, one at a time: for checkpoints, not for steps."""

import torch

from holter_kernels import fingerprint, summarize
from holter_kernels.layout import FORMATS


def fingerprint_of(tensor: torch.Tensor) -> str:
    """64 bits in hexadecimal, of the elements that this rank holds, as if they were a tensor by themselves. Raises ValueError."""
    return f"{fingerprint(_plain(tensor)):016x}"


def count_nonfinite(tensor: torch.Tensor) -> int:
    """How many elements are NaN or infinite. Raises ValueError."""
    nans, infs = _counts(tensor)
    return nans + infs


def count_nan(tensor: torch.Tensor) -> int:
    """How many elements are NaN: a mask may well be infinite. Raises ValueError."""
    return _counts(tensor)[0]


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    plain = _plain(tensor)
    if not (plain.is_floating_point() or plain.is_complex()):
        return 0, 0
    table = summarize([plain], histogram="off")
    return int(table.nans[0]), int(table.pos_infs[0]) + int(table.neg_infs[0])


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The local elements in a dtype that can be read; the bits of one that cannot."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local = local.detach()
    if local.dtype in FORMATS or local.is_complex():
        return local
    if local.layout is not torch.strided or local.is_quantized:
        raise ValueError(f"a tensor of {local.dtype}, {local.layout} has no elements to read one by one")
    return local.contiguous().reshape(-1).view(torch.uint8)
