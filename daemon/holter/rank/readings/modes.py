"""Modules that are trained in evaluation mode: dropout that drops nothing, normalisation by statistics that no longer change.

    a model returns a result that leads back to its parameters     the modes of this call are noted
    an optimizer that holds its parameters is about to step        what was in evaluation mode at all these calls is reported, if it is new

A model that is evaluated, or called for another model's loss, was also called in training mode before its own optimizer steps. All modules are
looked at in the first steps, at every eighth, and when the mode of the outermost has changed; otherwise only the outermost.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from holter.rank.context import Context
from holter.rank.models import Model, held_by
from holter.records import Modes, Named

NUM_FIRST = 8
LOOK_EVERY = 8
"""Number of steps from one look at all modules to the next."""
MAX_NAMES = 32
NORMS = (nn.modules.batchnorm._NormBase,)  # noqa: SLF001


class ModeProbe:
    """Notes in which modes trained modules are called, and reports when that changes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._parts: dict[weakref.ref[nn.Module], tuple[int, list[tuple[str, weakref.ref[nn.Module]]]]] = {}
        """For each model, the generation of the models, and its modules that behave differently in evaluation mode."""
        self._called: dict[str, tuple[frozenset[str], bool]] = {}
        """By model's prefix, the modules in evaluation mode at every call since its optimizer last stepped, and whether the model itself was."""
        self._last: dict[weakref.ref[nn.Module], tuple[bool, frozenset[str]]] = {}
        self._told: dict[str, tuple[frozenset[str], bool]] = {}
        self._held: tuple[Any, list[str]] = (None, [])

    def see(self, module: nn.Module, output: Any) -> None:
        """Note the modes of a watched model that has returned, if its output leads back to its parameters."""
        if not torch.is_grad_enabled():
            return
        model = self._context.models.of(module)
        if model is None or not _leads_back(output):
            return
        names = self._look(module, model.prefix)
        # The mode matters only if some module behaves differently in it.
        is_whole = not module.training and bool(names)
        known = self._called.get(model.prefix)
        self._called[model.prefix] = (names, is_whole) if known is None else (names & known[0], is_whole and known[1])

    def settle(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Report the modes of the models that these optimizers are about to step, if they differ from the last report."""
        if not self._called:
            return
        for prefix in self._prefixes(optimizers):
            found = self._called.pop(prefix, None)
            if found is None or found == self._told.get(prefix, (frozenset(), False)):
                continue
            self._told[prefix] = found
            names, module = sorted(found[0]), self._root(prefix)
            modes = Modes(
                model=prefix,
                evaluating=Named(len(names), names[:MAX_NAMES]),
                num_sensitive=len(self._sensitive(module, prefix)) if module is not None else 0,
                is_whole=found[1],
            )
            self._context.writer.say(self._context.log.step, modes)

    def _look(self, module: nn.Module, prefix: str) -> frozenset[str]:
        reference, log = weakref.ref(module), self._context.log
        known = self._last.get(reference)
        is_due = log.step < NUM_FIRST or log.step % LOOK_EVERY == 0
        if known is not None and known[0] == module.training and not (is_due and not log.micro_step):
            return known[1]
        parts = [(name, part()) for name, part in self._sensitive(module, prefix)]
        names = frozenset(name for name, part in parts if part is not None and not part.training)
        self._last[reference] = module.training, names
        return names

    def _sensitive(self, module: nn.Module, prefix: str) -> list[tuple[str, "weakref.ref[nn.Module]"]]:
        generation, reference = self._context.models.generation, weakref.ref(module)
        known = self._parts.get(reference)
        if known is None or known[0] != generation:
            for gone in [one for one in self._parts if one() is None]:
                del self._parts[gone]
                self._last.pop(gone, None)
            found = [(prefix + name, weakref.ref(part)) for name, part in module.named_modules() if is_sensitive(part)]
            known = self._parts[reference] = generation, found
        return known[1]

    def _root(self, prefix: str) -> nn.Module | None:
        return next((model.inner for model in self._context.models if model.prefix == prefix), None)

    def _prefixes(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
        """Return the prefixes of the models that these optimizers train; they are looked for again when models or optimizers have changed."""
        models = self._context.models
        state = models.outline(optimizers)
        if state != self._held[0]:
            held = held_by(optimizers)
            self._held = state, [model.prefix for model in models if _is_held(model, held)]
        return self._held[1]


def is_sensitive(module: nn.Module) -> bool:
    """Whether a module computes something else in evaluation mode, because it drops a share of its inputs or keeps statistics.

    >>> is_sensitive(nn.Dropout(0.1)), is_sensitive(nn.Dropout(0.0)), is_sensitive(nn.BatchNorm1d(4)), is_sensitive(nn.LayerNorm(4))
    (True, False, True, False)
    """
    if isinstance(module, NORMS):
        return module.running_mean is not None
    if "drop" in type(module).__name__.lower():
        return any(_is_share(value) for name, value in vars(module).items() if name == "p" or "drop" in name)
    # Attention and recurrent layers hold the share themselves.
    return any("drop" in name and _is_share(value) for name, value in vars(module).items())


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < 1


def _is_held(model: Model, held: set[int]) -> bool:
    return any(id(p) in held and p.requires_grad for _, p in model.parameters)


def _leads_back(output: Any) -> bool:
    """Whether a result, or a part of it, requires a gradient; a result that is neither a tensor nor a plain container is taken to."""
    if isinstance(output, torch.Tensor):
        return bool(output.requires_grad)
    if isinstance(output, dict):
        return any(map(_leads_back, output.values()))
    if isinstance(output, (list, tuple)):
        return any(map(_leads_back, output))
    return output is not None
