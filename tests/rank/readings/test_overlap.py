"""Samples of training and evaluation that meet, by their content."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from holter.rank.readings.overlap import OverlapProbe, main_tensor

if TYPE_CHECKING:
    from holter.records import Overlap

pytest.importorskip("holter.rank._samples")


class Rank:
    """A probe, and what it says."""

    def __init__(self) -> None:
        self.told: list[Overlap] = []
        self.log = SimpleNamespace(step=0)
        writer = SimpleNamespace(say=lambda _, body: self.told.append(body))
        self.probe = OverlapProbe(SimpleNamespace(log=self.log, writer=writer))  # type: ignore[arg-type]

    def train(self, x: torch.Tensor, loader: int = -1, epoch: int = 0) -> None:
        for at in range(0, len(x), 8):
            self.probe.train([("batch[0]", x[at : at + 8])], loader, epoch)
            self.log.step += 1

    def evaluate_by_call(self, x: torch.Tensor) -> None:
        self.probe.evaluation_call(lambda: [("input", x)])

    def evaluate_loader(self, x: torch.Tensor, loader: int = 1, epoch: int = 0, *, is_called: bool = True) -> None:
        for at in range(0, len(x), 8):
            self.probe.fetched(loader, epoch, [("batch[0]", x[at : at + 8])], "Held")
            if is_called:
                self.evaluate_by_call(x[at : at + 8])
        self.probe.ended(loader)


@pytest.fixture
def rank() -> Iterator[Any]:
    torch.manual_seed(0)
    return Rank()


def test_a_loader_whose_samples_were_trained_on_is_told_with_counts(rank: Rank):
    x, held = torch.randn(64, 6), torch.randn(16, 6)
    rank.train(torch.cat([x, held[:8]]), loader=0)
    rank.evaluate_loader(held)
    assert (1, "Held", 16, 8, 72) == (
        rank.told[-1].loader, rank.told[-1].dataset, rank.told[-1].num_evaluated, rank.told[-1].num_met, rank.told[-1].num_trained,
    )  # fmt: skip
    assert rank.told[-1].is_distinctive


def test_samples_that_are_trained_on_later_are_met_too(rank: Rank):
    held = torch.randn(16, 6)
    rank.evaluate_loader(held)
    rank.train(torch.cat([torch.randn(64, 6), held]), loader=0)
    assert 8 <= rank.told[-1].num_met


def test_disjoint_sets_are_silent(rank: Rank):
    for epoch in range(3):
        torch.manual_seed(1)
        rank.train(torch.randn(64, 6), loader=0, epoch=epoch)
        rank.evaluate_loader(torch.randn(32, 6), epoch=epoch)
    assert [] == rank.told


def test_a_pass_without_an_evaluation_is_not_one(rank: Rank):
    x = torch.randn(64, 6)
    rank.evaluate_loader(x, is_called=False)
    rank.train(x, loader=0)
    assert [] == rank.told


def test_a_loader_that_is_trained_on_later_was_evaluated_on_purpose(rank: Rank):
    x = torch.randn(64, 6)
    rank.evaluate_loader(x, loader=0)
    rank.probe.trains(0)
    rank.train(x, loader=0)
    assert [] == rank.told


def test_rollouts_and_a_batch_s_own_accuracy_are_meant(rank: Rank):
    for _ in range(5):
        rollout = torch.randn(64, 6)
        rank.evaluate_by_call(rollout)
        rank.train(rollout)
    x = torch.randn(8, 6)
    for _ in range(20):
        rank.train(x)
        rank.evaluate_by_call(x)
    assert [] == rank.told


def test_a_held_out_tensor_that_is_evaluated_again_and_again_is_met(rank: Rank):
    held = torch.randn(32, 6)
    data = torch.cat([torch.randn(96, 6), held[:8]])
    for _ in range(3):
        rank.train(data)
        for _ in range(4):
            rank.train(torch.randn(8, 6))
        rank.evaluate_by_call(held)
    assert (-1, 8) == (rank.told[-1].loader, rank.told[-1].num_met)


def test_a_text_is_the_same_with_more_padding(rank: Rank):
    texts = torch.randint(1, 900, (16, 12))
    rank.train(torch.nn.functional.pad(texts, (0, 5)), loader=0)
    rank.evaluate_loader(torch.nn.functional.pad(texts, (0, 9)))
    assert 16 >= rank.told[-1].num_met >= 8
    assert not rank.told[-1].is_distinctive


def test_repeated_rows_are_counted_and_constant_ones_say_nothing(rank: Rank):
    rows = torch.arange(32)[:, None] % 4 * torch.ones(1, 6, dtype=torch.long) + torch.tensor([0, 1, 0, 1, 0, 1])
    rank.train(rows, loader=0)
    rank.evaluate_loader(rows)
    assert rank.told[-1].num_repeats > rank.told[-1].num_pairs // 20
    rank.told.clear()
    other = Rank()
    other.train(torch.zeros(64, 6), loader=0)
    other.evaluate_loader(torch.zeros(64, 6))
    assert [] == other.told


def test_the_largest_tensor_that_is_no_mask_stands_for_a_sample():
    x, mask = torch.zeros(4, 6), torch.zeros(4, 60)
    assert x is main_tensor([("batch['attention_mask']", mask), ("batch['x']", x), ("batch['labels']", mask)])
    assert None is main_tensor([("batch['x']", torch.zeros(6, 4).T), ("y", torch.zeros(4, dtype=torch.uint8))])
