"""Small trainings that really run, a second each on one core: what they log is what the cases of `holter diagnose` are made of.

A job yields rows: what a training script would log at a step. Faults are put in where people put them: the schedule, the loss, the data.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LoggedNumbers = dict[str, float]
Schedule = Callable[[int], float]


@dataclass
class Knobs:
    """What a case changes of a training."""

    steps: int = 300
    rate: float = 3e-3
    schedule: Schedule = lambda _step: 1.0
    """Factor of the rate at a step."""
    clip: float | None = None
    every: int = 1
    eval_every: int = 0
    seed: int = 0
    batch: int = 32
    optimizer: str = "adam"
    on_loss: Callable[[Tensor, int], Tensor] | None = None
    on_batch: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] | None = None
    dropout: float = 0.0
    by_layer: bool = False
    depth: int = 2
    activation: type[nn.Module] = nn.Tanh
    warm: int = 0
    """Steps that were trained before the log begins."""
    num_data: int = 0
    """Samples of the training set; 0: always new ones."""
    width: int = 64


def cosine(total: int, warmup: int = 0) -> Schedule:
    """Warm-up, then half a cosine."""
    return lambda step: (
        (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
    )


class TinyLanguageModel(nn.Module):
    """The next token from the last four."""

    def __init__(self, knobs: Knobs, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16)
        layers: list[nn.Module] = []
        for number in range(knobs.depth):
            layers += [
                nn.Linear(64 if number == 0 else knobs.width, knobs.width),
                knobs.activation(),
                nn.Dropout(knobs.dropout),
            ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(knobs.width if knobs.depth else 64, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens).flatten(1)))


def language(knobs: Knobs, vocabulary: int = 64) -> Iterator[LoggedNumbers]:
    """A language of a hidden table: token i is followed by one of three."""
    torch.manual_seed(knobs.seed)
    table = torch.randint(0, vocabulary, (vocabulary, 3))

    def batch(num: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, vocabulary, (num, 4))
        return tokens, table[tokens[:, -1], torch.randint(0, 3, (num,))]

    yield from _train(knobs, TinyLanguageModel(knobs, vocabulary), batch, nn.functional.cross_entropy)


class TinyClassifier(nn.Module):
    """Layers of one width."""

    def __init__(self, knobs: Knobs, num_in: int, num_out: int) -> None:
        super().__init__()
        sizes = [num_in] + [knobs.width] * knobs.depth
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(sizes):
            layers += [nn.Linear(a, b), knobs.activation(), nn.Dropout(knobs.dropout)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(sizes[-1], num_out)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers(inputs))


def classes(knobs: Knobs, num: int = 10, noise: float = 1.0) -> Iterator[LoggedNumbers]:
    """Clouds of points, one a class."""
    torch.manual_seed(knobs.seed)
    centres = torch.randn(num, 20)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, num, (size,))
        return centres[labels] + noise * torch.randn(size, 20), labels

    yield from _train(knobs, TinyClassifier(knobs, 20, num), batch, nn.functional.cross_entropy)


def regression(knobs: Knobs, noise: float = 0.1) -> Iterator[LoggedNumbers]:
    """A random function of ten numbers."""
    torch.manual_seed(knobs.seed)
    teacher = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)).requires_grad_(False)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(size, 10)
        return inputs, 3 * teacher(inputs) + noise * torch.randn(size, 1)

    yield from _train(knobs, TinyClassifier(knobs, 10, 1), batch, nn.functional.mse_loss)


def _train(
    knobs: Knobs, model: nn.Module, batch: Callable[[int], tuple[Tensor, Tensor]], criterion: Callable[..., Tensor]
) -> Iterator[LoggedNumbers]:
    torch.set_num_threads(1)
    kept = batch(knobs.num_data) if knobs.num_data else None
    held_out = batch(512)
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    optimizer = kinds[knobs.optimizer](model.parameters(), lr=knobs.rate)
    for step in range(-knobs.warm, knobs.steps):
        rate = knobs.rate * (knobs.schedule(step) if step >= 0 else 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        if kept is None:
            inputs, labels = batch(knobs.batch)
        else:
            chosen = torch.randint(0, knobs.num_data, (knobs.batch,))
            inputs, labels = kept[0][chosen], kept[1][chosen]
        if knobs.on_batch is not None and step >= 0:
            inputs, labels = knobs.on_batch(inputs, labels, step)
        loss = criterion(model(inputs), labels)
        if knobs.on_loss is not None and step >= 0:
            loss = knobs.on_loss(loss, step)
        optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
        norm = float(
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], knobs.clip or math.inf)
        )
        by_layer = {
            f"grad_norm/{name}": float(p.grad.norm())
            for name, p in model.named_parameters()
            if knobs.by_layer and p.grad is not None and name.endswith("weight")
        }
        if not (knobs.clip is None and math.isinf(norm)):
            optimizer.step()
        if step < 0 or step % knobs.every:
            continue
        row = {"step": step, "loss": float(loss.detach()), "lr": rate, "grad_norm": norm, **by_layer}
        if knobs.eval_every and step % knobs.eval_every == 0:
            model.eval()
            with torch.no_grad():
                row["val_loss"] = float(criterion(model(held_out[0]), held_out[1]))
            model.train()
        yield row


def policy(  # noqa: PLR0917
    steps: int = 200,
    seed: int = 0,
    bonus: float = 0.01,
    rate: float = 0.05,
    arms: int = 32,
    reward: Callable[[Tensor, int], Tensor] | None = None,
    group: int = 8,
) -> Iterator[LoggedNumbers]:
    """REINFORCE with groups on a bandit that depends on its prompt, as GRPO does it."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    values = torch.rand(16, arms)
    logits = nn.Embedding(16, arms)
    nn.init.normal_(logits.weight, std=0.1)
    reference = logits.weight.detach().clone().log_softmax(-1)
    optimizer = torch.optim.Adam(logits.parameters(), lr=rate)
    for step in range(1, steps + 1):
        prompts = torch.randint(0, 16, (16,))
        logs = logits(prompts).log_softmax(-1)
        actions = torch.multinomial(logs.exp(), group, replacement=True)
        rewards = values[prompts].gather(1, actions) + 0.2 * torch.randn(actions.shape)
        if reward is not None:
            rewards = reward(rewards, step)
        spread = rewards.std(1, keepdim=True)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (spread + 1e-4)
        entropy = -(logs.exp() * logs).sum(-1).mean()
        kl = (logs.exp() * (logs - reference[prompts])).sum(-1).mean()
        loss = -(advantages * logs.gather(1, actions)).mean() - bonus * entropy
        optimizer.zero_grad()
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(logits.parameters(), 1.0))
        optimizer.step()
        yield {"step": step, "loss": float(loss.detach()), "grad_norm": norm, "lr": rate, "reward": float(rewards.mean()), "reward_std": float(spread.mean()),
               "frac_reward_zero_std": float((spread < 1e-6).float().mean()), "kl": float(kl.detach()), "entropy": float(entropy.detach())}  # fmt: skip


def adversaries(steps: int = 400, seed: int = 0) -> Iterator[LoggedNumbers]:
    """A small GAN of points on a circle."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    first, second = (
        torch.optim.Adam(one.parameters(), lr=2e-3, betas=(0.5, 0.99)) for one in (generator, discriminator)
    )
    judge = nn.functional.binary_cross_entropy_with_logits
    for step in range(steps):
        angle = 2 * math.pi * torch.rand(64)
        real, fake = torch.stack([angle.cos(), angle.sin()], 1), generator(torch.randn(64, 4))
        loss_d = judge(discriminator(real), torch.ones(64, 1)) + judge(discriminator(fake.detach()), torch.zeros(64, 1))
        second.zero_grad()
        loss_d.backward()
        second.step()
        loss_g = judge(discriminator(fake), torch.ones(64, 1))
        first.zero_grad()
        loss_g.backward()
        first.step()
        yield {"step": step, "loss_G": float(loss_g.detach()), "loss_D": float(loss_d.detach())}
