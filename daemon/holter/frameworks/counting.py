"""How many optimizer steps a framework says that the run has completed, over all its lives: it restores that with its checkpoints."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from holter.frameworks.saving.keeper import shares
from holter.rank.search import living

COUNTERS: tuple[tuple[str, str, Callable[[Any], int]], ...] = (
    ("transformers.trainer", "Trainer", lambda trainer: trainer.state.global_step),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", lambda engine: engine.global_steps),
)
"""What the script must have imported, the class in it, and what it has counted; the outermost framework first."""


def count(optimizer: torch.optim.Optimizer) -> tuple[int, str] | None:
    """Of the framework that steps this optimizer, and its name; None: it has none that counts."""
    for module, name, read in COUNTERS:
        kind: Any = getattr(sys.modules.get(module), name, None)
        for each in living(kind) if kind is not None else ():
            if shares([getattr(each, "optimizer", None)], [optimizer]):
                return int(read(each)), name
    return None
