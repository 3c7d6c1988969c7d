"""What holter costs a training step: the same GPT with and without it, interleaved, median of repeats.

    python tests/bench/bench_step.py [--size 10] [--repeats 5] [--steps 4]
    python tests/bench/bench_step.py --from-outside [--tensors 148] [--ranks 1] [--repeats 3] [--sharded fsdp2|zero3]

Two real ranks under torchrun and gloo, a GPT of about 10 (or 17) million parameters. Within one job holter and its peers are put on and
taken off in turn, block by block, so that all sides see the same machine. What slows the whole step is told by blocks: the ratio to the
bare block of the same round, which on a machine with other tenants is uncertain by several per cent. What is a call of its own is timed
by itself, beside the step that it lies in, and holter measures its hooks in the same way: these are certain to a tenth of a per cent.

From outside: whole jobs of a small model with and without holter by turns, and what a step of each took: no clock inside the rank sees what holter
does to its caches, or its sidecar to the other core. Milliseconds of the clock and, which says more on a shared machine, of the rank's own thread;
where `perf` can count them, instructions of the rank.
"""

import argparse
import contextlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZES = {10: (320, 6), 17: (384, 8)}
"""Millions of parameters -> width and layers."""
PHRASES = {
    "holter": "holter, all of it",
    "gradients": "statistics and fingerprint of all gradients",
    "clip": "clip_grad_norm_",
    "plain": "ten plain torch statistics of all gradients",
    "anomaly": "torch.autograd.detect_anomaly",
    "debug": "transformers DebugUnderflowOverflow",
}


SETTLING = 64
"""Steps that holter is worn before anything is measured: at the start it looks more often, and learns what its readings cost."""

TIMED = ("holter", "gradients", "clip", "plain")
"""Kinds that are hooks or calls of their own, and are timed by themselves."""


def ten_statistics(gradient: Any) -> tuple[Any, ...]:
    """What a script without fused kernels would compute of a gradient."""
    absolute = gradient.abs()
    counts = gradient.isnan().sum(), gradient.isinf().sum(), (gradient == 0).sum()
    return (
        *counts,
        gradient.min(),
        gradient.max(),
        absolute.max(),
        gradient.sum(),
        absolute.sum(),
        gradient.norm(),
        gradient.std(),
    )


class Bench:
    """One rank: the job, and its blocks."""

    def __init__(self, options: argparse.Namespace) -> None:
        sys.path.insert(0, str(ROOT / "deploy" / "examples"))
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415
        from torch.nn.functional import cross_entropy  # noqa: PLC0415
        from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415
        from train_gpt import GPT  # noqa: PLC0415
        from transformers.debug_utils import DebugUnderflowOverflow  # noqa: PLC0415

        from holter.frameworks import attach  # noqa: PLC0415
        from holter_kernels import Pass  # noqa: PLC0415

        torch.set_num_threads(1)
        attachment = attach.attach()
        assert attachment is not None
        self.torch, self.dist, self.Pass, self.loss = torch, dist, Pass, cross_entropy
        self.Debug = DebugUnderflowOverflow
        self.monitor, self.context = attachment.monitor, attachment.monitor.context
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        width, layers = SIZES[options.size]
        self.model = DistributedDataParallel(GPT(4096, width, layers, 8, 128))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(4096, (options.batch, 129))
        self.noise = torch.zeros(options.batch, 128, width)
        self.parameters = list(self.model.parameters())
        self.steps = options.steps
        self.reading: Any = None
        self.shares: dict[str, list[float]] = {}
        """Kind -> what its own call took of each step."""

    @contextlib.contextmanager
    def wearing(self, kind: str) -> Iterator[Callable[[], None]]:
        """Put one kind on; yields what is done between backward and the optimizer."""
        self.context.guard.is_on = kind == "holter"
        debug = self.Debug(self.model.module) if kind == "debug" else None
        self.torch.autograd.set_detect_anomaly(kind == "anomaly")
        yield {"gradients": self.read, "clip": self.clip, "plain": self.plain}.get(kind, lambda: None)
        self.torch.autograd.set_detect_anomaly(False)
        for module in self.model.module.modules() if debug else ():
            for key in [k for k, hook in module._forward_hooks.items() if getattr(hook, "__self__", None) is debug]:
                del module._forward_hooks[key]

    def read(self) -> None:
        """The fused pass alone, as a probe makes it."""
        gradients = [p.grad for p in self.parameters]
        if self.reading is None:
            self.reading = self.Pass(gradients, histogram="off")
        self.reading.start(gradients).poll()

    def clip(self) -> None:
        """With a bound that nothing reaches."""
        self.torch.nn.utils.clip_grad_norm_(self.parameters, 1e9)

    def plain(self) -> None:
        """Tensor by tensor."""
        for parameter in self.parameters:
            ten_statistics(parameter.grad)

    def block(self, kind: str) -> float:
        """Seconds a step."""
        with self.wearing(kind) as between:
            self.dist.barrier()
            started = self.monitor.steps._began = time.perf_counter()
            hooks_before, own_s = self.context.guard.own_s, 0.0
            for _ in range(self.steps):
                self.optimizer.zero_grad()
                logits = self.model(self.tokens[:, :-1], self.noise)
                self.loss(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
                before = time.perf_counter()
                between()
                own_s += time.perf_counter() - before
                self.optimizer.step()
            self.dist.barrier()
            seconds = time.perf_counter() - started
        own_s += self.context.guard.own_s - hooks_before
        self.shares.setdefault(kind, []).append(own_s / (seconds - own_s))
        return seconds / self.steps

    def run(self, kinds: list[str], repeats: int) -> dict[str, list[float]]:
        """Rounds of all kinds, beginning with another one each time."""
        order = ["bare", *kinds]
        for _ in range(SETTLING // self.steps if "holter" in kinds else 0):
            self.block("holter")
        self.shares.clear()
        for kind in order:
            self.block(kind)
        seconds: dict[str, list[float]] = {kind: [] for kind in order}
        for repeat in range(repeats):
            turn = repeat % len(order)
            for kind in order[turn:] + order[:turn]:
                seconds[kind].append(self.block(kind))
        return seconds


def report(seconds: dict[str, list[float]], bench: Bench) -> None:
    """Ratios of interleaved blocks, with their spread."""
    bare = statistics.median(seconds["bare"])
    millions = sum(p.numel() for p in bench.parameters) / 1e6
    print(f"GPT of {millions:.1f} M parameters, 2 ranks, DDP on gloo, {bare * 1e3:.0f} ms a step without anything")
    for kind in [kind for kind in seconds if kind != "bare"]:
        ratios = sorted(s / b - 1 for s, b in zip(seconds[kind], seconds["bare"], strict=True))
        # The mean: a comparison falls into one block of several.
        own = statistics.mean(bench.shares[kind][1:]) if kind in TIMED else None
        by_itself = f"{own:8.2%}" if own is not None else "       -"
        print(
            f"  {PHRASES[kind]:45s} {by_itself}   by blocks {statistics.median(ratios):+7.1%} (from {ratios[0]:+.1%} to {ratios[-1]:+.1%})"
        )
    print(f"  dials of holter at the end: {bench.context.schedule.plan}")


OUTSIDE, SHARDED = "HOLTER_BENCH_TENSORS", "HOLTER_BENCH_SHARDED"
WARM_UP = 100
NUM_STEPS = 400


def train_small(num_tensors: int) -> None:
    """An ordinary script: a residual network of about half a million parameters in so many tensors."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = int((1e6 / num_tensors) ** 0.5)
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_tensors // 2))
    model: Any = Residual(layers)
    if int(os.environ["WORLD_SIZE"]) > 1:
        torch.distributed.init_process_group("gloo")
    sharded = os.environ.get(SHARDED, "")
    if sharded == "fsdp2":
        model = torch.distributed.fsdp.fully_shard(model)
    elif not sharded and torch.distributed.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    if sharded == "zero3":
        model = optimizer = engine_of(model, optimizer)
    inputs = torch.randn(16, width)
    began = 0.0, 0.0
    for step in range(WARM_UP + NUM_STEPS):
        if step == WARM_UP:
            began = time.perf_counter(), time.thread_time()
        optimizer.zero_grad()
        loss = model(inputs).pow(2).mean()
        (model.backward if sharded == "zero3" else torch.Tensor.backward)(loss)
        optimizer.step()
    if os.environ["RANK"] == "0":
        took = time.perf_counter() - began[0], time.thread_time() - began[1]
        print("OUTSIDE", *(seconds / NUM_STEPS * 1e3 for seconds in took), flush=True)


def engine_of(model: Any, optimizer: Any) -> Any:
    """DeepSpeed's, third stage."""
    import deepspeed  # noqa: PLC0415
    import deepspeed.ops  # noqa: PLC0415

    # Compiled at first use for a minute, and used by inference alone.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": 3},
        "zero_force_ds_cpu_optimizer": False,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def Residual(layers: Any) -> Any:  # noqa: N802 - a class, made once torch is there
    """Layers of x + 0.1 relu(W x): no gradient vanishes."""
    import torch  # noqa: PLC0415

    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = x + 0.1 * torch.relu(layer(x))
            return x

    return Stack()


def can_count_instructions() -> bool:
    """Whether `perf` is there and the machine lets it count."""
    with contextlib.suppress(OSError):
        tried = subprocess.run(
            ["perf", "stat", "-x,", "-e", "instructions:u", "true"], capture_output=True, text=True, check=False
        )
        return tried.returncode == 0 and "not" not in tried.stderr
    return False


def run_outside(num_tensors: int, num_ranks: int, sharded: str, *, is_worn: bool) -> tuple[float, float, float]:
    """One whole job: milliseconds a step by the clock and of the rank's thread, and million instructions a step of all its processes; NaN: not counted."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *launch, *(["-m", "holter"] if is_worn else []), __file__]
    counting = ["perf", "stat", "-x,", "-e", "instructions:u"] if can_count_instructions() else []
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", OUTSIDE: str(num_tensors), SHARDED: sharded}
        environment["HOLTER_RUN_DIR"] = f"{directory}/run"
        done = subprocess.run([*counting, *command], capture_output=True, text=True, check=True, env=environment)
    line = next(line for line in done.stdout.splitlines() if line.startswith("OUTSIDE"))
    wall_ms, thread_ms = map(float, line.split()[1:])
    counted = [line.split(",")[0] for line in done.stderr.splitlines() if "instructions" in line] if counting else []
    return wall_ms, thread_ms, float(counted[-1]) / (WARM_UP + NUM_STEPS) / 1e6 if counted else math.nan


def report_outside(num_tensors: int, num_ranks: int, repeats: int, sharded: str) -> None:
    """With and without by turns."""
    bare, worn = [], []
    for _ in range(repeats):
        bare.append(run_outside(num_tensors, num_ranks, sharded, is_worn=False))
        worn.append(run_outside(num_tensors, num_ranks, sharded, is_worn=True))
    how = f"{num_ranks} rank(s){f', {sharded}' if sharded else ''}"
    print(f"{num_tensors} tensors, 0.5 M parameters, {how}, {repeats} pairs of whole jobs by turns")
    for place, what in enumerate(("ms by the clock", "ms of the rank's thread", "million instructions")):
        ours, theirs = (statistics.median(run[place] for run in runs) for runs in (worn, bare))
        if math.isfinite(ours):
            print(
                f"  {what:25s} {ours:8.2f} against {theirs:8.2f} a step: {ours - theirs:+.2f}, {ours / theirs:.3f} times"
            )
        else:
            print(f"  {what:25s} not counted: this machine does not let `perf` do it")


def main() -> None:
    """Launch the two ranks, or be one."""
    if OUTSIDE in os.environ:
        train_small(int(os.environ[OUTSIDE]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, choices=list(SIZES), default=10)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--kinds", nargs="*", choices=list(PHRASES), default=["holter", "clip"])
    parser.add_argument("--from-outside", action="store_true")
    parser.add_argument("--tensors", type=int, default=148)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--sharded", choices=["", "fsdp2", "zero3"], default="")
    options = parser.parse_args()
    if options.from_outside:
        report_outside(options.tensors, options.ranks, options.repeats, options.sharded)
        return
    if "RANK" in os.environ:
        bench = Bench(options)
        seconds = bench.run(options.kinds, options.repeats)
        if bench.dist.get_rank() == 0:
            report(seconds, bench)
        bench.context.guard.is_on = True
        bench.dist.destroy_process_group()
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    subprocess.run([*command, *sys.argv[1:]], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
