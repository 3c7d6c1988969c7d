"""What the fused pass costs, as a ratio to a pure read of the same memory in the same run, beside its peers.

    python tests/bench/bench_kernels.py [--rounds 7] [--no-compile]

GPT-2's 148 tensors (498 MB in float32) and 2,000 small ones, float32 and bfloat16, 1 and 2 threads. Everything is measured by turns and the
median taken, so that all see the same machine. No figure is printed unless the results agree with the reference first.
Peers that read one tensor on one thread (hash functions) have no figure for two.
"""

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from holter_kernels import Pass, backend, native, set_num_threads, summarize
from holter_kernels.plan import Plan
from holter_kernels.testing import check

TARGETS = {
    ("GPT-2", "float32", 1): 1.8,
    ("GPT-2", "float32", 2): 1.5,
    ("GPT-2", "bfloat16", 1): 2.4,
    ("GPT-2", "bfloat16", 2): 1.8,
}
"""At most so many times the read, with statistics, sums, fingerprint and sampled histogram."""
NUM_SLOW_ROUNDS = 2

Work = Callable[[], object]


def gpt2(dtype: torch.dtype) -> list[torch.Tensor]:
    """The shapes of GPT-2's 148 parameters, with values like those of gradients."""
    d = 768
    block = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(torch.randn(shape) * 0.02).to(dtype) for shape in [(50257, d), (1024, d), *block * 12, (d,), (d,)]]


def small(dtype: torch.dtype) -> list[torch.Tensor]:
    """2,000 tensors of 16 to 4,111 elements."""
    return [torch.randn(16 + 97 * k % 4096).to(dtype) for k in range(2000)]


def is_right(tensors: list[torch.Tensor]) -> bool:
    """The pass against the reference, on the benchmark's own tensors and on hostile ones."""
    hostile = [torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-41] * 500)]
    sample = [*tensors[1:40], *(tensor.to(tensors[0].dtype) for tensor in hostile)]
    table = summarize(sample)
    try:
        for tensor, row, bins in zip(sample, table, table.histogram, strict=True):
            check(tensor, row, bins)
    except AssertionError as error:
        print(f"wrong: {error}", file=sys.stderr)
        return False
    return True


def four_statistics(tensors: list[torch.Tensor]) -> None:
    """What a careful training loop computes by hand."""
    for x in tensors:
        x.isnan().sum(), x.isinf().sum(), x.norm(), x.abs().amax()


def ten_statistics(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same statistics as the pass, without histogram and fingerprint, in plain operations."""
    finite = torch.where(x.isfinite(), x, 0).float()
    size = finite.abs()
    return (
        (x == 0).sum(), x.isnan().sum(), x.isposinf().sum(), x.isneginf().sum(), finite.amin(), finite.amax(),
        torch.where(size > 0, size, torch.inf).amin(), finite.sum(), size.sum(), finite.square().sum(),
    )  # fmt: skip


def measure(works: dict[str, Work], slow: dict[str, Work], rounds: int) -> dict[str, float]:
    """The median seconds of each, taken by turns."""
    times: dict[str, list[float]] = {name: [] for name in [*works, *slow]}
    for turn in range(-1, rounds):
        for name, work in (works | slow if -1 <= turn < NUM_SLOW_ROUNDS else works).items():
            start = time.perf_counter()
            work()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def peers(
    tensors: list[torch.Tensor], num_threads: int, *, with_compile: bool
) -> tuple[dict[str, Work], dict[str, Work]]:
    """Works to measure often, and those too slow for that."""
    plan = Plan(tensors)
    passes = {f"holter, histogram {kind}": Pass(tensors, kind) for kind in ("off", "sampled", "exact")}
    passes["holter, fingerprint alone"] = Pass(tensors, statistics=False)
    works: dict[str, Work] = {"pure read": lambda: native.read(plan, num_threads)}
    works |= {name: partial(fused.start, tensors) for name, fused in passes.items()}
    works["torch get_total_norm"] = lambda: torch.nn.utils.get_total_norm(tensors)
    slow: dict[str, Work] = {
        "torch isnan, isinf, norm, absmax": lambda: four_statistics(tensors),
        "torch ten statistics": lambda: [ten_statistics(x) for x in tensors],
        "torch.hash_tensor": lambda: [torch.hash_tensor(x) for x in tensors],
    }
    if with_compile:
        compiled = torch.compile(ten_statistics, dynamic=True)
        slow["torch.compile, ten statistics"] = lambda: [compiled(x.view(-1)) for x in tensors]
    if num_threads == 1:
        memory = [x.view(torch.uint8).view(-1).numpy() for x in tensors]
        slow["sha256"] = lambda: [hashlib.sha256(x).digest() for x in memory]
        try:
            import xxhash  # noqa: PLC0415 - a peer, not a dependency
        except ImportError:
            print("xxhash is not installed: left out", file=sys.stderr)
        else:
            works["xxhash xxh3_64"] = lambda: [xxhash.xxh3_64_intdigest(x) for x in memory]
    return works, slow


def main() -> int:
    """Print one table a case; 1 if a result is wrong, 2 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--no-compile", action="store_true", help="leave out torch.compile, which takes a minute to compile"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    missed = []
    for list_name, make in (("GPT-2", gpt2), ("2,000 small", small)):
        for dtype in (torch.float32, torch.bfloat16):
            tensors = make(dtype)
            kind = str(dtype).removeprefix("torch.")
            if not is_right(tensors):
                return 1
            for num_threads in (1, 2):
                set_num_threads(num_threads)
                torch.set_num_threads(num_threads)
                works, slow = peers(tensors, num_threads, with_compile=list_name == "GPT-2" and not options.no_compile)
                found = measure(works, slow, options.rounds)
                read = found["pure read"]
                megabytes = sum(x.nbytes for x in tensors) / 1e6
                print(
                    f"\n{list_name}, {kind}, {megabytes:.0f} MB, {num_threads} thread(s), {backend()}, read {megabytes / 1e3 / read:.1f} GB/s"
                )
                for name, seconds in found.items():
                    print(f"  {name:36} {seconds * 1e3:9.2f} ms {seconds / read:8.2f} x read")
                sampled = found["holter, histogram sampled"]
                target = TARGETS.get((list_name, kind, num_threads))
                if target and sampled / read > target:
                    missed.append(
                        f"{list_name} {kind} {num_threads}: {sampled / read:.2f} times the read instead of {target}"
                    )
                if not target and sampled > found["torch get_total_norm"]:
                    missed.append(f"{list_name} {kind} {num_threads}: slower than get_total_norm")
    print("\nall targets reached" if not missed else "\nmissed: " + "; ".join(missed))
    return 2 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
