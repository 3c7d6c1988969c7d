"""Run by test_triton_interpreted.py with TRITON_INTERPRET=1: the GPU kernels on CPU tensors, results poisoned, against the definition."""

import sys
from unittest import mock

import numpy as np
import torch

from holter_kernels import fingerprint, gpu
from holter_kernels.layout import FORMATS, ROW
from holter_kernels.reference import summarize_one
from holter_kernels.slots import finish
from holter_kernels.sources import look
from holter_kernels.testing import check, from_bytes

FAST = [torch.float32, torch.bfloat16, torch.float16]


def run(
    tensors: list[torch.Tensor], histogram: str = "sampled", *, statistics: bool = True
) -> tuple[np.ndarray, np.ndarray | None]:
    sources = look(tensors)
    tables = gpu.Tables(sources.table(), np.array(sources.bases, np.int64), len(tensors))
    with mock.patch.object(gpu, "upload", lambda _, *arrays: [torch.from_numpy(array) for array in arrays]):
        on_device = gpu.DeviceTables(tables, torch.device("cpu"), len(tensors))
    on_device.partials.fill_(-1)
    on_device.seconds.fill_(-1)
    bins = torch.full((len(tensors), 256), -1, dtype=torch.int64) if histogram != "off" and statistics else None
    rows = torch.full((len(tensors), 16), -1, dtype=torch.int64)
    flag = torch.full((1,), torch.nan)
    gpu.run_kernels(
        on_device,
        torch.tensor(sources.bases),
        rows=rows,
        bins=bins,
        flag=flag,
        statistics=statistics,
        histogram=histogram,
    )
    found = finish(rows.numpy().view(ROW).reshape(-1), statistics=statistics, bits_only=[])
    if statistics:
        assert float((found["nans"] + found["pos_infs"] + found["neg_infs"]).any()) == float(flag)
    assert not on_device.tickets.any()
    return found, None if bins is None else bins.numpy().view(np.uint64)


def agree(tensors: list[torch.Tensor], histogram: str = "sampled") -> None:
    rows, bins = run(tensors, histogram)
    for k, tensor in enumerate(tensors):
        check(tensor, rows[k], None if bins is None else bins[k], histogram=histogram)


def random_bits() -> None:
    """Every dtype, every edge of a word, a tile and a job, any bits."""
    rng = np.random.default_rng(0)
    for dtype, fmt in FORMATS.items():
        sizes = [0, 1, 3, 2049, 5000] if fmt.is_float else [0, 1025]
        agree([from_bytes(rng.bytes(int(n) * fmt.bits // 8), dtype) for n in sizes])
        agree([from_bytes(rng.bytes(1500 * fmt.bits // 8), dtype)], "exact")
        agree([from_bytes(rng.bytes(100 * fmt.bits // 8), dtype)], "off")


def magnitudes() -> None:
    """The healthy path, its limits and what lies beyond, over several jobs."""
    rng = np.random.default_rng(1)
    for dtype in FAST:
        scales = [1.0, 0.02, 1e-20, 1e-40, 1e30] if dtype is not torch.float16 else [1.0, 1e-6]
        tensors = [torch.from_numpy(rng.standard_normal(5001) * scale).to(dtype) for scale in scales]
        tensors += [torch.from_numpy(rng.standard_normal(40_000)).to(dtype), torch.zeros(5000, dtype=dtype)]
        for special in (0.0, float("nan"), float("inf"), -float("inf"), 1e-41):
            tensors.append(torch.from_numpy(rng.standard_normal(4100)).to(dtype))
            tensors[-1][::999] = special
        tensors.append(torch.from_numpy(rng.standard_normal(18_000)).to(torch.bfloat16).to(dtype))
        agree(tensors)


def shards() -> None:
    """Views that begin at any element, so at any address: their rows are those of the copy."""
    for dtype in [*FAST, torch.float64, torch.uint8]:
        whole = torch.randn(5000).mul(50).to(dtype)
        agree([whole[begin:] for begin in (1, 2, 8, 1025)])


def fingerprints_alone() -> None:
    tensors = [torch.randn(3001).mul(50).to(dtype) for dtype in FORMATS]
    rows, _ = run(tensors, statistics=False)
    assert [fingerprint(tensor) for tensor in tensors] == rows["fingerprint"].tolist()
    assert not rows["sum"].any()


def mixed_list() -> None:
    """Dtypes in turn, one tensor of many jobs between small ones: each partial row finds its tensor."""
    tensors = [torch.randn(10 + 7 * k).to(dtype) for k, dtype in enumerate([*FORMATS, *FORMATS])]
    tensors.insert(5, torch.randn(50_000))
    agree(tensors)


def many_segments() -> None:
    """A tensor of more partial rows than one program adds, between small ones: whoever comes last finishes it, and the tickets are as before."""
    with mock.patch.object(gpu, "SEGMENT", 3), mock.patch.object(gpu, "COMBINE_TILE", 2):
        agree(
            [torch.randn(10), torch.randn(16_384 * 10 + 1), torch.randn(16_384 * 3), torch.full((70_000,), torch.inf)]
        )


def wrong_is_noticed() -> None:
    """The comparison can fail."""
    x = torch.randn(2000)
    rows, bins = run([x])
    assert bins is not None
    expected, _ = summarize_one(x)
    for name in rows.dtype.names:
        if name == "reserved":
            continue
        broken = rows[0].copy()
        broken[name] = expected[name] + max(
            abs(expected[name]) * expected.dtype[name].type(1), expected.dtype[name].type(1)
        )
        try:
            check(x, broken, bins[0])
        except AssertionError as error:
            assert str(error).startswith(name)  # noqa: PT017
        else:
            raise AssertionError(f"a wrong {name} went unnoticed")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
