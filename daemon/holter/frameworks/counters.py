"""What frameworks count of a run, and a script registers with them, for snapshots: a halt may undo several steps.

    accelerate    micro-steps of `accumulate`, and objects given to `register_for_checkpointing`
    Trainer       its TrainerState, its flow control, callbacks that export a state, operations counted since the last log

Taken at the beginning of a step's first forward pass. `accumulate` has counted this micro-step by then, the Trainer counts it afterwards.
"""

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from holter.frameworks.saving.keeper import shares
from holter.rank.search import living
from holter.rank.undo import state_parts
from holter.rank.undo.state_parts import Copies, Source, StatePart, source_of


def find(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Source]:
    """Of the frameworks that the script has imported and that train with one of these optimizers."""
    if "accelerate.accelerator" in sys.modules:
        kind = sys.modules["accelerate.accelerator"].Accelerator
        for accelerator in living(kind):
            if shares(getattr(accelerator, "_optimizers", ()), optimizers):
                yield source_of(_of_accelerator, accelerator)
    if "transformers.trainer" in sys.modules:
        for trainer in living(sys.modules["transformers.trainer"].Trainer):
            if shares([trainer.optimizer], optimizers):
                yield source_of(_of_trainer, trainer)


def _of_accelerator(accelerator: Any) -> StatePart:
    begun = accelerator.step % accelerator.gradient_accumulation_steps
    registered = _registered(accelerator)
    state = {"step": accelerator.step - begun, "registered": [each.state_dict() for each in registered]}
    return StatePart(
        weakref.ref(accelerator), state, _put_accelerator, is_moving=True, apart=(accelerator, *registered)
    )


def _put_accelerator(accelerator: Any, image: Any, copies: Copies) -> None:
    accelerator.step = image["step"]
    for registered, kept in zip(_registered(accelerator), image["registered"], strict=True):
        registered.load_state_dict(state_parts.put_image(None, kept, copies))


def _registered(accelerator: Any) -> list[Any]:
    """The script's own objects, and schedulers that are none of torch's: those are found without us."""
    schedulers = accelerator._schedulers  # noqa: SLF001
    foreign = [each for each in schedulers if not isinstance(getattr(each, "scheduler", each), LRScheduler)]
    return [*accelerator._custom_objects, *foreign]  # noqa: SLF001


def _of_trainer(trainer: Any) -> StatePart:
    counted = vars(trainer.state)
    state = {
        "state": {name: value for name, value in counted.items() if name != "log_history"},
        # Entries are only ever added.
        "num_logged": len(trainer.state.log_history),
        "exported": [each.state() for each in _exporting(trainer)],
        "flos": trainer.current_flos,
    }
    return StatePart(weakref.ref(trainer), state, _put_trainer, is_moving=True, apart=(trainer,))


def _put_trainer(trainer: Any, image: Any, copies: Copies) -> None:
    vars(trainer.state).update(state_parts.put_image(None, image["state"], copies))
    del trainer.state.log_history[image["num_logged"] :]
    for each, kept in zip(_exporting(trainer), image["exported"], strict=True):
        exported = state_parts.put_image(None, kept, copies)
        vars(each).update(exported["args"] | exported["attributes"])
    trainer.current_flos = image["flos"]


def _exporting(trainer: Any) -> list[Any]:
    kind = sys.modules["transformers.trainer_callback"].ExportableState
    return [each for each in (*trainer.callback_handler.callbacks, trainer.control) if isinstance(each, kind)]
