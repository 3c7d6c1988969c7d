"""What an Accelerator counts of a run, and a script registers with it, for snapshots: a halt may undo several steps.

Taken at the beginning of a step's first forward pass: `accumulate` has counted this micro-step by then.
"""

import weakref
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from holter.rank.undo.state_parts import Copies, Source, StatePart, put_image, source_of


def source(accelerator: Any) -> Source:
    """Its counters, each time as they are then."""
    return source_of(_take, accelerator)


def _take(accelerator: Any) -> StatePart:
    begun = accelerator.step % accelerator.gradient_accumulation_steps
    registered = _registered(accelerator)
    state = {"step": accelerator.step - begun, "registered": [each.state_dict() for each in registered]}
    return StatePart(weakref.ref(accelerator), state, _put, is_moving=True, apart=(accelerator, *registered))


def _put(accelerator: Any, image: Any, copies: Copies) -> None:
    accelerator.step = image["step"]
    for registered, kept in zip(_registered(accelerator), image["registered"], strict=True):
        registered.load_state_dict(put_image(None, kept, copies))


def _registered(accelerator: Any) -> list[Any]:
    """The script's own objects, and schedulers that are none of torch's: those are found without us."""
    schedulers = accelerator._schedulers  # noqa: SLF001
    foreign = [each for each in schedulers if not isinstance(getattr(each, "scheduler", each), LRScheduler)]
    return [*accelerator._custom_objects, *foreign]  # noqa: SLF001
