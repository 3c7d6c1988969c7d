"""A framework's own count of steps is found by the optimizer that it steps."""

from types import SimpleNamespace

import torch
from torch import nn
from transformers import Trainer

from holter.frameworks.all import ALL
from holter.rank.framework import Frameworks


class Half(Trainer):
    """As one that is about to step, with nothing else."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, global_step: int) -> None:
        self.optimizer, self.state = optimizer, SimpleNamespace(global_step=global_step)


def test_a_trainer_says_how_far_its_run_has_come() -> None:
    mine, other = (torch.optim.SGD(nn.Linear(2, 2).parameters()) for _ in range(2))
    kept = Half(mine, 120), Half(None, 7)
    assert (120, "Trainer") == Frameworks(ALL).count_steps(mine)
    assert Frameworks(ALL).count_steps(other) is None
    del kept
