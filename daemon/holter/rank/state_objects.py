"""What belongs to a training state and is no model's own: learning-rate schedulers and loss scalers.

Nobody tells us of schedulers and scalers: they are looked for among all living objects, which takes a fraction of a second.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from holter.rank.search import living


def innermost(optimizer: Any) -> Any:
    """What a framework's wrappers hold: torch's own optimizer, whose step does the work."""
    while hasattr(inner := getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = inner
    return optimizer


def schedulers(optimizers: Sequence[torch.optim.Optimizer]) -> list[LRScheduler]:
    """Those of these optimizers, without the parts of a chain of schedulers."""
    ours = {id(innermost(optimizer)) for optimizer in optimizers}
    # The Trainer gives its scheduler accelerate's wrapper of the optimizer.
    found = [each for each in living(LRScheduler) if id(innermost(getattr(each, "optimizer", None))) in ours]
    parts = {id(part) for each in found for part in getattr(each, "_schedulers", ())}
    return [each for each in found if id(each) not in parts]


def scalers() -> list[Any]:
    """Loss scalers that scale."""
    return [scaler for scaler in living(torch.amp.GradScaler) if scaler.is_enabled()]
