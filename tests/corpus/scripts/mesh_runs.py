"""Sharded jobs as PyTorch's own recipes write them, on two or four gloo ranks; with a fault if one is named.

fsdp2 hsdp tp sequence tp_fsdp2 tp_hand loss_parallel pipeline experts checkpointing fsdp1 hybrid1
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from common import work
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, LENGTH = 32, 32, 8
KINDS = (
    "fsdp2", "fsdp2_frozen", "hsdp", "tp", "sequence", "loss_parallel", "tp_fsdp2", "sequence_fsdp2", "pipeline", "pipeline_1f1b",
    "experts", "ignoring", "checkpointing", "fsdp1", "hybrid1",
)  # fmt: skip
CLIPPED = ("fsdp2", "hsdp", "sequence", "sequence_fsdp2", "checkpointing")
"""All their parameters are DTensors of one mesh, as torch's clipping wants it."""


class Block(nn.Module):
    """Attention is left out: two matrices and a norm are what the recipes are about."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With a residual."""
        y = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    """Token embedding, blocks, a norm, a head."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("positions", torch.randn(LENGTH, WIDTH) / 10)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(part: int, step: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of one data-parallel part; a rule to be learned, so that the loss falls."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    tokens = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)
    return tokens, (3 * tokens + 1) % VOCABULARY


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--fault", default="")
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--at", type=int, default=12)
    parser.add_argument("--culprit", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.02)
    told = parser.parse_args()
    told.fault = "" if told.healthy else told.fault
    return told


def shard(model: nn.Module, mesh: DeviceMesh, **more: Any) -> nn.Module:
    """Block by block, then the rest: the FSDP2 recipe."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, is_sequence: bool, is_loss: bool = False) -> nn.Module:
    """The plan of the tensor-parallel tutorial, with or without sequence parallelism."""
    split = Shard(1)
    if is_sequence:
        plan: dict[str, Any] = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=split, output_layouts=Shard(-1) if is_loss else Replicate(), use_local_output=not is_loss
            ),
        }
        for part in model.blocks:
            parallelize_module(
                part,
                mesh,
                {
                    "norm": SequenceParallel(),
                    "gate": ColwiseParallel(input_layouts=split),
                    "up": ColwiseParallel(input_layouts=split),
                    "down": RowwiseParallel(output_layouts=split),
                },
            )
            parallelize_module(
                part,
                mesh,
                PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(split,), use_local_output=True),
            )
        parallelize_module(
            model.blocks[0],
            mesh,
            PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(split,), use_local_output=True),
        )
    else:
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1) if is_loss else Replicate(), use_local_output=not is_loss),
        }
        for part in model.blocks:
            parallelize_module(
                part, mesh, {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            )
    return parallelize_module(model, mesh, plan)


class Experts(nn.Module):
    """Each rank has an expert of its own; tokens travel to the expert that the router chose."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, dist.get_world_size(), bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        torch.manual_seed(100 + rank)
        self.expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Equal parts go to each rank; the weights of the router scale what comes back."""
        x = self.embedding(tokens).flatten(0, 1)
        weights = self.router(x).softmax(-1)
        sent = x.reshape(dist.get_world_size(), -1, WIDTH)
        got = all_to_all_single(torch.empty_like(sent), sent)
        back = all_to_all_single(torch.empty_like(sent), self.expert(got))
        chosen = torch.arange(dist.get_world_size()).repeat_interleave(sent.shape[1])
        x = x + back.reshape(x.shape) * weights.gather(1, chosen[:, None])
        return self.head(x).unflatten(0, tokens.shape)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, to be changed in place."""
    return tensor.to_local().detach() if hasattr(tensor, "to_local") else tensor.detach()


def flip(tensor: torch.Tensor) -> None:
    """One bit of one element, as a failing memory module would do it."""
    local(tensor).reshape(-1)[5:6].view(torch.int32)[0] ^= 1 << 12


class Faults:
    """What is done to a job, by the name of the fault."""

    def __init__(self, job: "Job") -> None:
        self.job, self.name = job, job.told.fault
        self.is_here = job.rank == job.told.culprit
        self.parameters = dict(job.model.named_parameters())

    def built(self) -> None:
        """The model and the optimizer are there."""
        job = self.job
        if self.name == "other_rate" and self.is_here:
            job.optimizer.param_groups[0]["lr"] *= 1.5
        elif self.name == "other_decay" and self.is_here:
            job.optimizer.param_groups[0]["weight_decay"] = 0.1
        elif self.name == "other_buffer" and self.is_here:
            with torch.no_grad():
                job.model.positions += 0.01 * torch.randn(LENGTH, WIDTH)
        elif self.name == "frozen_garbage" and self.is_here:
            local(self.parameters["blocks.0.up.weight"]).fill_(3e19)
        elif self.name == "frozen_zeros" and self.is_here:
            local(self.parameters["blocks.0.up.weight"]).zero_()
        elif self.name == "nan_forward" and self.is_here:
            layer = next(part for name, part in job.model.named_modules() if name.endswith("up"))
            layer.register_forward_hook(
                lambda _module, _inputs, out: out * (torch.nan if job.number == job.told.at else 1)
            )
        elif self.name == "never_reduced":
            lose_reductions(lambda: True)
        elif self.name == "lost_once":
            lose_reductions(lambda: self.job.number == self.job.told.at)

    def begins(self, step: int) -> None:
        """A step begins."""
        if step != self.job.told.at or not self.is_here:
            return
        if self.name == "flip_moment":
            flip(self.job.optimizer.state[self.parameters["blocks.0.up.weight"]]["exp_avg"])
        elif self.name.startswith("flip"):
            flip(self.parameters[self.name.partition(":")[2] or "blocks.0.up.weight"])
        elif self.name == "late_rate":
            self.job.optimizer.param_groups[0]["lr"] *= 0.5
        elif self.name == "stray_write":
            local(self.parameters["head.weight"]).mul_(1.01)

    def reduced(self, step: int) -> None:
        """Gradients are there."""
        gradients = [p.grad for p in self.job.model.parameters() if p.grad is not None]
        if self.name == "local_clip":
            total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(local(g)) for g in gradients]))
            for gradient in gradients:
                local(gradient).mul_(min(1.0, 0.05 / float(total)))
        elif self.name == "uneven_clip" and self.is_here:
            for gradient in gradients:
                local(gradient).mul_(0.5)
        elif self.name == "scaled_gradient" and self.is_here and step == self.job.told.at:
            local(gradients[0]).mul_(3.0)

    def batch_part(self, part: int, step: int) -> int:
        """Whose batch this rank is fed."""
        if self.name == "other_inputs" and self.is_here:
            return part + 17
        return part + 17 if self.name == "other_inputs_once" and self.is_here and step == self.job.told.at else part


def lose_reductions(is_lost: Any) -> None:
    """The all-reduce over the replicate axis does not happen while this says so."""

    class Lossy:
        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
            return None if is_lost() else dist.all_reduce(*args, **kwargs)

    collectives.dist = Lossy()


class Job:
    """One kind of job: model, optimizer and a step."""

    number = 0

    def __init__(self, told: argparse.Namespace) -> None:
        self.told, self.rank, self.world = told, dist.get_rank(), dist.get_world_size()
        self.part = self.rank
        self.loss_scope: Any = None
        apart = told.fault == "seed_per_replica" and self.rank >= self.world // 2
        torch.manual_seed(8 if apart or (told.fault == "seed_per_rank" and self.rank == told.culprit) else 7)
        self.model = self.build()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=3e-3)

    def net(self) -> Net:
        """The model, before it is sharded: with what the case freezes."""
        model, fault = Net(), self.told.fault
        if "frozen" in self.told.kind or fault.endswith("_frozen") or fault.startswith("frozen"):
            frozen = (
                model.blocks[0].gate
                if fault == "frozen_sets" and self.rank == self.told.culprit
                else model.blocks[0].up
            )
            frozen.requires_grad_(requires_grad=False)
        return model

    def build(self) -> nn.Module:
        """The model, sharded."""
        kind = self.told.kind.removesuffix("_frozen")
        make = {
            "fsdp2": self.fully_sharded,
            "checkpointing": self.fully_sharded,
            "hsdp": self.hybrid,
            "ignoring": self.ignoring,
            "experts": self.local_experts,
            "fsdp1": self.flat,
            "hybrid1": self.flat,
            "tp_fsdp2": self.two_axes,
            "sequence_fsdp2": self.two_axes,
        }
        return make.get(kind, self.tensor_parallel)()

    def fully_sharded(self) -> nn.Module:
        """FSDP2, perhaps with activation checkpointing."""
        model = self.net()
        if self.told.kind == "checkpointing":
            model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",))
        return shard(model, mesh)

    def hybrid(self) -> nn.Module:
        """HSDP."""
        return shard(self.net(), init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("replicate", "shard")))

    def ignoring(self) -> nn.Module:
        """FSDP2 that leaves the head alone; the healthy twin reduces it by itself."""
        model, mesh = self.net(), init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params={model.head.weight})
        if self.told.healthy:
            model.head.weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        return model

    def local_experts(self) -> nn.Module:
        """DDP that was told to ignore the experts."""
        part = Experts(self.rank)
        names = [name for name, _ in part.named_parameters() if name.startswith("expert.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(part, names)
        return DistributedDataParallel(part)

    def flat(self) -> nn.Module:
        """FSDP's first kind."""
        how: dict[str, Any] = {"sharding_strategy": ShardingStrategy.FULL_SHARD}
        if self.told.kind == "hybrid1":
            mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("replicate", "shard"))
            how = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        return FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True, **how)

    def two_axes(self) -> nn.Module:
        """Tensor parallel below FSDP2."""
        mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("dp", "tp"))
        self.part = mesh["dp"].get_local_rank()
        is_sequence = self.told.kind == "sequence_fsdp2"
        return shard(tensor_parallel(Net(), mesh["tp"], is_sequence=is_sequence), mesh["dp"])

    def tensor_parallel(self) -> nn.Module:
        """One axis: with sequence parallelism, with a parallel loss, or plain."""
        kind, self.part = self.told.kind, 0
        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("tp",))
        self.loss_scope = loss_parallel if kind == "loss_parallel" else None
        return tensor_parallel(Net(), mesh, is_sequence=kind == "sequence", is_loss=kind == "loss_parallel")

    def step(self, step: int) -> None:
        """One step."""
        tokens, labels = batch(self.faults.batch_part(self.part, step), step)
        self.optimizer.zero_grad()
        if self.loss_scope:
            with self.loss_scope():
                cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten()).backward()
        else:
            cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten()).backward()
        self.faults.reduced(step)
        if self.told.kind in CLIPPED and not self.told.fault.endswith("clip"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()


class PipelineJob(Job):
    """Two stages or more, by a schedule of torch's."""

    def build(self) -> nn.Module:
        """This rank's stage."""
        whole, stages = Net(num_blocks=4), []
        per = 4 // self.world
        for place in range(self.world):
            parts: list[nn.Module] = list(whole.blocks[place * per : (place + 1) * per])
            stages.append(
                nn.Sequential(
                    *([whole.embedding] if place == 0 else []),
                    *parts,
                    *([whole.norm, whole.head] if place == self.world - 1 else []),
                )
            )
        own = stages[self.rank]
        kind = Schedule1F1B if self.told.kind == "pipeline_1f1b" else ScheduleGPipe
        stage = PipelineStage(own, self.rank, self.world, torch.device("cpu"))
        self.schedule = kind(
            stage, n_microbatches=4, loss_fn=lambda out, labels: cross_entropy(out.flatten(0, 1), labels.flatten())
        )
        return own

    def step(self, step: int) -> None:
        """One step."""
        tokens, labels = batch(0, step, size=8)
        self.optimizer.zero_grad()
        if self.rank == 0:
            self.schedule.step(tokens)
        elif self.rank == self.world - 1:
            self.schedule.step(target=labels, losses=[])
        else:
            self.schedule.step()
        self.optimizer.step()


def main() -> None:
    """Train."""
    told = parse()
    dist.init_process_group("gloo")
    job = (PipelineJob if told.kind.startswith("pipeline") else Job)(told)
    job.faults = Faults(job)
    job.faults.built()
    for step in range(told.steps):
        job.number = step
        job.faults.begins(step)
        job.step(step)
        work(told.pause)
    dist.barrier()
    del job
    dist.destroy_process_group()


main()
