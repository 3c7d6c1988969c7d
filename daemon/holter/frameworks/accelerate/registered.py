"""Which objects a script has registered with its framework, to be saved with the state: accelerate's `register_for_checkpointing`."""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from holter.frameworks.saving.keeper import shares
from holter.rank.search import living


def find(optimizer: torch.optim.Optimizer) -> Callable[[], Sequence[Any]] | None:
    """Gives those that are registered when it is called, with the Accelerator that prepared this optimizer; None: there is none."""
    kind: Any = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    for accelerator in living(kind) if kind is not None else ():
        if shares(getattr(accelerator, "_optimizers", ()), [optimizer]):
            reference = weakref.ref(accelerator)
            return lambda: getattr(reference(), "_custom_objects", ())
    return None
