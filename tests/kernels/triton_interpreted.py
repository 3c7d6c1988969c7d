"""Run by test_triton_interpreted.py with TRITON_INTERPRET=1: the GPU kernels on CPU tensors, results poisoned, against the definition."""

import sys
from unittest import mock

import numpy as np
import torch

from holter_kernels import fingerprint, gpu
from holter_kernels.layout import FORMATS
from holter_kernels.reference import summarize_one
from holter_kernels.testing import check, from_bytes

FAST = [torch.float32, torch.bfloat16, torch.float16]


def run(
    tensors: list[torch.Tensor], histogram: str = "sampled", *, statistics: bool = True
) -> tuple[np.ndarray, np.ndarray | None]:
    jobs = gpu.Jobs(tensors)
    bins = torch.full((len(tensors), 256), -1, dtype=torch.int64) if histogram != "off" and statistics else None
    rows = torch.full((len(tensors), 16), -1, dtype=torch.int64)
    gpu.run_kernels(
        jobs,
        torch.from_numpy(jobs.table),
        torch.from_numpy(jobs.first_chunk),
        partials=torch.full((len(jobs.table), 16), -1),
        rows=rows,
        bins=bins,
        statistics=statistics,
        histogram=histogram,
    )
    return gpu.finish(rows.numpy(), statistics=statistics), None if bins is None else bins.numpy().view(np.uint64)


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


def launched() -> None:
    """The whole of `GpuPass`, with streams and pinned memory that are none."""
    zeros = torch.zeros

    def unpinned(*args: object, **kwargs: object) -> torch.Tensor:
        return zeros(*args, **{**kwargs, "pin_memory": False})

    tensors = [torch.randn(3000), torch.randn(700).to(torch.bfloat16)]
    with (
        mock.patch.multiple(
            torch.cuda,
            Stream=mock.MagicMock(),
            device=mock.MagicMock(),
            stream=mock.MagicMock(),
            current_stream=mock.MagicMock(),
            is_current_stream_capturing=lambda: False,
        ),
        mock.patch.object(torch, "zeros", unpinned),
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        mock.patch.object(torch.Tensor, "record_stream"),
    ):
        for histogram, statistics in (("sampled", True), ("off", True), ("off", False)):
            gpu_pass = gpu.GpuPass(tensors, torch.device("cpu"), histogram=histogram, statistics=statistics)
            for _ in range(2):
                gpu_pass.launch(tensors, [tensor.data_ptr() for tensor in tensors])
            result = gpu_pass.result()
            assert result is not None
            rows, bins = result
            assert [fingerprint(tensor) for tensor in tensors] == rows["fingerprint"].tolist()
            for k, tensor in enumerate(tensors if statistics else []):
                check(tensor, rows[k], None if bins is None else bins[k], histogram=histogram)


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
