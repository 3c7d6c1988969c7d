"""What watching costs a collective: raw all_reduce calls, plain, under holter, and under TORCH_DISTRIBUTED_DEBUG=DETAIL.

    python tests/bench/bench_collectives.py [--repeats 9] [--seconds 0.2] [--json]

Three jobs of two gloo ranks are alive at once and take turns, block by block, so that all see the same machine. Under holter the ranks
are attached, their sidecars copy the recorder as they do in training, and a copy falls into a block as often as it does there. Each
ratio is the median over the rounds of a block against the plain block of the same round. DETAIL is what PyTorch itself offers to find
mismatched collectives; it is compared on raw calls only, for it crashes DistributedDataParallel on the tested build.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

SIZES = (1, 1_000, 100_000, 1_000_000)
"""Elements of float32."""
KINDS = {
    "plain": "nothing",
    "holter": "holter, attached and copying",
    "detail": "TORCH_DISTRIBUTED_DEBUG=DETAIL",
}
SETTLING_S = 3.0
"""For sidecars and coordinator to be up before anything is measured."""
DEADLINE_S = 120.0


def be_a_rank() -> None:
    """Obey: a line `<elements> <calls>` on standard input is one block; rank 0 answers with its seconds."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()
    _answer("ready")
    for line in sys.stdin:
        elements, calls = map(int, line.split())
        tensor = torch.zeros(elements)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor)
        _answer(str(time.perf_counter() - began))
    dist.barrier()
    dist.destroy_process_group()


def _answer(text: str) -> None:
    if os.environ["RANK"] == "0":
        print(text, flush=True)


class Job:
    """Two ranks that run a block when they are told to."""

    def __init__(self, kind: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        runner = ["-m", "holter", "--run-dir", str(folder / "run")] if kind == "holter" else []
        environ = {key: value for key, value in os.environ.items() if not key.startswith("HOLTER")}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        environ |= {"TORCH_DISTRIBUTED_DEBUG": "DETAIL" if kind == "detail" else "OFF", "OMP_NUM_THREADS": "1"}
        self.log = (folder / f"{kind}.log").open("w+")
        self.ranks = [
            subprocess.Popen(
                [sys.executable, *runner, __file__, "--rank"],
                env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                text=True,
            )
            for rank in range(2)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            try:
                rank.wait(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:
                rank.kill()
        self.log.close()

    def hear(self) -> str:
        """Rank 0's next line."""
        assert self.ranks[0].stdout is not None
        line = self.ranks[0].stdout.readline().strip()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"a rank ended: {self.log.read()[-2000:]}")
        return line

    def block(self, elements: int, calls: int) -> float:
        """Seconds a call."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{elements} {calls}\n")
            rank.stdin.flush()
        return float(self.hear()) / calls


def measured(jobs: dict[str, Job], repeats: int, seconds: float) -> dict[int, dict[str, list[float]]]:
    """Elements -> kind -> seconds a call, a round each; every round begins with another kind."""
    table: dict[int, dict[str, list[float]]] = {}
    for elements in SIZES:
        calls = max(10, int(seconds / max(jobs["plain"].block(elements, 50), 1e-6)))
        for job in jobs.values():
            job.block(elements, max(10, calls // 4))
        rounds = table[elements] = {kind: [] for kind in jobs}
        order = list(jobs)
        for repeat in range(repeats):
            turn = repeat % len(order)
            for kind in order[turn:] + order[:turn]:
                rounds[kind].append(jobs[kind].block(elements, calls))
    return table


def summary(rounds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Kind -> median microseconds, and ratio to plain with its quartiles."""
    found = {}
    for kind, seconds in rounds.items():
        ratios = [one / plain for one, plain in zip(seconds, rounds["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[kind] = {"us": statistics.median(seconds) * 1e6, "ratio": middle, "ratio_low": low, "ratio_high": high}
    return found


def report(table: dict[int, dict[str, Any]]) -> None:
    """For people."""
    print(
        "all_reduce of float32 on 2 gloo ranks: microseconds a call, and the ratio to plain calls of the same round (quartiles)"
    )
    for elements, kinds in table.items():
        print(f"  {elements:,} elements")
        for kind, one in kinds.items():
            ratio = (
                f"x {one['ratio']:6.3f} ({one['ratio_low']:.3f} to {one['ratio_high']:.3f})" if kind != "plain" else ""
            )
            print(f"    {KINDS[kind]:32s} {one['us']:9.1f} us  {ratio}")


def main() -> int:
    """Start the jobs and let them take turns, or be a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a plain block")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_a_rank()
        return 0
    if options.repeats < 2:
        parser.error(f"--repeats must be at least 2, got {options.repeats}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.ExitStack() as stack:
        kinds = dict.fromkeys(["plain", *options.kinds])
        jobs = {kind: stack.enter_context(Job(kind, Path(folder))) for kind in kinds}
        for job in jobs.values():
            assert job.hear() == "ready"
        time.sleep(SETTLING_S)
        rounds = measured(jobs, options.repeats, options.seconds)
    table = {elements: summary(one) for elements, one in rounds.items()}
    if options.json:
        print(json.dumps(table))
    else:
        report(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
