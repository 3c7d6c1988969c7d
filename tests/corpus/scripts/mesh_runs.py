"""Sharded jobs as PyTorch's own recipes write them, on two or four gloo ranks; with a fault if one is named.

fsdp2 hsdp tp sequence tp_fsdp2 loss_parallel pipeline by_hand experts checkpointing fsdp1 hybrid1
"""

import argparse
import contextlib
from typing import Any

import torch
import torch.distributed as dist
from common import work
from mesh_faults import Faults
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
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
    "fsdp2", "fsdp2_frozen", "hsdp", "hsdp_frozen", "tp", "sequence", "loss_parallel", "tp_fsdp2", "sequence_fsdp2", "pipeline", "pipeline_1f1b",
    "experts", "ignoring", "checkpointing", "fsdp1", "hybrid1", "by_hand",
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


OPTIMIZERS = {
    "adamw": lambda held: torch.optim.AdamW(held, lr=3e-3),
    "each": lambda held: torch.optim.AdamW(held, lr=3e-3, foreach=False),
    "adam": lambda held: torch.optim.Adam(held, lr=2e-3),
    "sgd": lambda held: torch.optim.SGD(held, lr=0.1, momentum=0.9),
}


def parse(kinds: tuple[str, ...] = KINDS) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--fault", default="")
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--at", type=int, default=12)
    parser.add_argument("--culprit", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--factor", type=float, default=0.0, help="how much")
    parser.add_argument("--pick", type=int, default=-1, help="which tensor, by a number")
    parser.add_argument("--bit", type=int, default=12)
    parser.add_argument("--module", default="blocks.0.up")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--save", choices=("", "sync", "async"), default="", help="a checkpoint every ten steps")
    parser.add_argument("--loads", action="store_true", help="each rank begins with a file of its own")
    parser.add_argument("--low", action="store_true", help="compute in bfloat16, where FSDP2 casts")
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
        self.optimizer = self.optimize([p for p in self.model.parameters() if p.requires_grad])
        self.saving: Any = None
        self.saved_by = dist.new_group(backend="gloo") if told.save else None

    def optimize(self, held: list[nn.Parameter]) -> Any:
        """The optimizer that was asked for."""
        return OPTIMIZERS[self.told.optimizer](held)

    def net(self) -> Net:
        """The model, before it is sharded: with what the case freezes."""
        model, fault = Net(self.told.blocks), self.told.fault
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
        return shard(model, mesh, **self.policy())

    def policy(self) -> dict[str, Any]:
        """Of precision."""
        return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)} if self.told.low else {}  # fmt: skip

    def hybrid(self) -> nn.Module:
        """HSDP."""
        mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("replicate", "shard"))
        return shard(self.net(), mesh, **self.policy())

    def ignoring(self) -> nn.Module:
        """FSDP2 that leaves the head alone; the healthy twin reduces it by itself."""
        model, mesh = self.net(), init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params={model.head.weight})
        if self.told.fault != "nobody_reduces":
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
        return FullyShardedDataParallel(self.net(), device_id=torch.device("cpu"), use_orig_params=True, **how)

    def two_axes(self) -> nn.Module:
        """Tensor parallel below FSDP2."""
        mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("dp", "tp"))
        self.part = mesh["dp"].get_local_rank()
        is_sequence = self.told.kind == "sequence_fsdp2"
        return shard(tensor_parallel(self.net(), mesh["tp"], is_sequence=is_sequence), mesh["dp"])

    def tensor_parallel(self) -> nn.Module:
        """One axis: with sequence parallelism, with a parallel loss, or plain."""
        kind, self.part = self.told.kind, 0
        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("tp",))
        self.loss_scope = loss_parallel if kind == "loss_parallel" else None
        return tensor_parallel(self.net(), mesh, is_sequence=kind == "sequence", is_loss=kind == "loss_parallel")

    def backward(self, step: int) -> None:
        """One micro-batch or more."""
        for place in range(self.told.accumulate):
            tokens, labels = batch(self.faults.batch_part(self.part, step), step + 5000 * place)
            with self.loss_scope() if self.loss_scope else contextlib.nullcontext():
                loss = cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten())
                (loss / self.told.accumulate).backward()

    def step(self, step: int) -> None:
        """One step."""
        self.optimizer.zero_grad()
        self.backward(step)
        self.faults.reduced(step)
        if self.told.kind in CLIPPED and not self.told.fault.endswith("clip"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        if not self.faults.leaves_out_its_step(step):
            self.optimizer.step()

    def save(self, step: int) -> None:
        """By torch.distributed.checkpoint, every ten steps."""
        if not self.told.save or step % 10 != 9:
            return
        state = {"model": get_model_state_dict(self.model), "step": step}
        if self.saving is not None:
            self.saving.result()
        if self.told.save == "async":
            self.saving = dcp.async_save(state, checkpoint_id=f"checkpoint-{step}", process_group=self.saved_by)
        else:
            dcp.save(state, checkpoint_id=f"checkpoint-{step}", process_group=self.saved_by)


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

    def backward(self, step: int) -> None:
        """Of all micro-batches."""
        tokens, labels = batch(0, step, size=8)
        if self.rank == 0:
            self.schedule.step(tokens)
        elif self.rank == self.world - 1:
            self.schedule.step(target=labels, losses=[])
        else:
            self.schedule.step()


class HandSplitJob(Job):
    """Two stages that send and receive by themselves."""

    def build(self) -> nn.Module:
        """This rank's stage."""
        whole = Net(num_blocks=2)
        first = nn.Sequential(whole.embedding, whole.blocks[0])
        return first if self.rank == 0 else nn.Sequential(whole.blocks[1], whole.norm, whole.head)

    def backward(self, step: int) -> None:
        """There and back."""
        tokens, labels = batch(0, step)
        if self.rank == 0:
            out = self.model(tokens)
            dist.send(out.detach(), 1)
            gradient = torch.empty_like(out)
            dist.recv(gradient, 1)
            out.backward(gradient)
            return
        received = torch.empty(*tokens.shape, WIDTH)
        dist.recv(received, 0)
        received.requires_grad_()
        cross_entropy(self.model(received).flatten(0, 1), labels.flatten()).backward()
        dist.send(received.grad, 0)


def train(kind: type[Job], told: argparse.Namespace) -> None:
    """A job of this kind, to its end."""
    job = kind(told)
    job.faults = Faults(job)
    job.faults.built()
    for step in range(told.steps):
        job.number = step
        job.faults.begins(step)
        job.step(step)
        job.save(step)
        work(told.pause)
    if job.saving is not None:
        job.saving.result()
    dist.barrier()
    del job
    dist.destroy_process_group()


def main() -> None:
    """Train."""
    told = parse()
    dist.init_process_group("cpu:gloo" if told.save == "async" else "gloo")
    kinds = {"pipeline": PipelineJob, "pipeline_1f1b": PipelineJob, "by_hand": HandSplitJob}
    train(kinds.get(told.kind, Job), told)


if __name__ == "__main__":
    main()
