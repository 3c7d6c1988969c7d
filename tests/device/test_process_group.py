"""Ranks on the device: collectives in stream order, DDP and `fully_shard` as on the CPU, and a whole job under `torchrun -m holter`."""

import json
from pathlib import Path

import fake_cuda
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

SCRIPT = Path(__file__).resolve().parent / "scripts" / "train.py"


def joined(rank: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))


def in_stream_order(rank: int) -> tuple[list[float], list[str], bool]:
    joined(rank)
    x = torch.full((4,), float(rank + 1), device="cuda")
    fake_cuda.drain()
    fake_cuda.syncs()
    with fake_cuda.closed():
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        y = x * 2
        was_done = work.is_completed()
    syncs = fake_cuda.syncs()
    return y.tolist(), syncs, was_done


@pytest.mark.device
def test_a_collective_runs_in_stream_order_and_the_host_does_not_wait() -> None:
    assert [([6.0] * 4, [], False)] * 2 == fake_cuda.run_ranks(in_stream_order)


def without_waiting(rank: int) -> list[float]:
    joined(rank)
    x = torch.full((4,), float(rank + 1), device="cuda")
    fake_cuda.drain()
    if rank == 0:
        fake_cuda.set_delay(0.2)  # the group's stream is late, the current one is not made to wait
    work = dist.all_reduce(x, async_op=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = x.clone()
        seen = y.tolist()
    fake_cuda.set_delay(0)
    work.wait()
    assert [3.0] * 4 == x.tolist()
    dist.barrier()
    return seen


@pytest.mark.device
def test_who_does_not_wait_reads_what_was_there_before() -> None:
    assert [1.0] * 4 == fake_cuda.run_ranks(without_waiting)[0]


def every_collective(rank: int) -> dict[str, list[float]]:
    joined(rank)
    x = torch.arange(4.0, device="cuda") + 10 * rank
    seen = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        seen[name] = tensor.tolist()

    for name, op in (("sum", dist.ReduceOp.SUM), ("avg", dist.ReduceOp.AVG), ("max", dist.ReduceOp.MAX)):
        y = x.clone()
        dist.all_reduce(y, op)
        note(name, y)
    y = x.clone()
    dist.broadcast(y, 1)
    note("broadcast", y)
    y = torch.empty(8, device="cuda")
    dist.all_gather_into_tensor(y, x)
    note("gathered", y)
    parts = [torch.empty(4, device="cuda") for _ in range(2)]
    dist.all_gather(parts, x)
    note("parts", torch.cat(parts))
    y = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(y, x, dist.ReduceOp.AVG)
    note("scattered", y)
    y = torch.empty(4, device="cuda")
    dist.all_to_all_single(y, x)
    note("all to all", y)
    send, receive = dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    note("received", y)
    dist.barrier()
    dist.destroy_process_group()
    return seen


@pytest.mark.device
def test_every_collective_gives_what_it_should() -> None:
    both = [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]
    common = {"sum": [10.0, 12.0, 14.0, 16.0], "avg": [5.0, 6.0, 7.0, 8.0], "max": both[4:]}
    common |= {"broadcast": both[4:], "gathered": both, "parts": both}
    own = [
        {"scattered": [5.0, 6.0], "all to all": [0.0, 1.0, 10.0, 11.0], "received": both[4:]},
        {"scattered": [7.0, 8.0], "all to all": [2.0, 3.0, 12.0, 13.0], "received": both[:4]},
    ]
    assert [common | mine for mine in own] == fake_cuda.run_ranks(every_collective)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))


def trained(model: torch.nn.Module, inputs: list[torch.Tensor]) -> torch.nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in inputs:
        model(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def batches() -> list[torch.Tensor]:
    return [torch.randn(8, 16, generator=torch.Generator().manual_seed(step)) for step in range(4)]


def with_ddp(rank: int) -> list[list[float]]:
    joined(rank)
    mine = [batch.chunk(2)[rank].cuda() for batch in batches()]
    fake_cuda.set_delay(0.0002)
    model = trained(DistributedDataParallel(make_model().cuda(), device_ids=[rank]), mine)
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def with_fsdp(rank: int) -> list[list[float]]:
    joined(rank)
    mine = [batch.chunk(2)[rank].cuda() for batch in batches()]
    model = make_model().cuda()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mp_policy=policy)
    fake_cuda.set_delay(0.0002)
    trained(model, mine)
    return [parameter.full_tensor().flatten().tolist() for parameter in model.parameters()]


@pytest.mark.device
@pytest.mark.parametrize("work", [with_ddp, with_fsdp])
def test_two_ranks_learn_what_one_learns_from_both_batches(work) -> None:
    first, second = fake_cuda.run_ranks(work)
    assert first == second
    alone = trained(make_model(), batches())
    for expected, seen in zip(alone.parameters(), first, strict=True):
        # The same sums in another order: float32 over 8 rows and 4 steps of AdamW.
        assert torch.allclose(expected.flatten(), torch.tensor(seen), rtol=1e-4, atol=1e-5)


@pytest.mark.job
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.release)])
def test_a_job_on_the_device_runs_under_holter_and_ends_with_the_same_bits(jobs, device_environment, kind: str) -> None:
    ended = [jobs.run(SCRIPT, kind, env=device_environment, attached=attached) for attached in (True, False)]
    assert [0, 0] == [end.code for end in ended], ended[0].stderr
    watched, alone = (
        [json.loads(line) for line in sorted(end.stdout.splitlines()) if line.startswith("{")] for end in ended
    )
    assert watched == alone
    assert ["cuda:0", "cuda:1"] == [line["device"] for line in watched]
