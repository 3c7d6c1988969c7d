"""Averaged copies of the trained models, which no optimizer holds; a run that resumes without them has lost its average.

    watch.log(ema=average)          the script says so
    AveragedModel                   torch's own, if its parameters have the shapes of a trained model's
    any other module of such shapes, not part of a larger one, that is frozen, and changed in place again and again

A frozen copy to compare with (a reference model) is changed a few times while it is made, and rests then. A copy that
could be trained, and that nobody logs, cannot be distinguished from a model of an earlier training; changes through
`.data` are not seen.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.swa_utils import AveragedModel

from holter.rank.search import living, parameters_of, top_level, unique, variable_of

if TYPE_CHECKING:
    from holter.rank.context import Context

MANY_CHANGES = 16
"""Number of in-place changes of every parameter from which on it counts as updated; initialising and loading make
fewer."""


class Average(NamedTuple):
    """One averaged copy."""

    name: str
    """Variable that holds it in the script, or its class."""
    holder: Any
    """The module, or an object with a `state_dict`."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of it that a checkpoint must contain."""
        if isinstance(self.holder, torch.nn.Module):
            for name, parameter in self.holder.named_parameters():
                yield f"{self.name}, an average: {name}", parameter.detach()


def find(context: "Context", trained: Sequence[torch.nn.Module]) -> list[Average]:
    """Return the living averages, in the order of their names."""
    ours = {id(p) for model in trained for p in model.parameters()}
    # A model that an optimizer once stepped is no average of another.
    ours |= {id(p) for model in context.models if model.was_optimized for _, p in model.parameters}
    shapes = [_shapes(model.parameters()) for model in trained]
    found: dict[int, Any] = {id(each): each for each in context.models.averages}
    for module in (*living(AveragedModel), *top_level()):
        parameters = parameters_of(module)
        if _shapes(parameters) in shapes and (isinstance(module, AveragedModel) or _is_updated(parameters)):
            found[id(module)] = module
    # A wrapper, a part or an alias of a trained model is no average.
    return _named([each for each in found.values() if not any(id(p) in ours for p in parameters_of(each))])


def _named(found: Sequence[Any]) -> list[Average]:
    """Name the averages; those that no variable holds come last, because they may be waiting to be collected."""
    named = sorted(
        ((variable_of(each), type(each).__name__, each) for each in found), key=lambda it: (not it[0], it[:2])
    )
    averages: list[Average] = []
    for variable, label, holder in named:
        name = unique(variable or label, {each.name for each in averages})
        averages.append(Average(name, holder))
    return averages


def _shapes(parameters: Any) -> list[torch.Size]:
    return [parameter.shape for parameter in parameters]


def _is_updated(parameters: Sequence[Any]) -> bool:
    # Changes of inference tensors are not counted.
    resting = (p.requires_grad or p.is_inference() or p._version <= MANY_CHANGES for p in parameters)  # noqa: SLF001
    return bool(parameters) and not any(resting)
