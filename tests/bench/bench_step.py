"""What holter costs a training step: the same GPT with and without it, interleaved, median of repeats.

    python tests/bench/bench_step.py [--repeats 5] [--steps 12]

Two real ranks under torchrun and gloo, a GPT of about 10 million parameters. Within one job holter is put on and taken off in turn,
block by block, so that both sides see the same machine. Beside it, in the same run, what `clip_grad_norm_` costs.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def job(options: argparse.Namespace) -> None:
    """One rank: interleaved blocks of bare, worn and clipped steps."""
    sys.path.insert(0, str(ROOT / "deploy" / "examples"))
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch.nn.functional import cross_entropy  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415
    from train_gpt import GPT  # noqa: PLC0415

    from holter.integrations import loop  # noqa: PLC0415

    torch.set_num_threads(1)
    attachment = loop.attach()
    assert attachment is not None
    guard = attachment.monitor.context.guard
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(4096, 320, 6, 8, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(4096, (options.batch, 129))
    noise = torch.zeros(options.batch, 128, 320)
    parameters = list(model.parameters())

    def block(*, worn: bool, clipped: bool) -> float:
        guard.is_on = worn
        dist.barrier()
        started = time.perf_counter()
        for _ in range(options.steps):
            optimizer.zero_grad()
            logits = model(tokens[:, :-1], noise)
            cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            if clipped:
                torch.nn.utils.clip_grad_norm_(parameters, 1e9)
            optimizer.step()
        dist.barrier()
        return (time.perf_counter() - started) / options.steps

    kinds = {"bare": (False, False), "holter": (True, False), "clip": (False, True)}
    for worn, clipped in kinds.values():
        block(worn=worn, clipped=clipped)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for repeat in range(options.repeats):
        order = list(kinds.items())
        for name, (worn, clipped) in order[repeat % 3 :] + order[: repeat % 3]:
            seconds[name].append(block(worn=worn, clipped=clipped))
    if dist.get_rank() == 0:
        report(seconds, sum(p.numel() for p in parameters), attachment.monitor.context.schedule)
    guard.is_on = True
    dist.destroy_process_group()


def report(seconds: dict[str, list[float]], num_parameters: int, schedule: object) -> None:
    """Ratios of interleaved blocks, with their spread."""
    bare = statistics.median(seconds["bare"])
    print(f"GPT of {num_parameters / 1e6:.1f} M parameters, 2 ranks, DDP on gloo, {bare * 1e3:.0f} ms a step")
    for name, phrase in (("holter", "with holter"), ("clip", "with clip_grad_norm_")):
        ratios = sorted(s / b for s, b in zip(seconds[name], seconds["bare"], strict=True))
        print(f"  {phrase:22s} x {statistics.median(ratios):.4f}   (from {ratios[0]:.4f} to {ratios[-1]:.4f})")
    print(f"  holter's own measure   {schedule.overhead_ratio:.4f} of the step, dials {schedule.plan}")


def main() -> None:
    """Launch the two ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    if "RANK" in os.environ:
        job(options)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *sys.argv[1:]], check=True, env=environ)


if __name__ == "__main__":
    main()
