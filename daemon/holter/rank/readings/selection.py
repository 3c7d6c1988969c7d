"""Which entries of the census belong to a class of tensors; found once, and again when the models or the optimizers change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from holter.rank.context import Context
from holter.rank.models import Model
from holter.rank.readings.census import DtypeTraits


@dataclass(frozen=True)
class Selection:
    """Some entries of the census: parameters, or buffers."""

    size: int
    """Number of all entries."""
    places: np.ndarray
    """Places of the chosen entries, ascending."""
    tensors: list[torch.Tensor]

    @cached_property
    def traits(self) -> DtypeTraits:
        """What their dtypes mean."""
        return DtypeTraits.of([tensor.dtype for tensor in self.tensors])

    def part(self, indices: Sequence[int]) -> "Selection":
        """The entries at these indices of the selection."""
        return Selection(self.size, self.places[list(indices)], [self.tensors[i] for i in indices])


class SelectionCache:
    """Selections, each made once for each state of the models."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._made: dict[object, Selection] = {}
        self._sizes: dict[object, tuple[int, np.ndarray]] = {}
        self._places: dict[int, int] = {}
        """Id of a parameter -> its place; a tensor that becomes a replica does not move."""
        self.num_parameters = 0
        """Of the census, as of the last look for places."""
        self._generation = -1
        self._is_possible = False

    def forget(self) -> None:
        """The script let go of a model: its memory is not ours to hold."""
        self._made, self._places, self._generation = {}, {}, -1

    def is_possible(self) -> bool:
        """Whether some tensor must be equal on all ranks."""
        self._forget_if_changed()
        return self._is_possible

    def parameters(self, optimizers: Sequence[torch.optim.Optimizer], *, held_only: bool) -> Selection:
        """Trainable replicas of the models that these optimizers train; with `held_only`, those that they hold."""
        sizes = tuple(
            (id(optimizer), *(len(group["params"]) for group in optimizer.param_groups)) for optimizer in optimizers
        )

        def make() -> Selection:
            held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
            models = [model for model in self._context.models if any(id(p) in held for _, p in model.parameters)]
            return self._choose(
                lambda model, p: (
                    id(p) in model.replicas and p.requires_grad and (id(p) in held if held_only else model in models)
                )
            )

        return self._once(("parameters", held_only, tuple(sorted(sizes))), make)

    def where(self, key: object, is_chosen: Callable[[Model, torch.Tensor], bool]) -> Selection:
        """Parameters, of components too, for which this holds."""
        return self._once(key, lambda: self._choose(is_chosen))

    def slice_of(self, chosen: Selection, step: int, at_least_bytes: int) -> Selection:
        """The share of this step: no more bytes than the trainable parameters have, or than this.

        An odd number of slices, so that every interval between comparisons, a power of two, comes to all of them.
        """
        num_slices, numbers = self._sliced(chosen, at_least_bytes)
        if num_slices == 1:
            return chosen
        turn = step % num_slices
        return self._once(("slice", turn), lambda: chosen.part(np.flatnonzero(numbers == turn).tolist()))

    def _sliced(self, chosen: Selection, at_least_bytes: int) -> tuple[int, np.ndarray]:
        """How many slices there are, and which one each tensor is in."""
        if ("slices", at_least_bytes) not in self._sizes:
            trainable = sum(p.nbytes for model in self._context.models for _, p in model.parameters if p.requires_grad)
            sizes = np.array([tensor.nbytes for tensor in chosen.tensors], dtype=np.int64)
            most = max(at_least_bytes, trainable)
            num_slices = int(-(-sizes.sum() // most)) | 1
            begins = np.cumsum(sizes) - sizes
            self._sizes["slices", at_least_bytes] = num_slices, begins * num_slices // max(int(sizes.sum()), 1)
        return self._sizes["slices", at_least_bytes]

    def places_of(self, parameters: Sequence[torch.Tensor]) -> np.ndarray:
        """Where these are among all parameters of the census."""
        count = sum(len(model.parameters) for model in self._context.models.all())
        is_known = all(id(p) in self._places for p in parameters)
        if not is_known or self.num_parameters != count:
            every = (p for model in self._context.models.all() for _, p in model.parameters)
            self._places = {id(p): place for place, p in enumerate(every)}
            self.num_parameters = count
        return np.array([self._places[id(p)] for p in parameters], dtype=np.int64)

    def buffers(self, model: Model) -> Selection:
        """The buffers of one model that must be equal."""

        def make() -> Selection:
            entries = [
                (id(b) in other.replicas and other is model, b)
                for other in self._context.models.all()
                for _, b in other.buffers
            ]
            return _selection(entries)

        return self._once(("buffers", id(model)), make)

    def _choose(self, is_chosen: Callable[[Model, torch.Tensor], bool]) -> Selection:
        return _selection(
            [(is_chosen(model, p), p) for model in self._context.models.all() for _, p in model.parameters]
        )

    def _once(self, key: object, make: Callable[[], Selection]) -> Selection:
        self._forget_if_changed()
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make()
        return found

    def _forget_if_changed(self) -> None:
        models = self._context.models
        # Going through them is what notices one that is gone.
        watched = iter(models)
        if self._generation != models.generation:
            self._made, self._sizes = {}, {}
            self._is_possible = any(model.is_replicated for model in watched)
            self._generation = models.generation


def _selection(entries: Sequence[tuple[bool, torch.Tensor]]) -> Selection:
    places = [place for place, (is_chosen, tensor) in enumerate(entries) if is_chosen and not tensor.is_sparse]
    return Selection(len(entries), np.array(places, dtype=np.int64), [entries[place][1] for place in places])
