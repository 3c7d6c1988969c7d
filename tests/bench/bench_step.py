"""What holter costs a training step: the same GPT with and without it, interleaved, median of repeats.

    python tests/bench/bench_step.py [--size 10] [--repeats 5] [--steps 4]

Two real ranks under torchrun and gloo, a GPT of about 10 (or 17) million parameters. Within one job holter and its peers are put on and
taken off in turn, block by block, so that all sides see the same machine. What slows the whole step is told by blocks: the ratio to the
bare block of the same round, which on a machine with other tenants is uncertain by several per cent. What is a call of its own is timed
by itself, beside the step that it lies in, and holter measures its hooks in the same way: these are certain to a tenth of a per cent.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
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


def main() -> None:
    """Launch the two ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, choices=list(SIZES), default=10)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--kinds", nargs="*", choices=list(PHRASES), default=["holter", "clip"])
    options = parser.parse_args()
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
