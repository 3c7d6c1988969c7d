"""Faults of composed parallelism, small and in our own words; each with its twin (`--healthy`).

collapse overflow idle_term      a mixture of experts whose router has one favourite, whose experts are too small, whose balancing term is detached
doubled_experts                  experts hold the losses of all ranks, and nobody divides (pytorch#160285), under DDP
expert_mesh                      the same under `fully_shard`, on a mesh of (data, expert) ranks
one_divisor axis_divisor         one module sums what the others average; a mean over one axis and a sum over the other (torchtitan#2318)
summed_twice                     gradients that are whole on every tensor-parallel rank are summed once more
micro_batches summed_loss        one rank has half the micro-batches; one rank sums its loss
other_world                      one rank's inputs are a thousand times the others'
drifting_norm                    tensor parallel: one rank's norm weights slip away from the others' (DeepSpeed#1801)
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from common import work
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, one_hot, silu
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, LENGTH, EXPERTS = 32, 32, 8, 4


class Block(nn.Module):
    """Two matrices and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With a residual."""
        return x + self.down(silu(self.up(self.norm(x))))


class Mixture(nn.Module):
    """Experts of this rank alone, one a token, with a capacity and a balancing term."""

    def __init__(self, capacity: int | None = None, favourite: int | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.capacity, self.aux_loss = capacity, torch.zeros(())
        if favourite is not None:
            self.router.bias.data[favourite] = 6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each token by its expert, unless that is full."""
        shape, x = x.shape, x.flatten(0, 1)
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        self.aux_loss = EXPERTS * (one_hot(chosen, EXPERTS).float().mean(0) * weights.mean(0)).sum()
        out = x + 0 * sum(p.sum() for p in self.experts.parameters())
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()[: self.capacity]
            if len(rows):
                out = out.index_add(0, rows, weights[rows, number, None] * expert(x[rows]))
        return out.view(shape)


class Travelling(nn.Module):
    """One expert a rank of a group: equal parts of the tokens travel there and back."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group, self.size = group, dist.get_world_size(group)
        torch.manual_seed(100 + dist.get_rank(group))
        self.expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """There and back."""
        sent = x.reshape(self.size, -1, WIDTH)
        got = all_to_all_single(torch.empty_like(sent), sent, group=self.group)
        back = all_to_all_single(torch.empty_like(sent), self.expert(got), group=self.group)
        return x + back.reshape(x.shape)


class Net(nn.Module):
    """Token embedding, layers, a head."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Logits."""
        x = scale * self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(part: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rule to be learned, so that the loss falls."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    tokens = torch.randint(VOCABULARY, (4, LENGTH), generator=generator)
    return tokens, (3 * tokens + 1) % VOCABULARY


def sharded(model: Net, mesh: Any, **more: Any) -> Net:
    """Layer by layer, then the rest."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more)


class Job:
    """One kind of job, with its fault unless it is the twin."""

    def __init__(self, told: argparse.Namespace) -> None:
        self.kind, self.is_bad, self.at = told.kind, not told.healthy, told.at
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.number, self.culprit, self.factor = told.number, told.culprit, told.factor
        self.part, self.rate = self.rank, told.rate
        torch.manual_seed(7)
        self.model = getattr(self, self.kind)()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate)

    def collapse(self) -> nn.Module:
        """Everything goes to one expert."""
        return DistributedDataParallel(Net(Mixture(favourite=(self.number + 2) % EXPERTS if self.is_bad else None)))

    def overflow(self) -> nn.Module:
        """A few tokens an expert, of thirty-two."""
        return DistributedDataParallel(Net(Mixture(capacity=2 + (self.number + 1) % 3 if self.is_bad else None)))

    def idle_term(self) -> nn.Module:
        """The term is added without its graph."""
        return DistributedDataParallel(Net(Mixture()))

    def doubled_experts(self) -> nn.Module:
        """DDP leaves the experts alone; the twin divides their gradients by hand."""
        model = Net(Travelling())
        names = [name for name, _ in model.named_parameters() if ".expert." in name]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        return DistributedDataParallel(model)

    def expert_mesh(self) -> nn.Module:
        """Experts are cut along one axis and reduced along the other; everything else is reduced along both."""
        mesh = init_device_mesh("cpu", (self.world // 2, 2), mesh_dim_names=("data", "expert"))
        whole = init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",))
        model = Net(Travelling(mesh["expert"].get_group()), Block())
        experts = fully_shard(model.layers[0].expert, mesh=mesh["data"])
        if not self.is_bad:
            experts.set_force_sum_reduction_for_comms(enable=True)
            experts.set_gradient_divide_factor(float(self.world))
        fully_shard(model.layers[1], mesh=whole)
        return fully_shard(model, mesh=whole)

    def one_divisor(self) -> nn.Module:
        """One layer's gradients are not divided."""
        model = sharded(Net(Block(), Block()), init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",)))
        if self.is_bad:
            layer = model.layers[(self.number + 1) % 2]
            layer.set_force_sum_reduction_for_comms(enable=True)
            layer.set_gradient_divide_factor(1.0)
        return model

    def axis_divisor(self) -> nn.Module:
        """Divided by the ranks of one axis of two."""
        names = ("replicate", "shard")
        model = sharded(Net(Block()), init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=names))
        for part in (model, *model.layers) if self.is_bad else ():
            part.set_force_sum_reduction_for_comms(enable=True)
            part.set_gradient_divide_factor(float(self.world // 2))
        return model

    def summed_twice(self) -> nn.Module:
        """Every rank computes the whole gradient of the norms; the script sums them all the same."""
        self.part, model = 0, Net(Block(), Block())
        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("tp",))
        for layer in model.layers:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    def drifting_norm(self) -> nn.Module:
        """Rounding on one rank, as another kernel there would make it."""
        return self.summed_twice()

    def micro_batches(self) -> nn.Module:
        """Weights stay gathered between micro-batches, so that nothing waits for the rank with fewer."""
        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",))
        return sharded(Net(Block()), mesh, reshard_after_forward=False)

    def summed_loss(self) -> nn.Module:
        """Thirty-two tokens are summed on one rank."""
        self.rate /= 25
        return sharded(Net(Block()), init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",)))

    def other_world(self) -> nn.Module:
        """Inputs of one rank are off."""
        self.rate = 1e-6
        return sharded(Net(Block()), init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",)))

    def losses(self, step: int) -> Iterator[torch.Tensor]:
        """Of each micro-batch, as backward gets it."""
        is_here = self.is_bad and self.rank == self.culprit
        count = 4 if self.kind == "micro_batches" else 1
        count = 1 + (self.number + 1) % 3 if self.kind == "micro_batches" and is_here else count
        for place in range(count):
            if self.kind == "micro_batches":
                self.model.set_requires_gradient_sync(place == count - 1)
                self.model.set_reshard_after_backward(place == count - 1)
            tokens, labels = batch(10 * self.part + place, step)
            logits = self.model(
                tokens, (self.factor or 1000.0) * (1 + step % 3) if self.kind == "other_world" and is_here else 1.0
            )
            reduction = "sum" if self.kind == "summed_loss" and is_here else "mean"
            yield cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction) / count + self.term()

    def term(self) -> Any:
        """The balancing term."""
        if self.kind not in {"collapse", "overflow", "idle_term"}:
            return 0.0
        term = self.model.module.layers[0].aux_loss
        return ((self.factor if self.kind == "idle_term" else 0) or 0.1) * (
            term.detach() if self.kind == "idle_term" and self.is_bad else term
        )

    def step(self, step: int) -> None:
        """One step."""
        self.optimizer.zero_grad()
        for loss in self.losses(step):
            loss.backward()
        if self.kind == "doubled_experts" and not self.is_bad:
            for name, p in self.model.module.named_parameters():
                if ".expert." in name:
                    p.grad /= self.world
        norms = [p for name, p in self.model.named_parameters() if "norm" in name]
        for p in norms if self.kind == "summed_twice" and self.is_bad else ():
            dist.all_reduce(p.grad)
        self.optimizer.step()
        if self.kind == "drifting_norm" and self.is_bad and self.rank == self.culprit and step == self.at:
            with torch.no_grad():
                norms[0].mul_(1 + 2**-10)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--at", type=int, default=12)
    parser.add_argument("--culprit", type=int, default=1)
    parser.add_argument("--number", type=int, default=0, help="which expert, layer or count")
    parser.add_argument("--factor", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=0.05)
    told = parser.parse_args()
    dist.init_process_group("gloo")
    job = Job(told)
    for step in range(told.steps):
        job.step(step)
        work(0.02)
    dist.barrier()
    del job
    dist.destroy_process_group()


main()
