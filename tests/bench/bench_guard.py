"""What the guard before an optimizer's step costs, beside the checks that a careful script makes of the same gradients.

    python tests/bench/bench_guard.py [--rounds 31] [--sizes 10 100] [--threads 1 2]

The parameters of a GPT of about 10 and of about 100 million, float32. Everything is measured by turns and the median taken, so that all see the
same machine; the ratio to the guard is taken round by round, and its quartiles say how certain it is. The optimizer's
step that the guard stands before is measured too. No figure is printed unless everybody finds a NaN and an Inf, and nothing where there is
none.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holter.page import PageWriter
from holter.rank.context import Context, ObservationWriter
from holter.rank.hold.finite_guard import FiniteGuard
from holter.rank.publish.budget import Schedule
from holter_kernels import set_num_threads

SIZES = {10: (8192, 320, 6), 100: (32768, 768, 11)}
"""Millions of parameters -> tokens, width and layers."""
GUARD = "holter, the guard"
STEP = "AdamW's step, for comparison"

Check = Callable[[], bool]
"""Whether something is not finite."""


def parameters(tokens: int, d: int, layers: int) -> list[torch.nn.Parameter]:
    """The shapes of a GPT, with gradients of the size that gradients have."""
    block = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    made = [torch.nn.Parameter(torch.zeros(shape)) for shape in [(tokens, d), (1024, d), *block * layers, (d,), (d,)]]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return made


class Still(torch.optim.Optimizer):
    """Applies nothing: what remains of a loss scaler's step is its check. Says whether it was called."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> bool:
        """Nothing."""
        del closure
        return True


class Checks:
    """The guard and its peers, on the same gradients."""

    def __init__(self, params: list[torch.nn.Parameter], context: Context) -> None:
        self.params, self.guard = params, FiniteGuard(context)
        self.adam, self.still = torch.optim.AdamW(params, lr=0.0), Still(params)
        # A scale of one leaves the gradients as they are, however often it is taken out of them.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=2**30, backoff_factor=1 - 1e-6)

    def all(self) -> dict[str, Check]:
        """By name; the guard first."""
        return {
            GUARD: lambda: self.guard.finds(self.adam),
            "torch get_total_norm, error_if_nonfinite": lambda: raises(self._norm),
            "torch clip_grad_norm_, error_if_nonfinite": lambda: raises(self._clip),
            "torch GradScaler, unscale_ and step": self._scale,
            "torch isfinite().all() of each": lambda: not all(bool(p.grad.isfinite().all()) for p in self.params),  # type: ignore[union-attr]
        }

    def _norm(self) -> None:
        torch.nn.utils.get_total_norm([p.grad for p in self.params if p.grad is not None], error_if_nonfinite=True)

    def _clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, 1e9, error_if_nonfinite=True)

    def _scale(self) -> bool:
        if self.scaler._scale is None:
            self.scaler.scale(torch.zeros(()))
        self.scaler.unscale_(self.still)
        is_called = self.scaler.step(self.still)
        self.scaler.update(1.0)
        return not is_called


def raises(check: Callable[[], None]) -> bool:
    """A check that says so by an exception."""
    try:
        check()
    except RuntimeError:
        return True
    return False


def wrong(params: list[torch.nn.Parameter], checks: dict[str, Check]) -> Iterator[str]:
    """Who sees something in healthy gradients, or nothing in a bad one, wherever it is."""
    yield from (f"{name} finds something" for name, check in checks.items() if check())
    for bad in (float("nan"), float("inf"), -float("inf")):
        for parameter in (params[0], params[len(params) // 2], params[-1]):
            healthy = parameter.grad
            for name, check in checks.items():
                # A peer may spoil what it was given.
                parameter.grad = healthy.clone()  # type: ignore[union-attr]
                parameter.grad.view(-1)[-1] = bad
                if not check():
                    yield f"{name} overlooks {bad}"
            parameter.grad = healthy


def measure(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, by turns, beginning with another one each time."""
    names = list(works)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-2, rounds):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            start = time.perf_counter()
            works[name]()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def report(found: dict[str, list[float]]) -> None:
    """Medians; ratios of the same rounds with their quartiles."""
    for name, seconds in found.items():
        ratios = [other / own for other, own in zip(seconds, found[GUARD], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        text = "" if name == GUARD else f" {middle:7.2f} x the guard (half of the rounds: {low:.2f} to {high:.2f})"
        print(f"  {name:42} {statistics.median(seconds) * 1e3:9.2f} ms{text}")
    shares = [own / step for own, step in zip(found[GUARD], found[STEP], strict=True)]
    print(f"  the guard is {statistics.median(shares):.1%} of the optimizer's step that it stands before")


def main() -> int:
    """Print one table a case; 1 if a check is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--sizes", type=int, nargs="*", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--threads", type=int, nargs="*", default=[1], help="as a rank has them that shares its cores")
    options = parser.parse_args()
    torch.manual_seed(0)
    page = PageWriter.create(rank=0, world_size=1, pid=1, started_ticks=1, ring_bytes=1 << 20)
    context = Context(ObservationWriter(page, 0), Schedule(budget=0.02, floor_s=0.0), 1)
    for size in options.sizes:
        params = parameters(*SIZES[size])
        checks = Checks(params, context)
        for num_threads in options.threads:
            set_num_threads(num_threads)
            torch.set_num_threads(num_threads)
            if mistakes := list(wrong(params, checks.all())):
                print("wrong: " + "; ".join(mistakes), file=sys.stderr)
                return 1
            found = measure({**checks.all(), STEP: checks.adam.step}, options.rounds)
            millions = sum(p.numel() for p in params) / 1e6
            print(f"\nGPT of {millions:.1f} M parameters, {len(params)} tensors, float32, {num_threads} thread(s)")
            report(found)
    page.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
