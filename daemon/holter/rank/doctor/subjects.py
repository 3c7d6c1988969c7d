"""What the checks are tried on: small models, a loop, a monitor worn in this very process, a stream that is busy."""

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
"""A budget that holds nothing back: every reading is made at every step."""
GUARD_WAIT_S = 600.0
"""As a job has it unless told otherwise (`config.py`, which lies above this package; a test holds them equal)."""


class GptShape(NamedTuple):
    """A decoder of the usual kind."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int

    @property
    def num_parameters(self) -> int:
        """Tied embeddings counted once."""
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
    """The model of the checks."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.Sequential(*(_Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of guessing each next token."""
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
        """Forward, backward, update, gradients dropped."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self._is_mixed):
            loss = self.model(self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Perceptron(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """Two layers: few tensors, since a device may be slow."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The loss."""
        loss: torch.Tensor = self.layers(inputs).square().mean()
        return loss


def small_loop() -> TrainingLoop:
    """Of a perceptron, the same at every call."""
    torch.manual_seed(0)
    model = Perceptron().cuda()
    return TrainingLoop(model, torch.randn(16, 32, device="cuda"))


def gpt_loop(shape: GptShape) -> TrainingLoop:
    """Of a GPT, in mixed precision."""
    torch.manual_seed(0)
    model = Gpt(shape).cuda()
    ids = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), device="cuda")
    return TrainingLoop(model, ids, is_mixed=True)


class _Agent:
    """Asks of every step whether it is finite, as in a job that may be halted; these never have to be."""

    def is_wanted(self) -> bool:
        return True

    def is_due(self, _step: int) -> bool:
        return False

    def hold(self, step: int, why: str, *, num_skipped: int) -> None:
        raise AssertionError(f"step {step} of a healthy loop was held ({why}, {num_skipped})")


@contextlib.contextmanager
def worn(*, budget: float = ALL_AT_EVERY_STEP, floor_s: float = 0.0, snapshot_every: int = 0) -> Iterator[Monitor]:
    """A monitor in this process, as a rank wears it; nobody reads what it writes."""
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
    """Hooks that raised, in sentences."""
    return [f"{hook} failed {number} times" for hook, number in monitor.context.guard.failures.items()]


@lru_cache(maxsize=1)
def cycles_a_second() -> float:
    """Of the clock that `torch.cuda._sleep` counts."""
    torch.cuda._sleep(1000)  # noqa: SLF001 - nothing public keeps a stream busy without work
    torch.cuda.synchronize()
    began_s = clock.monotonic_s()
    torch.cuda._sleep(TRIAL_CYCLES)  # noqa: SLF001
    torch.cuda.synchronize()
    return TRIAL_CYCLES / (clock.monotonic_s() - began_s)


class BusyStream:
    """The current stream has nothing done for some time; the host can go on."""

    def __init__(self, seconds: float) -> None:
        cycles = round(seconds * cycles_a_second())
        self._event = torch.cuda.Event()
        torch.cuda._sleep(cycles)  # noqa: SLF001
        self._event.record()

    @property
    def is_busy(self) -> bool:
        """Whether that is still so."""
        return not self._event.query()
