"""Any Triton kernel runs on the stream that it was launched on, in the interpreter; addresses in tables are the device's."""

import fake_cuda
import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.device


@triton.jit
def add_one(x, count, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < count) + 1, mask=at < count)


@triton.jit
def add_up(addresses, counts, out, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0)
    x = tl.load(addresses + row).to(tl.pointer_type(tl.float32))
    at = tl.arange(0, BLOCK)
    value = tl.sum(tl.load(x + at, mask=at < tl.load(counts + row), other=0.0), 0)
    tl.atomic_add(out, value)
    tl.store(x, value)


def test_a_kernel_is_queued_on_the_current_stream() -> None:
    x = torch.zeros(100, device="cuda")
    with fake_cuda.closed():
        add_one[(4,)](x, 100, 32)
        x.mul_(3)
        add_one[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, 100, BLOCK=32)
    assert [4.0] * 100 == x.tolist()


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_addresses_in_a_table_are_followed(device: str) -> None:
    tensors = [torch.full((n,), 2.0, device=device) for n in (3, 5, 60)]
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)
    counts = torch.tensor([tensor.numel() for tensor in tensors], device=device)
    out = torch.zeros(1, device=device)
    add_up[(3,)](addresses, counts, out, 64)
    assert 136.0 == out.item()
    assert [6.0, 10.0, 120.0] == [tensor[0].item() for tensor in tensors]


def test_views_are_where_they_are() -> None:
    x = torch.zeros(100, device="cuda")
    add_one[(1,)](x[10:20], 10, 16)
    assert (0.0, 10.0, 10.0) == (x[:10].sum().item(), x[10:20].sum().item(), x.sum().item())


def test_a_kernel_that_fails_is_told_at_the_next_synchronisation() -> None:
    x = torch.zeros(10, device="cuda")
    add_one[(1,)](x, 10, 10)
    with pytest.raises(RuntimeError, match="triton add_one"):
        torch.cuda.synchronize()


def test_a_kernel_is_captured_and_replayed() -> None:
    x = torch.zeros(10, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_one[(1,)](x, 10, 16)
    assert ["triton add_one"] == graph.node_names()
    graph.replay()
    graph.replay()
    assert [2.0] * 10 == x.tolist()


def test_kernels_of_two_streams_take_turns() -> None:
    tensors, streams = [torch.zeros(100, device="cuda") for _ in range(2)], [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(5):
        for tensor, stream in zip(tensors, streams, strict=True):
            with torch.cuda.stream(stream):
                add_one[(4,)](tensor, 100, 32)
    torch.cuda.synchronize()
    assert [500.0, 500.0] == [tensor.sum().item() for tensor in tensors]


def test_kernels_on_host_tensors_run_as_before() -> None:
    x = torch.zeros(10)
    add_one[(1,)](x, 10, 16)
    assert [1.0] * 10 == x.tolist()
