"""Runs in which nothing is wrong, though each looks like some fault: `healthy_runs.py evaluation`. None may raise an alarm."""

import copy
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from common import DistributedDataParallel, Net, batch, finish, start
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train(model: nn.Module, rank: int, steps: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    """The plainest loop."""
    optimizer = optimizer or torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    for step in range(steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def thousand_steps(rank: int) -> None:
    """Long and clean."""
    train(DistributedDataParallel(Net()), rank, 1000)


def evaluation(rank: int) -> None:
    """Evaluation every 20 steps."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(80):
        train_step(model, optimizer, rank, step)
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                for part in range(10):
                    model(batch(rank, 10_000 + part)[0])
            model.train()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """One step."""
    x, y = batch(rank, step)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def slow_checkpoint(rank: int) -> None:
    """A slow checkpoint every 25 steps, on rank 0 only."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        for step in range(60):
            train_step(model, optimizer, rank, step)
            if step % 25 == 24 and rank == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder) / "last.pt")
                time.sleep(1.0)


def slow_first_step(rank: int) -> None:
    """The first step takes far longer than the rest."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(60):
        if step == 0:
            time.sleep(1.5)
        train_step(model, optimizer, rank, step)


def accumulation(rank: int) -> None:
    """Four micro-batches a step, reduced with the last one."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(50):
        optimizer.zero_grad()
        for part in range(4):
            x, y = batch(rank, 4 * step + part)
            model.require_backward_grad_sync = part == 3
            (cross_entropy(model(x), y) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def dropout(rank: int) -> None:
    """Dropout, and a random order of the data, other on each rank."""
    data = TensorDataset(torch.randn(480, 16), torch.randint(4, (480,)))
    torch.manual_seed(50 + rank)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.GELU(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


class Branching(nn.Module):
    """Has a branch that this training does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.other = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 7)

    def forward(self, x: torch.Tensor, *, is_other: bool = False) -> torch.Tensor:
        """One of the two heads."""
        x = torch.tanh(self.trunk(x))
        return self.other(x) if is_other else self.head(x)


def unused_branch(rank: int) -> None:
    """A branch that is legitimately unused."""
    train(DistributedDataParallel(Branching(), find_unused_parameters=True), rank, 60)


def loss_scaler(rank: int) -> None:
    """fp16 with a scaler that begins too high and skips its first steps."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    for step in range(60):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def schedule(rank: int) -> None:
    """A warm-up, then a cosine with restarts."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def rate(step: int) -> float:
        return step / 10 if step < 10 else 0.5 + 0.5 * math.cos(math.pi * ((step - 10) % 20) / 20)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step in range(90):
        train_step(model, optimizer, rank, step)
        scheduler.step()


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, which begins at zero."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, layer.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output and the adapter's."""
        return self.layer(x) + x @ self.down.T @ self.up.T


def adapter(rank: int) -> None:
    """LoRA: nearly everything is frozen."""
    net = Net().requires_grad_(requires_grad=False)
    net.block[0], net.block[2] = Adapted(net.block[0]), Adapted(net.block[2])
    train(DistributedDataParallel(net), rank, 60)


def unfreezing(rank: int) -> None:
    """Layers unfrozen on purpose at step 50, on all ranks; the wrapper is made anew."""
    net = Net()
    net.encoder.requires_grad_(requires_grad=False)
    train(DistributedDataParallel(net), rank, 50)
    net.encoder.requires_grad_()
    train(DistributedDataParallel(net), rank, 50)


def reference_model(rank: int) -> None:
    """A frozen reference beside the trained model."""
    net = Net()
    reference = copy.deepcopy(net).requires_grad_(requires_grad=False).eval()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(60):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        logits = model(x)
        with torch.no_grad():
            target = reference(x)
        (cross_entropy(logits, y) + 0.1 * mse_loss(logits, target)).backward()
        optimizer.step()


class Tied(nn.Module):
    """Embedding and head are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


def language(model: nn.Module, rank: int, steps: int, length: Callable[[int], int] = lambda _: 12) -> None:
    """Next tokens of made-up texts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        tokens = torch.randint(64, (8, length(step)), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, dims=1).flatten()).backward()
        optimizer.step()


def weight_tying(rank: int) -> None:
    """One tensor under two names."""
    language(DistributedDataParallel(Tied()), rank, 60)


def variable_length(rank: int) -> None:
    """Texts of other lengths at every step and on every rank."""
    language(DistributedDataParallel(Tied()), rank, 60, lambda step: 3 + (7 * step + 5 * rank) % 23)


def broadcast_statistics(rank: int) -> None:
    """Batch statistics that DDP broadcasts from rank 0."""
    train(DistributedDataParallel(_normalised()), rank, 60)


def local_statistics(rank: int) -> None:
    """Batch statistics that are local, and declared so (HOLTER_LOCAL_BUFFERS)."""
    train(DistributedDataParallel(_normalised(), broadcast_buffers=False), rank, 60)


def _normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


class Sharded(nn.Module):
    """Each rank holds half of the rows of an embedding; the halves are added up."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rows = 64 // world_size
        self.first = rank * self.rows
        self.shard = nn.Embedding(self.rows, 32)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        own = (tokens >= self.first) & (tokens < self.first + self.rows)
        return self.head(torch.tanh(self.shard((tokens - self.first).clamp(0, self.rows - 1)) * own[..., None]))


def hand_sharded(rank: int) -> None:
    """Embedding parameters sharded by hand, ignored by DDP."""
    torch.manual_seed(20 + rank)
    net = Sharded(rank, dist.get_world_size())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["shard.weight"])
    language(DistributedDataParallel(net), rank, 60)


def hand_reduced(rank: int) -> None:
    """No wrapper: the script reduces the gradients of what is replicated, and leaves its own shard alone."""
    torch.manual_seed(20 + rank)
    net = Sharded(rank, dist.get_world_size())
    for parameter in net.head.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(60):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        tokens = torch.randint(64, (8, 12), generator=generator)
        optimizer.zero_grad()
        cross_entropy(net(tokens).flatten(0, 1), tokens.roll(-1, dims=1).flatten()).backward()
        for parameter in net.head.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()


def noisy_loss(rank: int) -> None:
    """Rare spikes of the loss, which come back."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(150):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = cross_entropy(model(x * (40.0 if step % 37 == 36 else 1.0)), y)
        (loss * (1.0 + 5.0 * (step % 41 == 40))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def resumed(rank: int) -> None:
    """A run that goes on from a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{rank}.pt"
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        model = DistributedDataParallel(net)
        train(model, rank, 30, optimizer)
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
        train(model, rank, 10, optimizer)
        state = torch.load(path)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        train(model, rank, 40, optimizer)


def two_models(rank: int) -> None:
    """A generator and a discriminator, each with its optimizer."""
    one, two = DistributedDataParallel(nn.Linear(8, 16)), DistributedDataParallel(nn.Linear(16, 1))
    first, second = torch.optim.Adam(one.parameters(), lr=1e-3), torch.optim.Adam(two.parameters(), lr=1e-3)
    for step in range(60):
        noise, real = batch(rank, step)[0][:, :8], batch(rank, 5000 + step)[0]
        fake = one(noise)
        second.zero_grad()
        (two(fake.detach()).mean() - two(real).mean()).backward()
        second.step()
        first.zero_grad()
        two.module(fake).mean().neg().backward()
        first.step()


def short_last_batch(_: int) -> None:
    """100 samples a rank in batches of 8."""
    data = TensorDataset(torch.randn(200, 16), torch.randint(4, (200,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


class Slow(Dataset):
    """Samples that take their time."""

    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep((index * 7919 % 13) / 13000)
        return torch.randn(16, generator=torch.Generator().manual_seed(index)), index % 4


def jitter(rank: int) -> None:
    """Ranks of equal but jittery speed."""
    data = Slow()
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (x, y) in enumerate(loader):
        time.sleep(((step * 31 + rank * 17) % 11) / 1000)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def averaged_copy(rank: int) -> None:
    """An averaged copy of the weights beside the trained ones, called for evaluation."""
    net = Net()
    average = copy.deepcopy(net).requires_grad_(requires_grad=False)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(60):
        train_step(model, optimizer, rank, step)
        with torch.no_grad():
            for kept, live in zip(average.parameters(), net.parameters(), strict=True):
                kept.lerp_(live, 0.1)
            average(batch(rank, step)[0])


RUNS = (
    thousand_steps, evaluation, slow_checkpoint, slow_first_step, accumulation, dropout, unused_branch, loss_scaler, schedule,
    adapter, unfreezing, reference_model, weight_tying, variable_length, broadcast_statistics, local_statistics, hand_sharded,
    hand_reduced, noisy_loss, resumed, two_models, short_last_batch, jitter, averaged_copy,
)  # fmt: skip

if __name__ == "__main__":
    {run.__name__: run for run in RUNS}[sys.argv[1]](start())
    finish()
