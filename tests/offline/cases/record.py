"""Make the cases again: `python -m tests.offline.cases.record FOLDER [NAME…]`. They are stored in cases.tar.xz."""

import math
import shutil
import struct
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from tests.offline.cases import tools, writers
from tests.offline.cases.expected import Expected, save
from tests.offline.cases.jobs import Knobs, adversaries, classes, cosine, language, policy, regression
from torch import nn

Case = tuple[Callable[[Path], None], Expected | None]


def _log_zero(at: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    return lambda loss, step: loss + torch.log(torch.zeros(())) if step >= at else loss


def _rows(job, writer, **options):  # type: ignore[no-untyped-def]
    return lambda path: writer(path, job, **options)


def _jump(at: int, factor: float) -> Callable[[int], float]:
    return lambda step: factor if step >= at else 1.0


def _nan_batch(at: int):  # type: ignore[no-untyped-def]
    return lambda x, y, step: (torch.where(torch.rand(x.shape) < 0.1, math.nan, x) if step >= at else x, y)


def _shuffled(at: int, num: int = 64):  # type: ignore[no-untyped-def]
    return lambda x, y, step: (x, torch.randint(0, num, y.shape) if step >= at else y)


def _with(rows, **columns):  # type: ignore[no-untyped-def]
    for row in rows:
        yield row | {name: of(row) for name, of in columns.items()}


NONFINITE = ("nonfinite_forward", "nonfinite_input", "nonfinite_loss_function", "nonfinite_backward")
RATE = ("learning_rate_too_high",)
RISING = ("learning_rate_too_high", "exploding_gradients", "loss_divergence")


def faulty() -> dict[str, Case]:
    """Something is wrong, and the files say enough to name it."""
    leak = lambda row: 9.0 + 0.08 * row["step"]  # noqa: E731
    return {
        "rate_jump_hf5": (
            lambda p: writers.hf5(p, language(Knobs(schedule=_jump(200, 60), clip=1.0))),
            Expected(RATE, 200),
        ),
        "rate_jump_build_nanogpt": (
            lambda p: writers.build_nanogpt(p, classes(Knobs(schedule=_jump(150, 100), seed=2))),
            Expected(RATE, 150),
        ),
        "rate_jump_tensorboard": (
            lambda p: tools.tensorboard(p, language(Knobs(schedule=_jump(220, 80), seed=3))),
            Expected(RATE, 220),
        ),
        "rate_jump_mlruns": (
            lambda p: tools.mlruns(p, classes(Knobs(schedule=_jump(120, 100), seed=4, steps=200))),
            Expected(RATE, 120, 200),
        ),
        "rate_too_high_warmup_megatron": (
            lambda p: writers.megatron(
                p, regression(Knobs(rate=6.0, optimizer="sgd", schedule=lambda s: min(1.0, (s + 1) / 100), seed=5))
            ),
            Expected((*RISING, *NONFINITE), None),
        ),
        "rate_too_high_epochs": (
            lambda p: writers.epochs(p, classes(Knobs(schedule=_jump(210, 150), seed=6))),
            Expected(RATE, 8, 10),
        ),
        "nan_loss_llm_c": (
            lambda p: writers.llm_c(p, language(Knobs(on_loss=_log_zero(140), seed=7))),
            Expected(NONFINITE, 140),
        ),
        "nan_loss_modded": (
            lambda p: writers.modded(p, language(Knobs(on_loss=_log_zero(180), seed=8))),
            Expected(NONFINITE, 180),
        ),
        "nan_batch_csv": (
            lambda p: writers.plain_csv(p, classes(Knobs(on_batch=_nan_batch(100), seed=9))),
            Expected(NONFINITE, 100),
        ),
        "nan_batch_wandb": (
            lambda p: tools.wandb(p, regression(Knobs(on_batch=_nan_batch(230), seed=10))),
            Expected(NONFINITE, 230),
        ),
        "nan_backward_jsonl": (
            lambda p: writers.json_lines(
                p, regression(Knobs(on_loss=lambda loss, s: loss + torch.sqrt(loss * 0) if s >= 160 else loss, seed=11))
            ),
            Expected(("nonfinite_backward", "nonfinite_forward"), 160),
        ),
        "nan_lightning": (lambda p: tools.lightning(p, poison_at=180), Expected(NONFINITE, 180, 300)),
        # It prints no steps: what is counted are its logs, one in five steps.
        "hidden_nan_hf": (
            lambda p: tools.hf_trainer(p, fault="loss = loss * float('nan') if self.calls > 150 else loss"),
            Expected(("hidden_nonfinite_loss", *NONFINITE), 31, 60),
        ),
        "hidden_nan_state": (
            lambda p: tools.hf_trainer(
                p, fault="loss = loss * float('nan') if self.calls > 100 else loss", keeps="state"
            ),
            Expected(("hidden_nonfinite_loss", *NONFINITE), 100),
        ),
        "divergence_labels_ranks": (
            lambda p: writers.ranks(p, language(Knobs(on_batch=_shuffled(200), seed=12, steps=300))),
            Expected(("loss_divergence", "distribution_shift", "corrupt_labels_or_range"), 200),
        ),
        "divergence_two_columns": (
            lambda p: writers.two_columns(
                p, regression(Knobs(on_loss=lambda loss, s: loss if s < 200 else -loss, steps=300, seed=13, rate=1e-2))
            ),
            Expected(("loss_divergence", "exploding_gradients", "learning_rate_too_high"), 200),
        ),
        "divergence_sign_titan": (
            lambda p: writers.titan(p, classes(Knobs(on_loss=lambda loss, s: loss if s < 180 else -loss, seed=14))),
            Expected(("loss_divergence", "exploding_gradients", *RATE), 180),
        ),
        "overfit_keras": (
            lambda p: writers.keras_csv(
                p,
                classes(
                    Knobs(num_data=64, eval_every=10, noise=0)
                    if False
                    else Knobs(num_data=64, eval_every=10, steps=400, rate=1e-2, seed=15),
                    noise=2.5,
                ),
            ),
            Expected(("overfitting",), None),
        ),
        "overfit_state": (
            lambda p: writers.trainer_state(
                p, classes(Knobs(num_data=80, eval_every=20, steps=500, rate=1e-2, seed=16, every=5), noise=2.5)
            ),
            Expected(("overfitting",), None),
        ),
        "overfit_tensorboard": (
            lambda p: tools.tensorboard(
                p, language(Knobs(num_data=200, eval_every=25, steps=600, rate=1e-2, seed=17), 32)
            ),
            Expected(("overfitting",), None),
        ),
        "overfit_epochs": (
            lambda p: writers.epochs(
                p, language(Knobs(num_data=150, eval_every=10, steps=600, rate=1e-2, seed=18)), per_epoch=20
            ),
            Expected(("overfitting",), None),
        ),
        "zero_gradients_nano": (
            lambda p: writers.build_nanogpt(p, classes(Knobs(on_loss=lambda loss, _s: loss.clamp(min=40.0), seed=19))),
            Expected(("zero_gradients", "graph_detached", "loss_plateau"), 0),
        ),
        "zero_gradients_later": (
            lambda p: writers.json_lines(
                p, regression(Knobs(on_loss=lambda loss, s: loss * 0 + 0.7 if s >= 150 else loss, seed=20))
            ),
            Expected(("zero_gradients", "graph_detached", "loss_plateau"), 150),
        ),
        "rate_zero_fairseq": (
            lambda p: writers.fairseq(p, classes(Knobs(schedule=lambda _s: 0.0, seed=21))),
            Expected(("loss_plateau", "lost_update"), 0),
        ),
        "plateau_guess_nanogpt": (
            lambda p: writers.nanogpt(
                p, classes(Knobs(on_batch=lambda x, y, _s: (torch.zeros_like(x), y), seed=22, eval_every=50))
            ),
            Expected(("loss_plateau",), 0),
        ),
        "scaler_collapse_deepspeed": (
            lambda p: writers.deepspeed(
                p,
                (
                    {**row, "skipped": max(0, row["step"] - 60)}
                    | ({"scale": 2.0 ** max(0, 16 - (row["step"] - 60))} if row["step"] >= 60 else {})
                    for row in language(Knobs(steps=120, seed=23))
                ),
            ),
            Expected(("every_step_skipped",), 60, 120),
        ),
        "scale_falls_megatron": (
            lambda p: writers.megatron(
                p,
                (
                    {**row, "scale": 2.0 ** (14 if row["step"] < 100 else max(-8, 14 - (row["step"] - 100) // 4))}
                    for row in language(Knobs(seed=24))
                ),
            ),
            Expected(("every_step_skipped",), 100),
        ),
        "exploding_hf4": (
            lambda p: writers.hf4(
                p,
                regression(
                    Knobs(
                        on_loss=lambda loss, s: loss * (1.25 ** max(0, s - 200)) if s > 200 else loss,
                        optimizer="sgd",
                        rate=0.02,
                        seed=25,
                    )
                ),
            ),
            Expected(("exploding_gradients", "loss_divergence", *NONFINITE), 202),
        ),
        "vanishing_by_layer_jsonl": (
            lambda p: writers.json_lines(p, classes(Knobs(depth=14, activation=nn.Sigmoid, by_layer=True, seed=26))),
            Expected(("vanishing_gradients",), 0),
        ),
        "exploding_by_layer_tensorboard": (
            lambda p: tools.tensorboard(
                p,
                (
                    row
                    | {name: value * 1e7 for name, value in row.items() if "layers.3" in name and row["step"] >= 120}
                    for row in classes(Knobs(depth=6, by_layer=True, seed=27, steps=200))
                ),
            ),
            Expected(("exploding_gradients", "imbalanced_gradients"), 120, 200),
        ),
        "leak_titan": (
            lambda p: writers.titan(p, _with(language(Knobs(seed=28)), memory=leak)),
            Expected(("device_memory_leak",), 0),
        ),
        "entropy_collapse_verl": (
            lambda p: writers.verl(p, policy(steps=300, rate=0.1, bonus=-3.0)),
            Expected(("entropy_collapse",), None),
        ),
        "zero_advantages_trl": (
            lambda p: writers.trl(p, policy(reward=lambda r, s: r if s < 120 else torch.zeros_like(r))),
            Expected(("zero_advantages", "no_learning_signal"), 120, 200),
        ),
        "no_signal_trl": (
            lambda p: writers.trl(p, policy(seed=2, reward=lambda r, _s: torch.zeros_like(r))),
            Expected(("no_learning_signal", "zero_advantages"), 1, 200),
        ),
        "reward_collapse_trl": (
            lambda p: writers.trl(p, policy(seed=3, steps=300, reward=lambda r, s: r if s < 180 else -3.0 + 0.1 * r)),
            Expected(("reward_collapse",), 180),
        ),
        "rate_jump_yolo": (
            lambda p: writers.yolo(p, regression(Knobs(schedule=_jump(200, 60), eval_every=10, seed=29, rate=1e-2))),
            Expected((*RATE, "loss_divergence"), 20, 30),
        ),
        "rate_jump_bars": (
            lambda p: writers.bars(p, classes(Knobs(schedule=_jump(180, 100), seed=30))),
            Expected(RATE, 180),
        ),
    } | _broken()


LOOP = "import torch, sys, os\nfor i in range(12):\n    print(f'step {i} | loss: {3.2 - 0.05 * i:.4f} | lr 3.0000e-04 | norm: 0.9123', flush=True)\n"
DDP = (
    "import torch, os, sys\nimport torch.distributed as dist\ndist.init_process_group('gloo')\nrank = dist.get_rank()\n"
)


def _broken() -> dict[str, Case]:
    """Scripts that really end so."""
    return {
        "shape_error": (lambda p: tools.script(p, LOOP + "def forward(x, w):\n    return x @ w\nforward(torch.ones(4, 5), torch.ones(6, 7))\n"), Expected(("script_error",), 11, 12)),
        "dtype_error": (lambda p: tools.script(p, LOOP + "torch.nn.Linear(4, 4)(torch.ones(2, 4, dtype=torch.float64))\n"), Expected(("script_error",), 11, 12)),
        "label_range": (lambda p: tools.script(p, LOOP + "torch.nn.functional.cross_entropy(torch.randn(4, 10), torch.tensor([1, 2, 3, 10]))\n"), Expected(("corrupt_labels_or_range",), 11, 12)),
        "embedding_range": (lambda p: tools.script(p, LOOP + "torch.nn.Embedding(10, 4)(torch.tensor([3, 11]))\n"), Expected(("corrupt_labels_or_range",), 11, 12)),
        "host_memory": (lambda p: tools.script(p, LOOP + "torch.empty(2 ** 46)\n"), Expected(("out_of_memory",), 11, 12)),
        "no_graph": (lambda p: tools.script(p, LOOP + "loss = torch.nn.Linear(4, 1)(torch.ones(2, 4)).detach().sum()\nloss.backward()\n", keep=True), Expected(("graph_detached",), 11, 12)),
        "empty_optimizer": (lambda p: tools.script(p, "import torch\ntorch.optim.Adam([])\n"), Expected(("nothing_trainable",), None)),
        "anomaly": (lambda p: tools.script(p, LOOP + "torch.autograd.set_detect_anomaly(True)\nx = torch.zeros(3, requires_grad=True)\n((x * 0).sqrt() * 0).sum().backward()\n"), Expected(("nonfinite_backward",), 11, 12)),
        "loader_worker_killed": (lambda p: tools.script(p, LOOP + "import signal\nclass D(torch.utils.data.Dataset):\n    def __len__(self): return 100\n    def __getitem__(self, i):\n        if i == 30: os.kill(os.getpid(), signal.SIGKILL)\n        return torch.ones(3)\nif __name__ == '__main__':\n    for b in torch.utils.data.DataLoader(D(), batch_size=4, num_workers=2): pass\n"), Expected(("out_of_memory", "rank_dead"), 11, 12)),
        "torchrun_one_rank_raises": (lambda p: tools.script(p, DDP + "import time\nfor i in range(8):\n    print(f'[rank{rank}] step {i} loss={2.0 - 0.1 * i:.3f}', flush=True)\nif rank == 1:\n    {}['weights']\ndist.barrier()\n", torchrun=2), Expected(("script_error",), 7, 8, (1,))),
        "torchrun_one_rank_killed": (lambda p: tools.script(p, DDP + "import signal\nfor i in range(8):\n    print(f'[rank{rank}] step {i} loss={2.0 - 0.1 * i:.3f}', flush=True)\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()\n", torchrun=2), Expected(("rank_dead", "out_of_memory"), 7, 8, (1,))),
        "ddp_unused": (lambda p: tools.script(p, DDP + "m = torch.nn.ModuleDict({'a': torch.nn.Linear(2, 2), 'b': torch.nn.Linear(2, 2)})\nclass M(torch.nn.Module):\n    def __init__(self):\n        super().__init__(); self.m = m\n    def forward(self, x): return self.m['a'](x)\nd = torch.nn.parallel.DistributedDataParallel(M())\nfor i in range(3):\n    d(torch.ones(1, 2)).sum().backward()\n", torchrun=2), Expected(("unreduced_parameters",), None)),
        "variance_warning": (lambda p: tools.script(p, "import torch\nclass HaltingHead(torch.nn.Module):\n    def forward(self, x):\n        return x.mean(0) + x.var(0)\nhead = HaltingHead()\nfor i in range(30):\n    x = torch.randn(1, 8)\n    print(f'step {i} loss: {2 - 0.02 * i:.3f}', flush=True)\n    head(x)\n", keep=True), Expected(("variance_without_samples",), None)),
        "gloo_timeout": (lambda p: tools.script(p, DDP.replace("'gloo'", "'gloo', timeout=__import__('datetime').timedelta(seconds=4)") + "import time\nfor i in range(8):\n    print(f'[rank{rank}] step {i} loss={2.0 - 0.1 * i:.3f}', flush=True)\nif rank == 1:\n    time.sleep(9)\nelse:\n    dist.all_reduce(torch.ones(4))\n", torchrun=2), Expected(("rank_missing_from_collective",), 7, 8)),
        "nccl_old": (_nccl_old, Expected(("rank_missing_from_collective",), None, ranks=(3,))),
        "nccl_middle": (_nccl_middle, Expected(("rank_missing_from_collective",), None, ranks=(2,))),
        "nccl_new": (_nccl_new, Expected(("rank_missing_from_collective",), None, ranks=(5,))),
        "cuda_oom_new": (lambda p: _said(p, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.12 GiB is free. Including non-PyTorch memory, this process has 78.02 GiB memory in use. Of the allocated memory 75.80 GiB is allocated by PyTorch, and 1.55 GiB is reserved by PyTorch but unallocated."), Expected(("out_of_memory",), 199, 200)),
        "cuda_oom_old": (lambda p: _said(p, "RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 3; 14.76 GiB total capacity; 13.10 GiB already allocated; 201.75 MiB free; 13.42 GiB reserved in total by PyTorch)"), Expected(("out_of_memory",), 199, 200)),
        "oom_after_leak": (_oom_after_leak, Expected(("device_memory_leak", "out_of_memory"), None)),
        "xid": (lambda p: _said(p, "[Mon May 18 16:04:46 2026] NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus."), Expected(("device_fault",), None)),
        "xid_ecc": (lambda p: _said(p, "kernel: NVRM: Xid (PCI:0000:86:00): 48, pid=1234, name=python, An uncorrectable double bit error (DBE) has been detected on GPU"), Expected(("device_memory_error",), None)),
        "device_assert_storm": (lambda p: _said(p, "\n".join(f"/pytorch/aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [{i},0,0] Assertion `t >= 0 && t < n_classes` failed." for i in range(32)) + "\nRuntimeError: CUDA error: device-side assert triggered"), Expected(("corrupt_labels_or_range",), None)),
        "lopsided_code": (_lopsided, Expected(("lopsided_architecture",), None)),
    }  # fmt: skip


def _said(path: Path, text: str) -> None:
    writers.build_nanogpt(path, language(Knobs(steps=200, seed=40)))
    with (path / "log.txt").open("a") as file:
        if "Error" in text.split(":", maxsplit=1)[0] or "RuntimeError" in text:
            head, _, last = text.rpartition("\n")
            file.write(
                (head + "\n" if head else "")
                + 'Traceback (most recent call last):\n  File "/home/me/train.py", line 88, in <module>\n    loss.backward()\n  File "/opt/venv/lib/python3.11/site-packages/torch/_tensor.py", line 626, in backward\n    torch.autograd.backward(\n'
                + last
                + "\n"
            )
        else:
            file.write(text + "\n")


def _oom_after_leak(path: Path) -> None:
    writers.titan(path, _with(language(Knobs(steps=200, seed=41)), memory=lambda row: 20 + 0.29 * row["step"]))
    with (path / "titan.log").open("a") as file:
        file.write(
            "[rank0]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 0.31 GiB is free.\n"
        )


def _watchdogs(path: Path, lines: list[str]) -> None:
    writers.ranks(path, language(Knobs(steps=150, seed=42)), num=8)
    with (path / "all_ranks.log").open("a") as file:
        file.write("\n".join(lines) + "\n")


def _nccl_old(path: Path) -> None:
    _watchdogs(
        path,
        [
            f"[E ProcessGroupNCCL.cpp:458] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1204, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802117 milliseconds before timing out."
            for rank in range(8)
            if rank != 3
        ],
    )


def _nccl_middle(path: Path) -> None:
    _watchdogs(
        path,
        [
            f"[rank{rank}]:[E ProcessGroupNCCL.cpp:563] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={1204 if rank != 2 else 1203}, OpType={'ALLREDUCE' if rank != 2 else '_ALLGATHER_BASE'}, NumelIn=8192, NumelOut=8192, Timeout(ms)=600000) ran for 600117 milliseconds before timing out. last enqueued NCCL work: {1206 if rank != 2 else 1203}, last completed NCCL work: {1203 if rank != 2 else 1202}."
            for rank in range(8)
        ],
    )


def _nccl_new(path: Path) -> None:
    _watchdogs(
        path,
        [
            f"[rank{rank}]:[E518 06:24:44.190 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure detected by watchdog at work sequence id: {900 if rank != 5 else 899} PG status: last enqueued work: {901 if rank != 5 else 899}, last completed work: {899 if rank != 5 else 898}"
            for rank in range(8)
        ],
    )


def _lopsided(path: Path) -> None:
    (path / "model.py").write_text(
        "import torch.nn as nn\n\nVOCAB = 50257\n\n\nclass Model(nn.Module):\n    def __init__(self, d_model=128, layers=2):\n        super().__init__()\n        self.wte = nn.Embedding(VOCAB, d_model)\n        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(d_model, 4, 512) for _ in range(layers)])\n        self.head = nn.Linear(d_model, VOCAB)\n"
    )
    writers.two_columns(path, language(Knobs(steps=120, seed=43)))


def healthy() -> dict[str, Case]:
    """Odd, and fine."""
    sawtooth = lambda s: 0.1 + 0.9 * (1 - (s % 75) / 75)  # noqa: E731
    triangle = lambda s: 0.2 + 0.8 * abs((s % 80) / 40 - 1)  # noqa: E731
    made: dict[str, Callable[[Path], None]] = {
        "plain_hf5": lambda p: writers.hf5(p, language(Knobs(seed=100, schedule=cosine(300, 30), clip=1.0))),
        "plain_hf4": lambda p: writers.hf4(p, classes(Knobs(seed=101, schedule=cosine(300, 30), eval_every=30))),
        "plain_state": lambda p: writers.trainer_state(
            p, language(Knobs(seed=102, every=5, eval_every=50, schedule=cosine(300)))
        ),
        "plain_megatron": lambda p: writers.megatron(
            p, language(Knobs(seed=103, eval_every=50, schedule=cosine(300, 40)))
        ),
        "plain_fairseq": lambda p: writers.fairseq(p, regression(Knobs(seed=104))),
        "plain_tensorboard": lambda p: tools.tensorboard(p, language(Knobs(seed=105, eval_every=25))),
        "plain_wandb": lambda p: tools.wandb(p, language(Knobs(seed=106, eval_every=25))),
        "plain_mlruns": lambda p: tools.mlruns(p, classes(Knobs(seed=107, steps=150))),
        "plain_lightning": lambda p: tools.lightning(p, rate=0.1),
        "plain_hf_trainer": tools.hf_trainer,
        "plain_hf_trainer_state": lambda p: tools.hf_trainer(p, rate=5e-3, keeps="state"),
        "plain_llm_c": lambda p: writers.llm_c(p, language(Knobs(seed=108, eval_every=30))),
        "plain_modded": lambda p: writers.modded(p, language(Knobs(seed=109))),
        "plain_keras_csv": lambda p: writers.keras_csv(p, classes(Knobs(seed=110, eval_every=10))),
        "plain_keras_bars": lambda p: writers.keras_bars(p, classes(Knobs(seed=111, eval_every=10))),
        "plain_yolo": lambda p: writers.yolo(p, regression(Knobs(seed=112, eval_every=10))),
        "plain_titan": lambda p: writers.titan(p, language(Knobs(seed=113))),
        "plain_ranks": lambda p: writers.ranks(p, language(Knobs(seed=114)), num=8),
        "plain_bars": lambda p: writers.bars(p, classes(Knobs(seed=115))),
        "plain_epochs": lambda p: writers.epochs(p, language(Knobs(seed=116, eval_every=30, num_data=3000))),
        "restarted_nanogpt": _restarted,
        "resumed_build_nanogpt": _resumed,
        "smoothed_csv": lambda p: writers.plain_csv(p, _smoothed(language(Knobs(seed=118)))),
        "warm_restarts_hf5": lambda p: writers.hf5(p, language(Knobs(seed=119, schedule=sawtooth, rate=1e-2))),
        "cyclic_build_nanogpt": lambda p: writers.build_nanogpt(
            p, classes(Knobs(seed=120, schedule=triangle, rate=2e-2))
        ),
        "curriculum_jsonl": lambda p: writers.json_lines(p, _curriculum()),
        "noisy_rewards_trl": lambda p: writers.trl(p, policy(seed=5, bonus=0.3)),
        "noisy_rewards_verl": lambda p: writers.verl(p, policy(seed=6, bonus=0.3, rate=0.02)),
        "gan_csv": lambda p: writers.plain_csv(p, adversaries()),
        "gan_tensorboard": lambda p: tools.tensorboard(p, adversaries(seed=1)),
        "fine_tuning_hf5": lambda p: writers.hf5(p, classes(Knobs(seed=121, warm=600, rate=1e-3), noise=0.7)),
        "evaluation_only": lambda p: (p / "eval.log").write_text(
            "".join(
                str({"eval_loss": round(1.9 + 0.03 * ((7 * i) % 5), 4), "eval_accuracy": 0.61, "eval_runtime": 3.1})
                + "\n"
                for i in range(9)
            )
        ),
        "spikes_that_recover": lambda p: writers.build_nanogpt(
            p,
            language(Knobs(seed=122, on_loss=lambda loss, s: loss * (8 if s in {90, 170, 171, 240} else 1), clip=1.0)),
        ),
        "converged_plateau": lambda p: writers.two_columns(p, language(Knobs(seed=123, steps=900, rate=1e-2))),
        "noisy_tiny_batch": lambda p: writers.json_lines(p, classes(Knobs(seed=124, batch=2))),
        "regression_to_zero": lambda p: writers.epochs(
            p, regression(Knobs(seed=125, steps=600), noise=0.0), per_epoch=40
        ),
        "dropout_val_below_train": lambda p: writers.keras_csv(p, classes(Knobs(seed=126, dropout=0.5, eval_every=10))),
        "few_overflows_deepspeed": lambda p: writers.deepspeed(
            p,
            (
                row | ({"scale": 65536.0 / 2**i} if (i := int(row["step"])) < 4 else {})
                for row in language(Knobs(seed=127))
            ),
        ),
        "few_epochs": lambda p: writers.epochs(p, classes(Knobs(seed=128, steps=150)), per_epoch=30),
        "fine_tuned_plateau_eval": lambda p: writers.trainer_state(
            p, classes(Knobs(seed=129, warm=900, rate=5e-4, eval_every=20, every=5), noise=1.2)
        ),
        "gradients_by_layer": lambda p: writers.json_lines(p, classes(Knobs(seed=130, depth=4, by_layer=True))),
        "keyboard_interrupt": lambda p: tools.script(p, LOOP + "raise KeyboardInterrupt\n"),
        "warning_only": lambda p: tools.script(
            p, LOOP + "import warnings\nwarnings.warn('lr_scheduler.step() before optimizer.step()')\n"
        ),
        "noisy_llm_c": lambda p: writers.llm_c(
            p, language(Knobs(seed=131, batch=4, rate=1e-2, schedule=cosine(300, 20)))
        ),
    }
    return {name: (write, None) for name, write in made.items()}


def later() -> dict[str, Case]:
    """Made after everything above had been mended, and judged once before anything else was."""
    halves = lambda s: 0.5 ** (s // 60)  # noqa: E731
    return {
        "later_rate_jump_llm_c": (lambda p: writers.llm_c(p, regression(Knobs(schedule=_jump(90, 200), seed=301, rate=2e-3, steps=200))), Expected(RATE, 90, 200)),
        "later_rate_jump_keras_bars": (lambda p: writers.keras_bars(p, classes(Knobs(schedule=_jump(240, 150), seed=302, steps=400))), Expected((*RATE, "loss_divergence"), 25, 40)),
        "later_nan_first_step_titan": (lambda p: writers.titan(p, language(Knobs(seed=303, on_loss=_log_zero(0), steps=60))), Expected(NONFINITE, 0, 60)),
        "later_nan_bars": (lambda p: writers.bars(p, classes(Knobs(seed=304, on_batch=_nan_batch(260)))), Expected(NONFINITE, 260)),
        "later_nan_ranks": (lambda p: writers.ranks(p, regression(Knobs(seed=305, on_loss=_log_zero(75), steps=150)), num=2), Expected(NONFINITE, 75, 150)),
        "later_overfit_llm_c": (lambda p: writers.llm_c(p, classes(Knobs(seed=306, num_data=100, eval_every=20, steps=500, rate=8e-3), noise=2.5)), Expected(("overfitting",), None)),
        "later_labels_fairseq": (lambda p: writers.fairseq(p, language(Knobs(seed=307, on_batch=_shuffled(240), steps=400))), Expected(("loss_divergence", "distribution_shift"), 240, 400)),
        "later_zero_gradients_yolo_free": (lambda p: writers.fairseq(p, regression(Knobs(seed=308, on_loss=lambda loss, _s: loss.detach() * 0 + 1.3 + 0 * loss))), Expected(("zero_gradients", "graph_detached", "loss_plateau"), 0)),
        "later_entropy_trl": (lambda p: writers.trl(p, policy(seed=9, steps=250, rate=0.1, bonus=-3.0)), Expected(("entropy_collapse",), None)),
        "later_two_ranks_raise": (lambda p: (p / "slurm.out").write_text("".join(f"{r}: step {i} loss {2 - i / 100:.3f}\n" for i in range(20) for r in range(3)) + '2: Traceback (most recent call last):\n2:   File "/home/me/run.py", line 17, in step\n2:     batch = next(loader)\n2: FileNotFoundError: [Errno 2] No such file or directory: shard-0017.tar\n0: Traceback (most recent call last):\n0:   File "/home/me/run.py", line 40, in step\n0:     dist.all_reduce(loss)\n0: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:31911\n'), Expected(("script_error",), 19, 20, (2,))),
        "later_slow_divergence_epochs": (lambda p: writers.epochs(p, regression(Knobs(seed=310, steps=600, on_loss=lambda loss, s: loss if s < 400 else -0.2 * loss, rate=1e-2)), per_epoch=20), Expected(("loss_divergence", *RISING), 21, 30)),
        "later_step_decay_fairseq": (lambda p: writers.fairseq(p, classes(Knobs(seed=311, schedule=halves))), None),
        "later_one_cycle_wandb": (lambda p: tools.wandb(p, language(Knobs(seed=312, rate=1e-2, schedule=lambda s: min((s + 1) / 100, (301 - s) / 200), eval_every=25))), None),
        "later_restarts_mlruns": (lambda p: tools.mlruns(p, classes(Knobs(seed=313, steps=150, rate=1e-2, schedule=lambda s: 0.05 + 0.95 * (1 - (s % 50) / 50)))), None),
        "later_batch_of_one_bars": (lambda p: writers.bars(p, regression(Knobs(seed=314, batch=1))), None),
        "later_policy_verl": (lambda p: writers.verl(p, policy(seed=11, steps=120, bonus=0.2, rate=0.01)), None),
        "later_gan_jsonl": (lambda p: writers.json_lines(p, adversaries(seed=3, steps=250)), None),
        "later_fine_tuning_state": (lambda p: writers.trainer_state(p, language(Knobs(seed=316, warm=400, rate=5e-4, every=10, eval_every=50))), None),
        "later_resumed_twice_csv": (_twice, None),
        "later_dropout_epochs": (lambda p: writers.epochs(p, language(Knobs(seed=318, dropout=0.4, eval_every=20)), per_epoch=20), None),
        "later_short": (lambda p: writers.hf4(p, classes(Knobs(seed=319, steps=8))), None),
    }  # fmt: skip


def _twice(path: Path) -> None:
    rows = list(classes(Knobs(seed=317)))
    writers.plain_csv(path, rows[:120] + rows[100:220] + rows[180:])


def _restarted(path: Path) -> None:
    for number in range(3):
        folder = path / str(number)
        folder.mkdir()
        writers.nanogpt(folder, language(Knobs(seed=200 + number, steps=120, eval_every=40)))
    text = "".join((path / str(number) / "nano.log").read_text() for number in range(3))
    for number in range(3):
        shutil.rmtree(path / str(number))
    (path / "nano.log").write_text(text)


def _resumed(path: Path) -> None:
    rows = list(language(Knobs(seed=117)))
    writers.build_nanogpt(path, rows[:200] + rows[150:])


def _smoothed(rows):  # type: ignore[no-untyped-def]
    level = None
    for row in rows:
        level = row["loss"] if level is None else 0.95 * level + 0.05 * row["loss"]
        yield row | {"loss": level}


def _curriculum():  # type: ignore[no-untyped-def]
    for stage in range(3):
        for row in classes(Knobs(seed=210 + stage, steps=120), num=5 + 10 * stage, noise=0.6 + 0.4 * stage):
            yield row | {"step": row["step"] + 120 * stage}


def _without_places(folder: Path) -> None:
    """Paths of the machine that recorded are nobody's business: others of the same length stand for them, with checksums that fit."""
    known = {str(folder.parent): "r", sys.prefix: "v", sys.base_prefix: "p", str(Path(torch.__file__).parents[4]): "s"}
    for file in [file for file in folder.rglob("*") if file.is_file()]:
        if file.parent.name in {"logs", "files"} and "wandb" in file.parts:
            file.unlink()
            continue
        content = file.read_bytes()
        for path, letter in known.items():
            content = content.replace(path.encode(), (f"/{letter}" * len(path))[: len(path)].encode())
        file.write_bytes(_checked(content) if content.startswith(b":W&B") else content)


def _checked(content: bytes) -> bytes:
    """Wandb's blocks, with their checksums made again."""
    made, at = bytearray(content), 7
    while at + 7 <= len(made):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        _, length, kind = struct.unpack("<IHB", made[at : at + 7])
        struct.pack_into("<I", made, at, zlib.crc32(bytes([kind]) + made[at + 7 : at + 7 + length]))
        at += 7 + length
    return bytes(made)


def main(arguments: list[str]) -> None:
    """Write the cases into a folder, and the archive beside this file if all were made."""
    target, names = Path(arguments[0]), arguments[1:]
    cases = faulty() | healthy() | later()
    save({name: expected for name, (_, expected) in cases.items()})
    for name, (write, _) in cases.items():
        if names and name not in names:
            continue
        folder = target / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write(folder)
        _without_places(folder)
        print(name, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
    if all((target / name).exists() for name in cases):
        with tarfile.open(Path(__file__).with_name("cases.tar.xz"), "w:xz") as archive:
            for name in cases:
                archive.add(target / name, name)


if __name__ == "__main__":
    main(sys.argv[1:])
