"""What holter knows of the Hugging Face Trainer in particular."""

import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holter.rank.framework import Framework, Keeper, LogFunction, SaveFunction, absolute
from holter.records import Phase

if TYPE_CHECKING:
    from holter.rank.context import Context
    from holter.rank.undo.state_parts import Copies, Source, StatePart

_TRAINER = ("transformers.trainer", "Trainer")


def _where(args: tuple[Any, ...], kwargs: Mapping[str, Any], _result: Any) -> str:
    """Return the path of `_save_checkpoint(model, trial)`, which the Trainer names by its step."""
    trainer = args[0]
    trial = kwargs.get("trial", args[2] if len(args) > 2 else None)  # noqa: PLR2004 - the signature's
    return absolute(os.path.join(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}"))  # noqa: SLF001, PTH118 - may be an address


def _logs(handler: Any, _args: Any = None, _state: Any = None, _control: Any = None, logs: Any = None, **_: Any) -> Any:
    # holter's own callback passes it on.
    is_told = any(type(callback).__name__ == "HolterCallback" for callback in getattr(handler, "callbacks", ()))
    return None if is_told else logs


class HfTrainer(Framework):
    """A script with a Trainer, and the Accelerator inside it."""

    name = checkpoint = "hf_trainer"
    resume = "trainer.train(resume_from_checkpoint={path!r})"
    module, owner = _TRAINER
    saves = (
        SaveFunction(*_TRAINER, "_save_checkpoint", checkpoint="hf_trainer", where=_where),
        SaveFunction(*_TRAINER, "save_model"),
        SaveFunction(*_TRAINER, "evaluate", phase=Phase.EVALUATION),
        SaveFunction(*_TRAINER, "predict", phase=Phase.EVALUATION),
    )
    logs = (LogFunction("transformers.trainer_callback", "CallbackHandler", "on_log", read=_logs),)

    def count_steps(self, optimizer: Any) -> int | None:
        """Return the steps in the Trainer's state; None if no Trainer has this optimizer."""
        return next((int(trainer.state.global_step) for trainer in self.owners([optimizer])), None)

    def counters(self, optimizers: Sequence[Any]) -> "Iterator[Source]":
        """Yield what must be put back: TrainerState, flow control, callbacks with a state, operations counted since the last log."""
        for trainer in self.owners(optimizers):
            from holter.rank.undo.state_parts import source_of  # noqa: PLC0415  imports torch

            yield source_of(_counted, trainer)

    def keeper(self, context: "Context", optimizers: Sequence[Any]) -> Keeper | None:
        """Return a keeper that saves with the pieces of `_save_checkpoint`; None if no Trainer has these optimizers."""
        for trainer in self.owners(optimizers):
            from holter.frameworks.hf_trainer.keeper import TrainerKeeper  # noqa: PLC0415  imports transformers

            return TrainerKeeper(trainer, context)
        return None


def _counted(trainer: Any) -> "StatePart":
    """Copy the counters.

    This happens at the beginning of a step's first forward pass; the Trainer counts this micro-step afterwards.
    """
    from holter.rank.undo.state_parts import StatePart, put_image  # noqa: PLC0415  imports torch

    def put(trainer: Any, image: Any, copies: "Copies") -> None:
        vars(trainer.state).update(put_image(None, image["state"], copies))
        del trainer.state.log_history[image["num_logged"] :]
        for each, kept in zip(exporting(trainer), image["exported"], strict=True):
            exported = put_image(None, kept, copies)
            vars(each).update(exported["args"] | exported["attributes"])
        trainer.current_flos = image["flos"]

    state = {
        "state": {name: value for name, value in vars(trainer.state).items() if name != "log_history"},
        # Entries are only ever added.
        "num_logged": len(trainer.state.log_history),
        "exported": [each.state() for each in exporting(trainer)],
        "flos": trainer.current_flos,
    }
    return StatePart(weakref.ref(trainer), state, put, is_moving=True, apart=(trainer,))


def exporting(trainer: Any) -> list[Any]:
    """Return the callbacks that have a state of their own, and the flow control."""
    kind = sys.modules["transformers.trainer_callback"].ExportableState
    return [each for each in (*trainer.callback_handler.callbacks, trainer.control) if isinstance(each, kind)]
