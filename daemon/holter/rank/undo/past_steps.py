"""Remembers how the last few steps began, for a device that may be some steps behind: for a left-out step the host's changes since are undone.

    weights, optimizer state          the device left out all steps from the bad one on: they are as they were before it
    rates, schedulers, scalers,       the host changes these at every step: copied when a step's first forward pass begins
    a framework's counters
    random states, buffers            likewise (`rewind`, `buffers`); buffers in stream order, on their device

Each step has one set of copies, of which the newest `KEPT` are kept. They are made only for jobs whose optimizers obey the device's flag
(`hold.device_flags`): all others are held before the bad step itself.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from holter.errors import RewindError
from holter.rank import search
from holter.rank.context import Context
from holter.rank.undo.buffers import PastBuffer
from holter.rank.undo.rewind import PlainAttributes, Rewound
from holter.rank.undo.state_parts import (
    Source,
    StatePart,
    of_groups,
    of_scaler,
    of_scheduler,
    source_of,
    take_image,
)

KEPT = 4
"""Number of steps that are kept: the present one, those that a device may not have reached (`device_flags.RUN_AHEAD`), and one to spare."""
SEARCHES = frozenset({1, 2, 8, 64})
"""At these copies all living objects are searched for schedulers, which takes 80 ms; also whenever an optimizer has come or gone."""


@dataclass
class PastStep:
    """Everything but weights and optimizer state as it was when one step began."""

    rewound: Rewound
    attributes: PlainAttributes
    buffers: list[PastBuffer]
    images: list[tuple[StatePart, Any]]
    copies: list[torch.Tensor]
    num_states: "list[tuple[weakref.ref[torch.optim.Optimizer], int]]"
    """(optimizer, number of its parameters that had a state). A fused SGD whose first step is left out has made momenta that were never filled."""

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self.rewound.step


class PastSteps:
    """One rank's past steps; the hooks call `begin`, the guard calls `need`, and a halt that is decided calls `restore`."""

    def __init__(self, context: Context, optimizers: Callable[[], list[torch.optim.Optimizer]]) -> None:
        self._context = context
        self._optimizers = optimizers
        self._kept: list[PastStep] = []
        self._sources: list[Source] = []
        self._sources_of: list[weakref.ref[torch.optim.Optimizer]] = []
        self._num_taken = 0
        self.is_needed = False
        context.models.on_forget.append(self.forget)

    def begin(self, step: int) -> None:
        """Copy the state before this step's first forward pass; called only if `is_needed`."""
        self._take(step)

    def need(self, step: int) -> None:
        """Make sure that the beginning of this step is kept, because a device may leave the step out."""
        self.is_needed = True
        if not any(each.step == step for each in self._kept):
            # Its forward pass was not seen, or we did not know then that it is needed.
            self._take(step)

    def forget(self) -> None:
        """Drop all copies, because the script has let go of a model and its memory must be freed."""
        self._kept = []

    def has(self, step: int) -> bool:
        """Whether it is known how this step began."""
        return any(each.step == step for each in self._kept)

    def _take(self, step: int) -> None:
        rewind = self._context.undo.rewind
        rewound = rewind.known()
        if rewound is None or rewound.step != step:
            return
        tensors: list[torch.Tensor] = []
        parts = [
            (replace(part, state=None, apart=()), take_image(part.state, tensors, part.apart)) for part in self._parts()
        ]
        known = [(weakref.ref(each), len(each.state)) for each in self._optimizers()]
        with torch.no_grad():
            copies = [tensor.detach().clone() for tensor in tensors]
            spare = self._kept.pop(0).buffers if len(self._kept) >= KEPT else []
            # If a loss scaler skipped a round, the same step begins anew, and its earlier copy is dropped.
            self._kept = [each for each in self._kept if each.step < step]
            self._kept.append(PastStep(rewound, rewind.attributes, rewind.buffers.past(spare), parts, copies, known))

    def _parts(self) -> list[StatePart]:
        optimizers = self._optimizers()
        self._num_taken += 1
        found: list[StatePart | None] = [None]
        if [reference() for reference in self._sources_of] == optimizers and self._num_taken not in SEARCHES:
            found = [source() for source in self._sources]
        if None in found:
            self._sources_of = [weakref.ref(optimizer) for optimizer in optimizers]
            self._sources = [source_of(of_groups, each) for each in optimizers]
            self._sources += [source_of(of_scheduler, each) for each in search.schedulers(optimizers)]
            self._sources += [source_of(of_scaler, each) for each in search.scalers()]
            self._sources += self._context.frameworks.counters(optimizers)
            found = [source() for source in self._sources]
        return [part for part in found if part is not None]

    def restore(self, step: int) -> Rewound:
        """Set everything but weights and optimizer state back to the beginning of `step`; only called after a halt is decided."""
        found = next((each for each in self._kept if each.step == step), None)
        if found is None:
            steps = ", ".join(str(each.step) for each in self._kept)
            raise RewindError(
                f"it is not known any more how step {step} began: the device was further behind than the {KEPT} steps that are kept ({steps})"
            )
        self._check(found)
        rewind = self._context.undo.rewind
        with torch.no_grad():
            rewind.buffers.put_past(found.buffers)
            for part, image in found.images:
                part.put(part.owner(), image, found.copies)
        for reference, number in found.num_states:
            _shorten(reference(), number)
        rewind.registered.put(found.attributes)
        found.rewound.restore()
        return found.rewound

    def _check(self, past: PastStep) -> None:
        if any(part.owner() is None for part, _ in past.images):
            raise RewindError(f"part of what step {past.step} began with does not exist any more")
        known: Sequence[Any] = [part.owner() for part, _ in past.images]
        optimizers = self._optimizers()
        for each in (*optimizers, *search.schedulers(optimizers), *search.scalers()):
            # Step 0 is copied before any optimizer has made a step.
            if not any(each is other for other in known):
                raise RewindError(f"it is not known how {type(each).__name__} was when step {past.step} began")


def _shorten(optimizer: torch.optim.Optimizer | None, number: int) -> None:
    """Remove all but the first `number` states: those that were made since come last."""
    if optimizer is not None:
        for key in list(optimizer.state)[number:]:
            del optimizer.state[key]
