"""What the checks work on: small models, a training loop, a monitor in this process, a stream that is busy."""

import contextlib
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from holter import clock
from holter.page import PageWriter
from holter.rank.context import ObservationWriter
from holter.rank.monitor import Monitor

RING_BYTES = 1 << 20
TRIAL_CYCLES = 20_000_000
ALL_AT_EVERY_STEP = 1e9
"""A budget so large that every reading is made at every step."""
GUARD_WAIT_S = 600.0
"""A job's default from `config.py`, which this package may not import; a test keeps them equal."""


class GptShape(NamedTuple):
    """Shape of a decoder of the usual kind, and of its batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int

    @property
    def num_parameters(self) -> int:
        """Number of parameters, with tied embeddings counted once."""
        return self.width * (self.vocabulary + self.length) + 12 * self.layers * self.width**2


class _Block(nn.Module):  # type: ignore[misc]  # torch is not looked into
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = nn.Linear(shape.width, 3 * shape.width)
        self.project = nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.attention(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """A small GPT."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.Sequential(*(_Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each next token."""
        x = self.tokens(ids[:, :-1]) + self.places.weight
        logits = functional.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


class TrainingLoop:
    """A training loop that makes no synchronisation of its own."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, *, is_mixed: bool = False) -> None:
        self.model, self.inputs = model, inputs
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self._is_mixed = is_mixed

    def step(self) -> None:
        """Make one training step and drop the gradients."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self._is_mixed):
            loss = self.model(self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Perceptron(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """A model of two layers, with few tensors because a device may be slow."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = self.layers(inputs).square().mean()
        return loss


def small_loop() -> TrainingLoop:
    """Return the loop of a perceptron, with the same weights and inputs at every call."""
    torch.manual_seed(0)
    model = Perceptron().cuda()
    return TrainingLoop(model, torch.randn(16, 32, device="cuda"))


def gpt_loop(shape: GptShape) -> TrainingLoop:
    """Return the loop of a GPT in mixed precision, with the same weights and inputs at every call."""
    torch.manual_seed(0)
    model = Gpt(shape).cuda()
    ids = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), device="cuda")
    return TrainingLoop(model, ids, is_mixed=True)


class _Agent:
    """Stands in for a halt agent, so that every step is checked for being finite as in a job that may be halted; no step here may be held."""

    def is_wanted(self) -> bool:
        return True

    def is_due(self, _step: int) -> bool:
        return False

    def hold(self, step: int, why: str, *, num_skipped: int) -> None:
        raise AssertionError(f"step {step} of a healthy loop was held ({why}, {num_skipped})")


@contextlib.contextmanager
def worn(*, budget: float = ALL_AT_EVERY_STEP, floor_s: float = 0.0, snapshot_every: int = 0) -> Iterator[Monitor]:
    """Install a monitor in this process as in a rank; nobody reads what it writes."""
    page = PageWriter.create(rank=0, world_size=1, pid=os.getpid(), started_ticks=1, ring_bytes=RING_BYTES)
    monitor = Monitor(
        ObservationWriter(page, 0),
        world_size=1,
        budget=budget,
        floor_s=floor_s,
        snapshot_every=snapshot_every,
        guard_wait_s=GUARD_WAIT_S,
    )
    monitor.context.hold.agent = _Agent()  # type: ignore[assignment]  # what hooks ask of it, without a coordinator behind it
    monitor.install()
    try:
        yield monitor
    finally:
        monitor.uninstall()
        page.close()


def failures(monitor: Monitor) -> list[str]:
    """Return one sentence for each hook that raised."""
    return [f"{hook} failed {number} times" for hook, number in monitor.context.guard.failures.items()]


@lru_cache(maxsize=1)
def cycles_a_second() -> float:
    """Return the rate of the clock that `torch.cuda._sleep` counts, in cycles per second."""
    torch.cuda._sleep(1000)  # noqa: SLF001 - nothing public keeps a stream busy without work
    torch.cuda.synchronize()
    began_s = clock.monotonic_s()
    torch.cuda._sleep(TRIAL_CYCLES)  # noqa: SLF001
    torch.cuda.synchronize()
    return TRIAL_CYCLES / (clock.monotonic_s() - began_s)


class BusyStream:
    """Blocks the current stream for some seconds while the host can go on."""

    def __init__(self, seconds: float) -> None:
        cycles = round(seconds * cycles_a_second())
        self._event = torch.cuda.Event()
        torch.cuda._sleep(cycles)  # noqa: SLF001
        self._event.record()

    @property
    def is_busy(self) -> bool:
        """Whether the stream is still blocked."""
        return not self._event.query()
