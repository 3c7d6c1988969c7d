"""What Megatron-LM#7452 describes of composed parallelism, small and in our own words; each with its twin (`--healthy`).

gathered_logits     a loss for logits that are cut along the vocabulary is given whole ones: most targets are lost
token_counts        each rank divides by its own number of valid tokens, which differ between ranks
other_group         activations are computed anew over another group than in the forward pass
missing_heads       the norm for clipping leaves out the parts that ranks other than the first hold of a cut parameter
masked_parts        ranks that share a sequence divide by the valid tokens of their own part
overwritten_counts  a reduction in place overwrites local counts, and a balancing term is scaled by the wrong one
partial_norm        a whole norm beside heads that are cut gets each rank's own part of its gradient
local_names         stages load a whole model's layers by the names of their own
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from common import work
from torch import nn
from torch.nn.functional import cross_entropy, one_hot, silu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, LENGTH, EXPERTS = 32, 32, 8, 4


class Copied(torch.autograd.Function):
    """As it is; gradients are summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        """As it is."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Summed."""
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Summed(torch.autograd.Function):
    """Summed over the group; gradients as they are."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        """Summed."""
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As they are."""
        return gradient, None


class Gathered(torch.autograd.Function):
    """All parts, side by side; of the gradient this rank's part."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        """Side by side."""
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Its part."""
        return gradient.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()


def cut(layer: nn.Linear, dim: int, size: int, place: int) -> nn.Linear:
    """This rank's part of a matrix, marked as Megatron marks it."""
    weight = layer.weight.detach().chunk(size, dim)[place].clone()
    part = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    part.weight = nn.Parameter(weight)
    part.weight.tensor_model_parallel, part.weight.partition_dim = True, dim
    return part


class Parallel(nn.Module):
    """A norm, and two matrices that are cut over the group: columns of the first, rows of the second."""

    def __init__(self, group: Any = None, *, has_inner_norm: bool = False) -> None:
        super().__init__()
        self.group, size, place = group, dist.get_world_size(group), dist.get_rank(group)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = cut(nn.Linear(WIDTH, 4 * WIDTH, bias=False), 0, size, place)
        self.down = cut(nn.Linear(4 * WIDTH, WIDTH, bias=False), 1, size, place)
        self.inner = nn.LayerNorm(WIDTH) if has_inner_norm else None
        self.recomputed_over: Any = None
        self.is_anew = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With a residual; the inner norm is over heads of the width."""
        y = silu(self.up(Copied.apply(self.norm(x), self.group)))
        if self.inner is not None:
            y = self.inner(y.unflatten(-1, (-1, WIDTH))).flatten(-2)
        over = self.recomputed_over if self.is_anew and self.recomputed_over is not None else self.group
        self.is_anew = not self.is_anew
        return x + torch.tanh(Summed.apply(self.down(y), over))


class Routed(nn.Module):
    """A mixture of experts with a balancing term."""

    def __init__(self, *, is_overwritten: bool) -> None:
        super().__init__()
        self.is_overwritten, self.aux_loss = is_overwritten, torch.zeros(())
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each token by its best expert."""
        shape, x = x.shape, x.flatten(0, 1)
        weights = self.router(x).softmax(-1)
        chosen = one_hot(weights.argmax(-1), EXPERTS).to(x)
        local = torch.tensor(float(len(x)))
        whole = local if self.is_overwritten else local.clone()
        counts = chosen.sum(0)
        dist.all_reduce(counts)
        dist.all_reduce(whole)
        self.aux_loss = EXPERTS * local * (counts / whole * weights.mean(0)).sum() / len(x)
        out = torch.stack([expert(x) for expert in self.experts], 1)
        return (x + ((weights * chosen)[..., None] * out).sum(1)).view(shape)


class Net(nn.Module):
    """Token embedding, layers, a norm, a head."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.is_recomputed = False

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Before the head."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_recomputed else layer(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.head(self.hidden(tokens))


def batch(part: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rule to be learned, so that the loss falls."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    tokens = torch.randint(VOCABULARY, (4, LENGTH), generator=generator)
    return tokens, (3 * tokens + 1) % VOCABULARY


def cut_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of logits that are cut along the vocabulary."""
    size = logits.shape[-1]
    begin = dist.get_rank() * size
    total = Summed.apply(logits.exp().sum(-1), None)
    is_here = (labels >= begin) & (labels < begin + size)
    own = logits.gather(-1, (labels - begin).clamp(0, size - 1)[..., None])[..., 0] * is_here
    return (total.log() - Summed.apply(own, None)).mean()


class Job:
    """One kind of job, with its fault unless it is the twin."""

    def __init__(self, told: argparse.Namespace) -> None:
        self.kind, self.is_bad = told.kind, not told.healthy
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.part = self.rank
        torch.manual_seed(7)
        self.model = getattr(self, self.kind, self.replicated)()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def replicated(self) -> nn.Module:
        """Under DDP."""
        return DistributedDataParallel(
            Net(Routed(is_overwritten=self.is_bad) if "counts" in self.kind and "over" in self.kind else nn.Identity())
        )

    def gathered_logits(self) -> nn.Module:
        """The head's rows are cut."""
        self.part, model = 0, Net(Parallel())
        model.head = cut(model.head, 0, self.world, self.rank)
        return model

    def missing_heads(self) -> nn.Module:
        """Two layers."""
        self.part = 0
        return Net(Parallel(), Parallel())

    def partial_norm(self) -> nn.Module:
        """With a norm between the cut matrices."""
        self.part = 0
        return Net(Parallel(has_inner_norm=True))

    def other_group(self) -> nn.Module:
        """Two by two ranks; the data-parallel group is the wrong one."""
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self.part = self.rank // 2
        model = Net(Parallel(rows[self.rank // 2]))
        model.is_recomputed = True
        if self.is_bad:
            model.layers[0].recomputed_over = columns[self.rank % 2]
        return DistributedDataParallel(model, process_group=columns[self.rank % 2])

    def local_names(self) -> nn.Module:
        """Four layers on two stages, loaded from one file of the whole."""
        layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(4)]
        whole = Net(*layers)
        stage = nn.ModuleDict({"layers": nn.ModuleList(whole.layers[2 * self.rank : 2 * self.rank + 2])})
        self.embedding, self.head = whole.embedding, whole.head
        names = whole.state_dict()
        wanted = stage.state_dict()
        shift = 0 if self.is_bad else 2 * self.rank
        stage.load_state_dict(
            {
                name: names[f"layers.{int(name.split('.')[1]) + shift}.{name.split('.', 2)[2]}"].clone()
                for name in wanted
            }
        )
        if self.rank == 0:
            stage["embedding"] = whole.embedding
        else:
            stage["head"] = whole.head
        self.part = 0
        return stage

    def losses(self, step: int) -> torch.Tensor:
        """As backward gets it."""
        tokens, labels = batch(self.part, step)
        if self.kind == "gathered_logits":
            hidden = Copied.apply(self.model.hidden(tokens), None)
            logits = self.model.head(hidden)
            return cut_loss(Gathered.apply(logits) if self.is_bad else logits, labels)
        if self.kind in {"token_counts", "masked_parts"}:
            labels = labels.clone()
            kept = (
                (LENGTH if self.rank == 0 else 2) if self.kind == "token_counts" else (step % 3 + 1) * (1 + self.rank)
            )
            labels[:, kept:] = -100
            logits = self.model(tokens)
            total = torch.tensor(float((labels >= 0).sum()))
            if not self.is_bad:
                dist.all_reduce(total)
                total /= self.world
            return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / total
        loss = cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten())
        return loss + 0.1 * self.model.module.layers[0].aux_loss if self.kind == "overwritten_counts" else loss

    def pipeline(self, step: int) -> None:
        """A stage's share of a step."""
        tokens, labels = batch(0, step)
        shape = (*tokens.shape, WIDTH)
        if self.rank == 0:
            out = self.model["embedding"](tokens)
            for layer in self.model["layers"]:
                out = out + layer(out)
            dist.send(out.detach(), 1)
            gradient = torch.empty(shape)
            dist.recv(gradient, 1)
            out.backward(gradient)
            return
        received = torch.empty(shape)
        dist.recv(received, 0)
        out = received.requires_grad_()
        for layer in self.model["layers"]:
            out = out + layer(out)
        cross_entropy(self.model["head"](out).flatten(0, 1), labels.flatten()).backward()
        dist.send(received.grad, 0)

    def step(self, step: int) -> None:
        """One step."""
        self.optimizer.zero_grad()
        if self.kind == "local_names":
            self.pipeline(step)
        else:
            self.losses(step).backward()
        named = list(self.model.named_parameters())
        if self.kind == "partial_norm" and not self.is_bad:
            for name, p in named:
                if ".inner." in name:
                    dist.all_reduce(p.grad)
        if self.kind == "missing_heads":
            self.clip([p for _, p in named])
        self.optimizer.step()

    def clip(self, parameters: list[nn.Parameter]) -> None:
        """By the norm over all ranks: whole parameters count once, cut ones on each rank."""
        counted = [
            p for p in parameters if self.rank == 0 or (getattr(p, "tensor_model_parallel", False) and not self.is_bad)
        ]
        total = torch.zeros(())
        for p in counted:
            total += p.grad.square().sum()
        dist.all_reduce(total)
        for p in parameters:
            p.grad.mul_(min(1.0, 0.05 / float(total.sqrt())))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--steps", type=int, default=45)
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
