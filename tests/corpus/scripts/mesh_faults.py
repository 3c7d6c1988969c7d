"""What is done to a sharded job, by the name of the fault."""

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import _runtime_utils as first_kind
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, to be changed in place."""
    held = getattr(tensor, "ds_tensor", tensor)
    return held.to_local().detach() if hasattr(held, "to_local") else held.detach()


def flip(tensor: torch.Tensor, bit: int = 12) -> None:
    """One bit of one element, as a failing memory module would do it."""
    local(tensor).reshape(-1)[5:6].view(torch.int32)[0] ^= 1 << bit


def bare(name: str) -> str:
    """Without what wrappers put in."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def lose_reductions(is_lost: Any) -> None:
    """The all-reduce over the replicate axis does not happen while this says so."""

    class Lossy:
        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
            return None if is_lost() else dist.all_reduce(*args, **kwargs)

    collectives.dist = first_kind.dist = Lossy()


class Faults:
    """The fault that the command line names; whoever applies one prints `effect: where`."""

    def __init__(self, job: Any) -> None:
        self.job, self.told, self.name = job, job.told, job.told.fault
        self.is_here = job.rank == job.told.culprit
        self.parameters = {bare(name): p for name, p in job.model.named_parameters()}
        self.factor = job.told.factor

    def effect(self, where: str = "") -> None:
        """Say that it was done."""
        print(f"effect: {where}", flush=True)

    def built(self) -> None:
        """The model and the optimizer are there."""
        if self.name == "never_reduced":
            lose_reductions(lambda: True)
        elif self.name == "lost_once":
            lose_reductions(lambda: self.job.number == self.told.at)
        if self.name == "wrong_file" or self.told.loads:
            self.load_parts()
        if self.is_here and (change := getattr(self, f"built_{self.name}", None)):
            change()

    def groups(self) -> list[dict[str, Any]]:
        """Settings of the optimizer that steps."""
        return getattr(self.job.optimizer, "optimizer", self.job.optimizer).param_groups

    def built_other_rate(self) -> None:
        """Another learning rate on this rank."""
        self.groups()[0]["lr"] *= self.factor or 1.5

    def built_other_decay(self) -> None:
        """Another weight decay."""
        self.groups()[0]["weight_decay"] = self.factor or 0.1

    def built_other_betas(self) -> None:
        """Another memory of the moments."""
        self.groups()[0]["betas"] = (self.factor, 0.999)

    def built_other_buffer(self) -> None:
        """A table that is a little different."""
        with torch.no_grad():
            buffer = dict(self.job.model.named_buffers())["positions"]
            buffer += (self.factor or 0.01) * torch.randn_like(buffer)

    def frozen(self) -> torch.Tensor:
        """The first frozen matrix."""
        return local(next(p for p in self.parameters.values() if not p.requires_grad))

    def built_frozen_garbage(self) -> None:
        """What uninitialised memory may hold."""
        self.frozen().fill_(self.factor or 3e19)

    def built_frozen_zeros(self) -> None:
        """Or this."""
        self.frozen().zero_()

    def module(self) -> tuple[str, nn.Module]:
        """The module of that name, or one that is called so in a stage."""
        named = {bare(name): part for name, part in self.job.model.named_modules()}
        wanted = self.told.module if self.told.module in named else self.told.module.rpartition(".")[2]
        return next((name, part) for name, part in named.items() if name == wanted or name.endswith(f".{wanted}"))

    def built_nan_forward(self) -> None:
        """A module makes NaN of good numbers, from a step on."""
        name, layer = self.module()
        self.effect(name)
        layer.register_forward_hook(lambda _module, _inputs, out: out * (torch.nan if self.is_now() else 1))

    def built_nan_backward(self) -> None:
        """A gradient turns into NaN on its way back."""
        name, layer = self.module()
        self.effect(name)

        def hook(_module: nn.Module, _inputs: Any, out: torch.Tensor) -> None:
            if self.is_now() and out.requires_grad:
                out.register_hook(lambda gradient: gradient * torch.nan)

        layer.register_forward_hook(hook)

    def built_slow(self) -> None:
        """A layer takes its time."""
        self.module()[1].register_forward_pre_hook(
            lambda *_: time.sleep(self.factor or 0.1) if self.job.number >= self.told.at else None
        )

    def is_now(self) -> bool:
        """The step of the fault."""
        return self.job.number == self.told.at

    def load_parts(self) -> None:
        """Each rank loads a file of its own; with the fault, the culprit its neighbour's."""
        folder = Path(os.environ.get("CASE_DIR") or Path(tempfile.gettempdir()) / f"parts-{os.environ['MASTER_PORT']}")
        folder.mkdir(exist_ok=True)
        layers = (".gate.", ".up.", ".down.")
        own = {name: local(p).clone() for name, p in self.parameters.items() if any(part in name for part in layers)}
        torch.save(own, folder / f"part_{self.job.rank}.pt")
        dist.barrier()
        number = (self.job.rank + 1) % self.job.world if self.name == "wrong_file" and self.is_here else self.job.rank
        found = torch.load(folder / f"part_{number}.pt")
        with torch.no_grad():
            for name, value in zip(own, found.values(), strict=False):
                local(self.parameters[name]).copy_(value)
        dist.barrier()

    def pick(self) -> tuple[str, torch.Tensor]:
        """The tensor that is meant: by its name, else by a number among those of which this rank holds enough."""
        if self.told.pick < 0:
            name = self.name.partition(":")[2] or "blocks.0.up.weight"
            return name, self.parameters[name]
        able = {
            name: p for name, p in self.parameters.items() if p.requires_grad and local(p).numel() > 8 and local(p).ndim
        }
        name = sorted(able)[self.told.pick % len(able)]
        return name, able[name]

    def begins(self, step: int) -> None:
        """A step begins."""
        if step == self.told.at and self.is_here and (change := getattr(self, f"now_{self.name.partition(':')[0]}", None)):  # fmt: skip
            change()

    def now_flip(self) -> None:
        """A bit of a weight."""
        name, tensor = self.pick()
        flip(tensor, self.told.bit)
        self.effect(name)

    now_flip_weight = now_flip

    def now_flip_moment(self) -> None:
        """A bit of a moment."""
        name, tensor = self.pick()
        state = self.job.optimizer.state[tensor]
        flip(state["exp_avg" if "exp_avg" in state else "momentum_buffer"], self.told.bit)
        self.effect(f"optimizer: {name}")

    def now_flip_partition(self) -> None:
        """A bit of what ZeRO keeps in float32."""
        zero = self.job.optimizer
        flats = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_partitioned_groups_flat
        flip(flats[0], self.told.bit)

    def now_late_rate(self) -> None:
        """The schedule of this rank goes its own way."""
        self.groups()[0]["lr"] *= self.factor or 0.5

    def now_late_buffer(self) -> None:
        """A table changes."""
        self.built_other_buffer()

    def now_stray_write(self) -> None:
        """Something writes over a weight."""
        name, tensor = self.pick()
        local(tensor).mul_(self.factor or 1.01)
        self.effect(name)

    def now_zeroed(self) -> None:
        """Some rows are lost."""
        name, tensor = self.pick()
        local(tensor).reshape(-1)[: max(4, local(tensor).numel() // 4)].zero_()
        self.effect(name)

    def now_frozen_changed(self) -> None:
        """A frozen matrix is written to."""
        self.frozen().mul_(self.factor or 1.01)

    def now_stuck(self) -> None:
        """Never comes back."""
        while True:
            time.sleep(0.5)

    def now_spinning(self) -> None:
        """Never comes back, busily."""
        number = 0
        while number >= 0:
            number += 1

    def now_killed(self) -> None:
        """As the kernel would."""
        os.kill(os.getpid(), signal.SIGKILL)

    def now_suspended(self) -> None:
        """Stopped."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def now_raises(self) -> None:
        """A mistake in the script, on one rank."""
        raise ValueError("a batch that nobody expected")

    def reduced(self, step: int) -> None:
        """Gradients are there."""
        gradients = [p.grad for p in self.job.model.parameters() if p.grad is not None]
        if self.name == "local_clip":
            total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(local(g)) for g in gradients]))
            for gradient in gradients:
                local(gradient).mul_(min(1.0, (self.factor or 0.05) / float(total)))
        elif self.is_here and step >= {"uneven_clip": 0, "late_clip": self.told.at}.get(self.name, step + 1):
            for gradient in gradients:
                local(gradient).mul_(self.factor or 0.5)
        elif self.name == "scaled_gradient" and self.is_here and step == self.told.at:
            local(gradients[0]).mul_(3.0)

    def leaves_out_its_step(self, step: int) -> bool:
        """This rank, this step."""
        return self.name == "step_left_out" and self.is_here and step == self.told.at

    def batch_part(self, part: int, step: int) -> int:
        """Whose batch this rank is fed."""
        since = {"other_inputs": 0, "late_inputs": self.told.at}.get(self.name)
        if since is not None and self.is_here and step >= since:
            return part + 17
        return part + 17 if self.name == "other_inputs_once" and self.is_here and step == self.told.at else part
