"""How far the run had come before this process made its first optimizer step: a script that goes on from a checkpoint says it to nobody.

    Trainer, DeepSpeed     their own count of steps, skipped ones included, as the framework tells it
    any other              the count that most optimizers keep with their moments, which comes back with them; a step that a scaler
                           skips is in no such count, nor in ours

Nothing is guessed: an optimizer without a count, or with one that lies on a device, which we would have to wait for, says nothing.
"""

from typing import Any

import torch

from holter.rank.context import Context
from holter.records import Begun


def tell(context: Context, optimizer: torch.optim.Optimizer) -> None:
    """Once, before the first step is applied."""
    found = context.frameworks.count_steps(optimizer)
    count, source = found if found is not None else (_kept(optimizer), type(optimizer).__name__)
    context.writer.say(context.log.step, Begun(completed=count, source=source if count is not None else ""))


def _kept(optimizer: torch.optim.Optimizer) -> int | None:
    """The largest: what was frozen for a while has counted less. None: there is none."""
    kept: list[Any] = [
        state.get("step") for state in (*optimizer.state.values(), *optimizer.param_groups) if isinstance(state, dict)
    ]
    return max((int(value) for value in kept if _is_count(value)), default=None)


def _is_count(value: Any) -> bool:
    if type(value) is torch.Tensor:
        if not value.is_cpu or value.numel() != 1 or value.is_complex():
            return False
        value = value.item()
    # NaN and infinity are equal to no floor of theirs.
    return type(value) in (int, float) and value >= 0 and value == value // 1
