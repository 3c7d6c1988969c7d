"""One small training in every framework, which writes down what each rank holds, can be faulted at a step, and can be resumed.

    <out>/<rank>-<step>.pt     every tensor that the rank holds before the step: weights, buffers, what the optimizer remembers
    <out>/<rank>-loaded.pt     the same, right after it has loaded a checkpoint
    <out>/<rank>-end.pt        the same at the end, with the loss of every step

What is held is taken from where the framework keeps it, local parts as they lie in memory, and never by a function that saves.
"""

# ruff: noqa: PLC0415 - a job imports the one framework that it is of
import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import holter
import holter.testing

SIZE, WIDTH, ROWS = 8, 16, 4
APART = 2
"""So many steps after a rank has left out a round, a NaN comes."""
FAULTS = {"sleep": holter.testing.sleep_for_ever, "kill": holter.testing.kill, "suspend": holter.testing.suspend}

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--kind", required=True)
parser.add_argument("--steps", type=int, default=14)
parser.add_argument("--fault", choices=["", "nan", "apart", *FAULTS], default="")
parser.add_argument("--rank", type=int, default=1, help="that has the fault")
parser.add_argument("--at", type=int, default=6, help="completed steps when it happens")
parser.add_argument("--big", type=float, default=0.0, help="what one element is set to")
parser.add_argument("--big-at", type=int, default=5, help="completed steps when it is")
parser.add_argument("--big-in", choices=["weight", "moment", "frozen", "buffer"], default="weight")
parser.add_argument("--pause", type=float, default=0.05)
parser.add_argument("--resume", type=Path, default=None)
told = parser.parse_args()


class Net(nn.Module):
    """A few layers, one of them frozen, and a buffer that each rank fills by itself."""

    def __init__(self, *, has_dropout: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(requires_grad=False)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, SIZE)
        self.drop = nn.Dropout(0.1 if has_dropout else 0.0)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """From inputs to as many outputs."""
        hidden = torch.tanh(self.first(inputs))
        if self.training:
            self.mean.lerp_(hidden.detach().mean(0), 0.1)
        return self.last(self.drop(torch.relu(self.second(self.frozen(hidden)))))


def local(value: torch.Tensor) -> torch.Tensor:
    """What of it lies on this rank."""
    return (value.to_local() if hasattr(value, "to_local") else value).detach()


class Loop:
    """A loop of its own, over whatever `wrap` makes of the model."""

    has_dropout = True

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(7)
        self.net: nn.Module = self.build()
        self.model = self.wrap(self.net)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer: Any = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
        torch.manual_seed(100 + self.rank)

    def build(self) -> nn.Module:
        """The bare model."""
        return Net(has_dropout=self.has_dropout)

    def wrap(self, net: nn.Module) -> nn.Module:
        """As the framework has it."""
        return net

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers as they lie here."""
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the optimizer remembers."""
        for number, state in enumerate(self.optimizer.state.values()):
            yield from ((f"{number}.{key}", value) for key, value in state.items() if isinstance(value, torch.Tensor))

    def held(self) -> dict[str, torch.Tensor]:
        """All of it, copied."""
        found = {f"model {name}": local(value).clone() for name, value in self.tensors()}
        return found | {f"optimizer {name}": local(value).clone() for name, value in self.moments()}

    def load(self, path: Path) -> int:
        """Go on from a checkpoint; returns completed steps."""
        weights, optim = get_state_dict(self.model, self.optimizer)
        state = {"model": weights, "optim": optim, "step": 0}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        assert holter.restore(path, self.model) == state["step"]
        return state["step"]

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        """Forward."""
        return (self.model(inputs) - inputs.sin()).square().mean()

    def step(self, inputs: torch.Tensor) -> float:
        """One step; returns its loss."""
        self.optimizer.zero_grad()
        loss = self.loss(inputs)
        loss.backward()
        if not is_apart():
            self.optimizer.step()
        return loss.item()

    def inputs(self, step: int) -> torch.Tensor:
        """Of this rank."""
        return torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(1000 * step + self.rank))

    def end(self) -> None:
        """Let go of the group."""
        dist.barrier()
        self.net = self.model = nn.Module()
        dist.destroy_process_group()


class Ddp(Loop):
    """Replicas."""

    def wrap(self, net: nn.Module) -> nn.Module:
        """DDP."""
        return DistributedDataParallel(net)


class Fsdp1(Loop):
    """Flat shards."""

    def wrap(self, net: nn.Module) -> nn.Module:
        """FullyShardedDataParallel, a layer in a unit of its own."""
        from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

        net.second = Fsdp(net.second, use_orig_params=True, device_id=torch.device("cpu"))
        return Fsdp(net, use_orig_params=True, device_id=torch.device("cpu"))


class Fsdp2(Loop):
    """DTensors."""

    def mesh(self) -> Any:
        """All ranks."""
        return init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("dp",))

    def wrap(self, net: nn.Module) -> nn.Module:
        """By fully_shard, a layer in a unit of its own."""
        from torch.distributed.fsdp import fully_shard

        mesh = self.mesh()
        fully_shard(net.second, mesh=mesh)
        return fully_shard(net, mesh=mesh)


class Hsdp(Fsdp2):
    """Shards, each on two ranks."""

    def mesh(self) -> Any:
        """Replicas of shards."""
        return init_device_mesh("cpu", (2, self.world_size // 2), mesh_dim_names=("replicate", "shard"))


class Tp(Loop):
    """Tensor parallel: all ranks see the same batch."""

    has_dropout = False
    data = 1

    def wrap(self, net: nn.Module) -> nn.Module:
        """Columns, then rows."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        names = ("dp", "tp") if self.data > 1 else ("tp",)
        shape = (self.data, self.world_size // self.data) if self.data > 1 else (self.world_size,)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        plan = {"second": ColwiseParallel(), "last": RowwiseParallel()}
        return parallelize_module(net, self.mesh["tp"], plan)

    def inputs(self, step: int) -> torch.Tensor:
        """Of the data-parallel group."""
        group = self.mesh.get_local_rank("dp") if self.data > 1 else 0
        return torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(1000 * step + group))


class TpFsdp2(Tp):
    """Both, on four ranks."""

    data = 2

    def wrap(self, net: nn.Module) -> nn.Module:
        """Shards of columns and rows."""
        from torch.distributed.fsdp import fully_shard

        return fully_shard(super().wrap(net), mesh=self.mesh["dp"])


class ByRank(Loop):
    """Ranks hold different things by the same names: each loads below its own."""

    has_dropout = False

    def load(self, path: Path) -> int:
        """By its own name."""
        weights, optim = get_state_dict(self.model, self.optimizer)
        state = {"model": weights, "optim": optim, "step": 0}
        dcp.load({f"rank_{self.rank}": state}, checkpoint_id=path, no_dist=True)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        return holter.restore(path, self.model)


class Split(ByRank):
    """A model that is split by hand: activations and their gradients go from rank to rank."""

    def build(self) -> nn.Module:
        """A part of its own."""
        torch.manual_seed(self.rank)
        return nn.Sequential(nn.Linear(SIZE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, SIZE))

    def step(self, inputs: torch.Tensor) -> float:
        """Send forward, send back."""
        self.optimizer.zero_grad()
        got = inputs.clone()
        if self.rank:
            dist.recv(got, self.rank - 1)
        got.requires_grad_()
        out = self.model(got)
        if self.rank < self.world_size - 1:
            dist.send(out.detach(), self.rank + 1)
            gradient = torch.empty_like(out)
            dist.recv(gradient, self.rank + 1)
            out.backward(gradient)
            loss = out.detach().square().mean()
        else:
            loss = (out - inputs.sin()).square().mean()
            loss.backward()
        if self.rank:
            dist.send(got.grad, self.rank - 1)
        self.optimizer.step()
        return loss.item()


class Experts(ByRank):
    """DDP with experts of each rank's own, which it was told to ignore."""

    def build(self) -> nn.Module:
        """The same, but for one layer."""
        net = Net(has_dropout=False)
        torch.manual_seed(100 + self.rank)
        net.second = nn.Linear(WIDTH, WIDTH)
        return net

    def wrap(self, net: nn.Module) -> nn.Module:
        """DDP."""
        own = [name for name, _ in net.named_parameters() if name.startswith("second")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, own)
        return DistributedDataParallel(net)


class Pipeline(ByRank):
    """A pipeline of torch's own, a stage a rank."""

    def build(self) -> nn.Module:
        """A stage."""
        torch.manual_seed(self.rank)
        return nn.Sequential(nn.Linear(SIZE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, SIZE))

    def wrap(self, net: nn.Module) -> nn.Module:
        """1F1B over two micro-batches."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        stage = PipelineStage(net, self.rank, self.world_size, torch.device("cpu"))
        kind = ScheduleGPipe if told.kind == "pipeline_gpipe" else Schedule1F1B
        self.schedule = kind(stage, max(2, self.world_size), lambda out, target: (out - target).square().mean())
        return net

    def inputs(self, step: int) -> torch.Tensor:
        """The same for all, enough for the micro-batches."""
        return torch.randn(2 * self.world_size, SIZE, generator=torch.Generator().manual_seed(1000 * step))

    def step(self, inputs: torch.Tensor) -> float:
        """All micro-batches."""
        self.optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        args = (inputs,) if self.rank == 0 else ()
        last = {"target": inputs.sin(), "losses": losses} if self.rank == self.world_size - 1 else {}
        self.schedule.step(*args, **last)
        self.optimizer.step()
        return torch.stack(losses).mean().item() if losses else 0.0


class Zero(Loop):
    """DeepSpeed's own engine."""

    def __init__(self, stage: int) -> None:
        import deepspeed
        import deepspeed.ops

        # Compiled at first use for a minute, and used by inference alone.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(7)
        self.net = Net()
        trained = [p for p in self.net.parameters() if p.requires_grad]
        config = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": stage}}
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.engine = deepspeed.initialize(model=self.net, optimizer=optimizer, config=config)[0]
        self.model, self.optimizer = self.engine, self.engine.optimizer
        torch.manual_seed(100 + self.rank)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, this rank's part of those that are partitioned, and master weights."""
        for name, value in (*self.net.named_parameters(), *self.net.named_buffers()):
            yield name, getattr(value, "ds_tensor", value)
        zero = self.optimizer
        flat = getattr(zero, "fp32_partitioned_groups_flat", None) or getattr(
            zero, "single_partition_of_fp32_groups", ()
        )
        yield from ((f"master {number}", part) for number, part in enumerate(flat))

    def moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of the optimizer inside."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        for number, state in enumerate(inner.state.values()):
            yield from ((f"{number}.{key}", value) for key, value in state.items() if isinstance(value, torch.Tensor))

    def load(self, path: Path) -> int:
        """By DeepSpeed's own function."""
        self.engine.load_checkpoint(str(path))
        return holter.restore(path, self.net)

    def step(self, inputs: torch.Tensor) -> float:
        """One step."""
        loss = (self.engine(inputs) - inputs.sin()).square().mean()
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()


class Accelerated(Loop):
    """DDP, by accelerate."""

    def __init__(self) -> None:
        from accelerate import Accelerator

        self.setup(Accelerator())

    def setup(self, accelerator: Any) -> None:
        """Prepare."""
        self.accelerator = accelerator
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(7)
        self.net = Net()
        optimizer = torch.optim.AdamW([p for p in self.net.parameters() if p.requires_grad], lr=1e-2)
        self.model, self.optimizer = accelerator.prepare(self.net, optimizer)
        torch.manual_seed(100 + self.rank)

    def moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of the optimizer inside."""
        inner = self.optimizer.optimizer
        for number, state in enumerate(inner.state.values()):
            yield from ((f"{number}.{key}", value) for key, value in state.items() if isinstance(value, torch.Tensor))

    def load(self, path: Path) -> int:
        """By accelerate's own function."""
        self.accelerator.load_state(str(path))
        return int(path.parent.name.partition("-")[0])

    def step(self, inputs: torch.Tensor) -> float:
        """One step."""
        loss = self.loss(inputs)
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class AcceleratedZero(Accelerated):
    """DeepSpeed, by accelerate."""

    def __init__(self, stage: int) -> None:
        import deepspeed.ops
        from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=1)
        handlers = [InitProcessGroupKwargs(backend="gloo")]
        accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=handlers)
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = ROWS
        self.setup(accelerator)

    tensors, moments = Zero.tensors, Zero.moments

    def setup(self, accelerator: Any) -> None:
        """The engine has the optimizer."""
        super().setup(accelerator)
        self.optimizer_wrapper, self.optimizer = self.optimizer, self.model.optimizer

    def step(self, inputs: torch.Tensor) -> float:
        """The engine steps in accelerate's backward pass."""
        loss = self.loss(inputs)
        self.accelerator.backward(loss)
        self.optimizer_wrapper.step()
        self.optimizer_wrapper.zero_grad()
        return loss.item()


LOOPS: dict[str, Any] = {
    "ddp": Ddp,
    "accelerate": Accelerated,
    "fsdp1": Fsdp1,
    "fsdp2": Fsdp2,
    "hsdp": Hsdp,
    "tp": Tp,
    "tp_fsdp2": TpFsdp2,
    "pipeline": Pipeline,
    "pipeline_gpipe": Pipeline,
    "split": Split,
    "experts": Experts,
    **{f"zero{stage}": lambda stage=stage: Zero(stage) for stage in (1, 2, 3)},
    **{f"accelerate_zero{stage}": lambda stage=stage: AcceleratedZero(stage) for stage in (1, 2, 3)},
}
now = 0


def is_apart() -> bool:
    """Whether this rank leaves out a round."""
    return told.fault == "apart" and job.rank == told.rank and now == told.at - APART


def enlarge(job: Loop) -> None:
    """One element, as it lies on this rank."""
    wanted = {
        "weight": lambda name: ("second" in name or name.startswith("2.")) and "weight" in name,
        "frozen": lambda name: "frozen" in name and "weight" in name,
        "buffer": lambda name: "mean" in name,
        "moment": lambda name: "exp_avg_sq" in name,
    }[told.big_in]
    found = job.moments() if told.big_in == "moment" else job.tensors()
    masters = [value for name, value in job.tensors() if name.startswith("master")] if told.big_in == "weight" else []
    for value in (*masters[:1], *(value for name, value in found if wanted(name))):
        if local(value).numel():
            local(value).view(-1)[0] = told.big
            return


job = LOOPS[told.kind]()
losses: dict[int, str] = {}
if told.resume:
    now = job.load(told.resume)
    torch.save(job.held(), told.out / f"{job.rank}-loaded.pt")
while now < told.steps:
    torch.save(job.held(), told.out / f"{job.rank}-{now}.pt")
    if told.big and now == told.big_at and job.rank == told.rank:
        with torch.no_grad():
            enlarge(job)
        torch.save(job.held(), told.out / f"{job.rank}-{now}.pt")
    inputs = job.inputs(now)
    if now == told.at and told.fault in ("nan", "apart"):
        inputs *= torch.nan
    elif now == told.at and told.fault in FAULTS and job.rank == told.rank:
        FAULTS[told.fault]()
    losses[now] = job.step(inputs).hex()
    now += 1
    time.sleep(told.pause)
torch.save(job.held() | {"losses": losses}, told.out / f"{job.rank}-end.pt")
job.end()
