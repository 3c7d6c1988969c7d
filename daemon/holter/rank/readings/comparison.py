"""Tensors that must be equal on all replicas: one root fingerprint for each class of tensors, at steps of comparison.

    the model is called     buffers                DDP has just broadcast them; after the call they are the rank's own
    backward is over        gradients_reduced      before anything clips them
    before the optimizer    gradients              as the optimizer is given them
                            frozen                 what does not train, in slices if it is large
                            hyperparameters        at every step
                            parameters_before      at the first step, and right after a comparison: the rank's own history
    after the optimizer     parameters_after       and, every fourth comparison, optimizer_state: twice the parameters to read

The tables behind the roots go over all entries of the census, in its order, 0 where there is nothing to compare. Only models that the
step's own optimizers train take part: what else a rank still holds, an average or the model of an earlier fold, need not be equal.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from holter import clock
from holter.rank.context import Context
from holter.rank.models import Model, is_sharded
from holter.rank.publish.step_log import OpenStep
from holter.rank.readings.census import DtypeTraits, Selection, SelectionCache, marks
from holter.rank.readings.hyperparameters import Hyperparameters
from holter.records import PackedTable
from holter_kernels import root

STATE_EVERY = 4
"""Comparisons between two readings of the optimizer's state."""
SLICE_BYTES = 64 << 20
"""Frozen parameters read at one comparison, or as many as train if those are more."""

Entry: TypeAlias = "torch.Tensor | None"


@dataclass(frozen=True)
class FingerprintRows:
    """What one pass found in some entries of the census: fingerprints and statistics, by place."""

    places: np.ndarray
    fingerprints: np.ndarray
    sums: np.ndarray
    square_sums: np.ndarray
    marks: np.ndarray

    @staticmethod
    def of(table: Any, places: np.ndarray, traits: DtypeTraits) -> "FingerprintRows":
        """From a pass over the tensors at these places."""
        return FingerprintRows(places, table.fingerprint, table.sum, table.square_sum, marks(table, traits))

    @staticmethod
    def joined(parts: Sequence["FingerprintRows"], wanted: np.ndarray) -> "FingerprintRows":
        """Several passes in one, only what is wanted of each."""
        chosen = [(part, np.isin(part.places, wanted)) for part in parts]
        return FingerprintRows(
            *(
                np.concatenate([getattr(part, column)[mask] for part, mask in chosen])
                for column in ("places", "fingerprints", "sums", "square_sums", "marks")
            )
        )

    def numbers(self, tensor_class: str) -> dict[str, float]:
        """Sum and norm over all tensors: how far apart ranks are shows in their differences."""
        total, square = float(self.sums.sum()), float(self.square_sums.sum())
        return {f"sum.{tensor_class}": total, f"norm.{tensor_class}": math.sqrt(square) if square >= 0 else math.nan}

    def packed(
        self,
        tensor_class: str,
        chosen: Selection,
        *,
        over: Literal["parameters", "buffers"] = "parameters",
        keys: Sequence[str] = (),
    ) -> PackedTable:
        """The table over all entries; its root goes over the chosen ones."""
        fingerprints = np.zeros(chosen.size, dtype="<u8")
        fingerprints[self.places] = self.fingerprints
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt(self.square_sums)
        return PackedTable(
            tensor_class=tensor_class,
            root=int(root(fingerprints[chosen.places])),
            fingerprints=fingerprints.tobytes(),
            norms=self._spread(norms, chosen.size, "<f4"),
            sums=self._spread(self.sums, chosen.size, "<f8"),
            marks=self._spread(self.marks, chosen.size, "u1"),
            over=over,
            keys=list(keys),
        )

    def _spread(self, values: np.ndarray, size: int, dtype: str) -> bytes:
        out = np.zeros(size, dtype=dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            out[self.places] = values
        return out.tobytes()


OnRows = Callable[[FingerprintRows], None]


class ComparisonProbe:
    """Fingerprints what must be equal."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._selections = SelectionCache(context)
        self._hyperparameters = Hyperparameters(context)
        context.models.on_forget.append(self._selections.forget)
        self._reduced = _ReducedGradients(OpenStep(-1))

    def is_due(self) -> bool:
        """Whether this is a step of comparison, and there is somebody to compare with."""
        return self._context.schedule.plan.is_check(self._context.log.step) and self.is_possible()

    def is_possible(self) -> bool:
        """Whether there are replicas: known from wrappers, placements and reductions, never guessed."""
        return self._context.world_size > 1 and self._selections.is_possible()

    def parameters(self, moment: Literal["before", "after"], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The trainable replicas of the models that these optimizers train."""
        if moment == "before" and not self._context.schedule.plan.reads_before(self._context.log.step):
            return
        chosen = self._selections.parameters(optimizers, held_only=False)
        self._read(f"parameters_{moment}", chosen, chosen.tensors)

    def gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients that one optimizer is given; with them, what reduction had made of them."""
        chosen = self._selections.parameters([optimizer], held_only=True)
        step, reduced = self._context.log.now, self._reduced
        self._reduced = _ReducedGradients(OpenStep(-1))
        if reduced.step is step and reduced.num_parts:
            reduced.ask(
                lambda parts: self._tell(
                    step, "gradients_reduced", chosen, FingerprintRows.joined(parts, chosen.places)
                )
            )
        self._read("gradients", chosen, [p.grad for p in chosen.tensors])

    def reduced_gradients(self) -> None:
        """Gradients as a backward pass that reduces left them, before any clipping."""
        models = [
            model for model in self._context.models if model.ddp is not None and model.ddp.require_backward_grad_sync
        ]
        chosen = self._selections.where(
            ("reduced", *map(id, models)),
            lambda model, p: (
                model in models
                and p.requires_grad
                and id(p) in model.replicas
                and all(p is not other for name, other in model.parameters if name in model.reduced_by_hand)
            ),
        )
        self._hold("gradients_reduced", chosen)

    def reduced_by_hand(self, parameters: Sequence[torch.Tensor]) -> None:
        """Gradients that the script has just reduced: all that it does, or one that is met for the first time."""
        if self.is_due():
            places = self._selections.places_of(parameters)
            size = self._selections.num_parameters
            name = "gradients_by_hand" + (f".{places[0]}" if len(places) == 1 else "")
            self._hold(name, Selection(size, places, list(parameters)))

    def frozen(self) -> None:
        """Parameters that do not train, of replicated models and of frozen components; in slices if they are large."""
        if not self.is_possible():
            return
        chosen = self._selections.where(
            "frozen",
            lambda model, p: (
                not p.requires_grad and not is_sharded(p) and (id(p) in model.replicas or not model.is_trained)
            ),
        )
        part = self._selections.slice_of(chosen, self._context.log.step, SLICE_BYTES)
        self._read("frozen", part, part.tensors)

    def hyperparameters(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Learning rates and other settings, and step counts."""
        if self.is_possible():
            self._hyperparameters.read(optimizers)

    def buffers(self, model: Model) -> None:
        """Normalisation statistics and tables of a model that is being called."""
        if model.is_replicated:
            chosen = self._selections.buffers(model)
            self._read("buffers", chosen, chosen.tensors, over="buffers")

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Moments and whatever else the optimizer keeps for a parameter."""
        plan = self._context.schedule.plan
        if self._context.log.step // plan.check_interval % STATE_EVERY or "ZeroRedundancy" in type(optimizer).__name__:
            return
        chosen = self._selections.parameters([optimizer], held_only=True)
        states = [optimizer.state.get(p, {}) for p in chosen.tensors]
        keys = sorted({key for state in states for key, value in state.items() if isinstance(value, torch.Tensor)})
        if not keys:
            return
        places = np.concatenate([chosen.places + chosen.size * turn for turn in range(len(keys))])
        tensors = [_tensor(state.get(key)) for key in keys for state in states]
        every = Selection(chosen.size * len(keys), places, chosen.tensors * len(keys))
        self._read("optimizer_state", every, tensors, keys=keys)

    def _hold(self, name: str, chosen: Selection) -> None:
        """Read reduced gradients; which of them count is known when an optimizer is about to apply them."""
        step = self._context.log.now
        if self._reduced.step is not step:
            self._reduced = _ReducedGradients(step)
        gradients = [p.grad for p in chosen.tensors]
        if any(gradient is not None for gradient in gradients):
            self._launch(name, chosen, gradients, self._reduced.part(name))

    def _read(
        self,
        tensor_class: str,
        chosen: Selection,
        tensors: Sequence[Entry],
        *,
        over: Literal["parameters", "buffers"] = "parameters",
        keys: Sequence[str] = (),
    ) -> None:
        """Read these tensors of the chosen entries, and tell root and table."""
        step = self._context.log.now
        self._launch(
            tensor_class,
            chosen,
            tensors,
            lambda rows: self._tell(step, tensor_class, chosen, rows, over=over, keys=keys),
        )

    def _launch(self, name: str, chosen: Selection, tensors: Sequence[Entry], then: OnRows) -> None:
        step, started = self._context.log.now, clock.monotonic_s()
        kept = [tensor for tensor in tensors if tensor is not None and not tensor.is_sparse]
        places, traits = chosen.places, chosen.traits
        if len(kept) < len(tensors):
            places = places[[tensor is not None and not tensor.is_sparse for tensor in tensors]]
            traits = DtypeTraits.of([tensor.dtype for tensor in kept])
        if kept:
            self._context.readings.read(
                name, kept, step.owe(lambda table: then(FingerprintRows.of(table, places, traits)))
            )
        step.cost.check_s += clock.monotonic_s() - started

    def _tell(  # noqa: PLR0913 - a table's fields
        self,
        step: OpenStep,
        tensor_class: str,
        chosen: Selection,
        rows: FingerprintRows,
        *,
        over: Literal["parameters", "buffers"] = "parameters",
        keys: Sequence[str] = (),
    ) -> None:
        packed = rows.packed(tensor_class, chosen, over=over, keys=keys)
        step.roots[tensor_class] = packed.root
        step.numbers.update(rows.numbers(tensor_class))
        self._context.writer.say(step.step, packed)


class _ReducedGradients:
    """Readings of reduced gradients at one step, until an optimizer says which of them it will apply."""

    def __init__(self, step: OpenStep) -> None:
        self.step = step
        self._parts: dict[str, FingerprintRows | None] = {}
        self._then: Callable[[list[FingerprintRows]], None] | None = None

    @property
    def num_parts(self) -> int:
        """How many readings have started."""
        return len(self._parts)

    def part(self, name: str) -> OnRows:
        """Begin a reading; a later one of the same name counts."""
        self._parts[name] = None

        def learn(rows: FingerprintRows) -> None:
            self._parts[name] = rows
            self._answer()

        return learn

    def ask(self, then: Callable[[list[FingerprintRows]], None]) -> None:
        """Call this with all readings, once they are there."""
        self._then = then
        self._answer()

    def _answer(self) -> None:
        rows = [part for part in self._parts.values() if part is not None]
        if self._then is not None and len(rows) == len(self._parts):
            self._then(rows)
            self._then = None


def _tensor(value: Any) -> Entry:
    return value if isinstance(value, torch.Tensor) else None
