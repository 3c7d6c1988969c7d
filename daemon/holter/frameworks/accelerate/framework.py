"""What holter knows of accelerate in particular."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holter.rank.framework import Framework, Keeper, LogFunction, SaveFunction, absolute

if TYPE_CHECKING:
    from holter.rank.context import Context
    from holter.rank.undo.state_parts import Copies, Source, StatePart

_ACCELERATOR = ("accelerate.accelerator", "Accelerator")


def _values(_accelerator: Any, values: Any = None, *_: Any, **__: Any) -> Any:
    return values


def _where(_args: tuple[Any, ...], _kwargs: Mapping[str, Any], result: Any) -> str:
    """Return the directory that `save_state` wrote to, which is its result."""
    return absolute(result)


class Accelerate(Framework):
    """A script that uses an Accelerator."""

    name = checkpoint = "accelerate"
    resume = "accelerator.load_state({path!r}), then skip_first_batches(loader, batches of the epoch that are done)"
    module, owner = _ACCELERATOR
    saves = (
        SaveFunction(*_ACCELERATOR, "save_state", checkpoint="accelerate", where=_where),
        SaveFunction(*_ACCELERATOR, "save_model"),
    )
    logs = (LogFunction(*_ACCELERATOR, "log", read=_values),)

    def optimizers_of(self, owner: Any) -> Sequence[Any]:
        """Return the optimizers that the Accelerator prepared."""
        return getattr(owner, "_optimizers", ())

    def registered(self, optimizer: Any) -> Callable[[], Iterable[Any]] | None:
        """Return a function that lists the objects given to `register_for_checkpointing`; None if no Accelerator has this optimizer."""
        for accelerator in self.owners([optimizer]):
            reference = weakref.ref(accelerator)
            return lambda: getattr(reference(), "_custom_objects", ())
        return None

    def counters(self, optimizers: Sequence[Any]) -> "Iterator[Source]":
        """Yield what must be put back: the micro-steps that `accumulate` counts, and registered objects."""
        for accelerator in self.owners(optimizers):
            from holter.rank.undo.state_parts import source_of  # noqa: PLC0415  imports torch

            yield source_of(_counted, accelerator)

    def keeper(self, context: "Context", optimizers: Sequence[Any]) -> Keeper | None:
        """Return a keeper that saves with `save_state`; None if no Accelerator has these optimizers."""
        for accelerator in self.owners(optimizers):
            from holter.frameworks.accelerate.keeper import AccelerateKeeper  # noqa: PLC0415  imports accelerate

            return AccelerateKeeper(accelerator, optimizers, context)
        return None


def _counted(accelerator: Any) -> "StatePart":
    """Copy the counters.

    This happens at the beginning of a step's first forward pass, when `accumulate` has already counted this micro-step.
    """
    from holter.rank.undo.state_parts import StatePart, put_image  # noqa: PLC0415  imports torch

    def put(accelerator: Any, image: Any, copies: "Copies") -> None:
        accelerator.step = image["step"]
        for each, kept in zip(_registered(accelerator), image["registered"], strict=True):
            each.load_state_dict(put_image(None, kept, copies))

    begun = accelerator.step % accelerator.gradient_accumulation_steps
    registered = _registered(accelerator)
    state = {"step": accelerator.step - begun, "registered": [each.state_dict() for each in registered]}
    return StatePart(weakref.ref(accelerator), state, put, is_moving=True, apart=(accelerator, *registered))


def _registered(accelerator: Any) -> list[Any]:
    """Return the script's own registered objects, and schedulers that are not torch's; torch's are found elsewhere."""
    kind = sys.modules["torch.optim.lr_scheduler"].LRScheduler
    schedulers = accelerator._schedulers  # noqa: SLF001
    foreign = [each for each in schedulers if not isinstance(getattr(each, "scheduler", each), kind)]
    return [*accelerator._custom_objects, *foreign]  # noqa: SLF001
