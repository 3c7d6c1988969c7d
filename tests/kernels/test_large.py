"""Much of everything: a hundred thousand tensors, and one beyond 2**31 bytes."""

import pytest
import torch

from holter_kernels import fingerprint, merge, set_num_threads, summarize


@pytest.mark.slow
def test_a_hundred_thousand_tensors() -> None:
    flat = torch.randn(100_000 * 3)
    tensors = list(flat.split(3))
    table = summarize(tensors, "off")
    assert 100_000 == len(table)
    assert torch.equal(torch.from_numpy(table.max), flat.view(-1, 3).amax(1).to(torch.float64))
    assert fingerprint(tensors[77_777]) == int(table.fingerprint[77_777])


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_a_tensor_of_three_gigabytes(dtype: torch.dtype) -> None:
    numel = 3 * 2**30 // dtype.itemsize + 1
    x = torch.empty(numel, dtype=dtype).fill_(3)
    x[0], x[2**29 + 7], x[-1] = 7, 0, 5
    set_num_threads(2)
    try:
        table = summarize([x])
    finally:
        set_num_threads(1)
    assert (numel, 1, 0.0, 7.0, 3.0) == tuple(
        int(v) if k < 2 else float(v)
        for k, v in enumerate((table.numel[0], table.zeros[0], table.min[0], table.max[0], table.absmin_nonzero[0]))
    )
    expected = 3 * (numel - 3) + 7 + 5
    assert abs(table.sum[0] - expected) <= 260 * 2.0**-24 * expected
    middle = numel // 2 + 1
    assert int(table.fingerprint[0]) == merge([fingerprint(x[:middle]), fingerprint(x[middle:], middle)])
    if dtype.is_floating_point:
        assert -(-numel // 16384) * 1024 >= int(table.histogram.sum()) >= numel // 16384 * 1024
