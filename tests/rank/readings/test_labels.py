"""Classes, counted in the loss's own graph."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from holter.rank.readings.labels import LabelProbe
from holter.records import Labels

pytest.importorskip("holter.rank._samples")


def told(loss_of: object, num_samples: int = 8, num_steps: int = 13) -> list[Labels]:
    said: list[Labels] = []
    log = SimpleNamespace(step=0)
    probe = LabelProbe(SimpleNamespace(log=log, writer=SimpleNamespace(say=lambda _, body: said.append(body))))  # type: ignore[arg-type]
    for step in range(num_steps):
        log.step = step
        probe.look(loss_of(), lambda: num_samples)  # type: ignore[operator]
    return said


def test_classes_are_counted_for_every_sample_of_every_step():
    labels = torch.tensor([0, 0, 0, 0, 0, 0, 1, -100])
    scores = torch.randn(8, 3, requires_grad=True)
    (said,) = told(lambda: functional.cross_entropy(scores, labels) / 2)
    assert ({0: 72, 1: 12}, 3, False, 0) == (said.counts, said.num_classes, said.is_weighted, said.first_step)


def test_weights_and_two_classes_are_seen():
    scores = torch.randn(8, 3, requires_grad=True)
    weight = torch.tensor([1.0, 2.0, 3.0])
    (said,) = told(lambda: functional.cross_entropy(scores, torch.zeros(8, dtype=torch.long), weight=weight))
    assert said.is_weighted
    column = torch.zeros(8, 1)
    column[0] = 1
    score = torch.randn(8, 1, requires_grad=True)
    (said,) = told(lambda: functional.binary_cross_entropy_with_logits(score, column))
    assert ({0: 84, 1: 12}, 2) == (said.counts, said.num_classes)


def test_tokens_soft_labels_and_other_losses_are_not_counted():
    scores = torch.randn(8, 3, requires_grad=True)
    (said,) = told(lambda: functional.cross_entropy(scores, torch.zeros(8, dtype=torch.long)), num_samples=2)
    assert ({}, 3) == (said.counts, said.num_classes)
    assert [] == told(lambda: functional.binary_cross_entropy_with_logits(scores[:, :1], torch.full((8, 1), 0.5)))
    assert [] == told(lambda: functional.mse_loss(scores, torch.zeros(8, 3)))
