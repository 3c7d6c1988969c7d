"""Tensors that must be equal on all replicas are compared by one root fingerprint for each class of tensors, at steps of comparison.

    the model is called     buffers                DDP has just broadcast them; after the call they are the rank's own
    backward is over        gradients_reduced      before anything clips them
    before the optimizer    gradients              as the optimizer is given them
                            frozen                 what does not train, in slices if it is large
                            hyperparameters        at every step
                            parameters_before      at the first step, and right after a comparison: the rank's own history
    after the optimizer     parameters_after       and, every fourth comparison, optimizer_state: twice the parameters to read

Which ranks hold the same bytes is known for each tensor (`holter.rank.mesh`). One pass reads them all; each scope gets a root and a table of its
own. A shard that no other rank holds is read before and after the step, and so is the optimizer's state for it: both are compared with their own
history.

A partial value, such as a norm's gradient under sequence parallelism, is not reduced yet, so its local parts rightly differ. Only the parameters
that the step makes of it are compared.

The tables behind the roots cover all entries of the census, in its order, with 0 where there is nothing to compare. Only models that the
step's own optimizers train take part: other models that a rank still holds, such as an average or the model of an earlier fold, need not be equal.
"""

import hashlib
import math
import operator
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from holter.rank.context import Context
from holter.rank.mesh import OWN, of_group
from holter.rank.models import Model, gradients_of, held_by, is_partial, is_sharded
from holter.rank.publish.step_log import OpenStep
from holter.rank.readings import census
from holter.rank.readings.census import DtypeTraits, Selection, SelectionCache, held_part
from holter.rank.readings.gradient_answers import PLAIN, are_plain
from holter.rank.readings.shard_state import ShardState
from holter.records import PackedTable
from holter_kernels import SeenTensors, Table, root, see

_pack: Callable[..., tuple[Any, ...]] | None
try:
    from holter.rank._rows import pack as _pack
except ImportError:
    # There was no compiler.
    _pack = None

STATE_EVERY = 4
"""The optimizer's state is read at every n-th comparison."""
NOT_REDUCED = "backward.after_reduction"
CLIPPED = ("gradients_reduced", "gradients")
"""The classes of gradients before and after a script clips."""
SLICE_BYTES = 64 << 20
"""Bytes of frozen parameters read at one comparison, or the bytes of all trainable parameters if those are more."""

Entry: TypeAlias = "torch.Tensor | None"
LARGEST = 3e38
"""Largest magnitude in a table of settings, whose numbers are float32; larger ones are clamped to it."""


class ToldRows(NamedTuple):
    """What a comparison reports of its rows; the tables cover all entries of the census, with 0 where nothing was read."""

    root: int
    """Root fingerprint of the chosen entries."""
    fingerprints: bytes
    norms: bytes
    sums: bytes
    marks: bytes
    sum: float
    square_sum: float


class FingerprintRows(NamedTuple):
    """What one pass read of some entries of the census."""

    places: np.ndarray
    rows: np.ndarray
    """Rows of the pass's table, one for each place."""
    traits: DtypeTraits

    @staticmethod
    def joined(parts: Sequence["FingerprintRows"], wanted: np.ndarray) -> "FingerprintRows":
        """Join several passes into one, with only the wanted places of each."""
        # Compared as bytes: numpy's own comparison takes ten times as long.
        if len(parts) == 1 and (parts[0].places is wanted or parts[0].places.tobytes() == wanted.tobytes()):
            return parts[0]
        chosen = [(part, np.isin(part.places, wanted)) for part in parts]
        places, rows = (
            np.concatenate([getattr(part, column)[mask] for part, mask in chosen]) for column in ("places", "rows")
        )
        columns = ("is_wide", "is_float", "is_normal")
        traits = [np.concatenate([getattr(part.traits, name)[mask] for part, mask in chosen]) for name in columns]
        return FingerprintRows(places, rows, DtypeTraits(*traits))

    def told(self, size: int, places: np.ndarray) -> ToldRows:
        """Return the tables for a census of `size` entries, with the root over these places.

        The native code, where it was built, does it in one call instead of some sixty of numpy's.
        """
        if _pack is None:
            return self.told_by_numpy(size, places)
        return ToldRows(*_pack(self.rows, self.places, self.traits.flags, places, size, census.MARK_THRESHOLDS))

    def of_places(self, places: np.ndarray) -> "FingerprintRows":
        """Return only the rows of these places."""
        return FingerprintRows.joined([self], places)

    def told_by_numpy(self, size: int, places: np.ndarray) -> ToldRows:
        """Do the same with numpy: the definition of what the native code computes."""
        rows = self.rows
        fingerprints = np.zeros(size, dtype="<u8")
        fingerprints[self.places] = rows["fingerprint"]
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt(rows["square_sum"])
        return ToldRows(
            root=int(root(fingerprints[places])),
            fingerprints=fingerprints.tobytes(),
            norms=self._spread(norms, size, "<f4"),
            sums=self._spread(rows["sum"], size, "<f8"),
            marks=self._spread(census.marks(Table(rows, None), self.traits), size, "u1"),
            sum=float(rows["sum"].sum()),
            square_sum=float(rows["square_sum"].sum()),
        )

    def _spread(self, values: np.ndarray, size: int, dtype: str) -> bytes:
        out = np.zeros(size, dtype=dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            out[self.places] = values
        return out.tobytes()


OnRows = Callable[[FingerprintRows], None]


class ComparisonProbe:
    """Fingerprints the tensors that must be equal on all replicas."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._selections = SelectionCache(context)
        self._hyperparameters = Hyperparameters(context)
        self._shard_state = ShardState(context, self._read)
        context.models.on_forget.append(self._selections.forget)
        self._reduced = _ReducedGradients(OpenStep(-1))
        self._own_reduced: tuple[OpenStep | None, int, float] = (None, 0, 0.0)
        """A step, how many of this rank's own gradient shards were read right after its reduction, and their norm."""

    def is_due(self) -> bool:
        """Whether this is a step of comparison, and there are other ranks to compare with."""
        context = self._context
        is_check = context.log.step % context.schedule.plan.check_interval == 0
        return is_check and context.world_size > 1 and self._selections.is_possible()

    def is_possible(self) -> bool:
        """Whether it is known, from wrappers, placements and reductions, which tensors have replicas; this is never guessed."""
        return self._context.world_size > 1 and self._selections.is_possible()

    def parameters(self, moment: Literal["before", "after"], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Read the trainable replicas of the models that these optimizers train, before or after the step."""
        if moment == "before" and not self._context.schedule.plan.reads_before(self._context.log.step):
            return
        chosen = self._selections.parameters(optimizers, held_only=False, with_own=True)
        self._read(
            f"parameters_{moment}",
            chosen,
            list(map(held_part, chosen.tensors)) if chosen.is_partitioned else chosen.tensors,
        )
        self._read_partitions(f"parameters_{moment}", optimizers)
        getattr(self._shard_state, moment)(optimizers)

    def _read_partitions(self, name: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Read the partitions that ZeRO steps in place of the model's parameters; they have a table and names of their own."""
        partitions = self._context.frameworks.partitions
        held = [named for one in optimizers for named in partitions.get(one, ())] if partitions else []
        if held:
            names, tensors = [name for name, _ in held], [tensor for _, tensor in held]
            outline = Selection(
                len(held), np.arange(len(held)), [], scopes=("@own.partition",) * len(held), names=names
            )
            chosen = Selection(len(held), outline.places, tensors)
            step = self._context.log.now
            self._launch(f"{name}.partitions", chosen, tensors, lambda rows: self._tell(step, name, outline, rows))

    def gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the gradients that one optimizer is given, and report them together with what the reduction had made of them."""
        if optimizer in self._context.frameworks.partitions:
            # The model's parameters hold this rank's own gradients; the reduced ones are in the partitions.
            return
        chosen = self._selections.parameters([optimizer], held_only=True, with_own=True)
        step, reduced = self._context.log.now, self._reduced
        self._reduced = _ReducedGradients(OpenStep(-1))
        if reduced.step is step and reduced.num_parts:
            join, outline = FingerprintRows.joined, chosen.outline
            reduced.ask(lambda parts: self._tell(step, "gradients_reduced", outline, join(parts, outline.places)))
        self._read("gradients", chosen, self._context.gradient_answers.held_of(chosen.tensors))

    def note_reduction(self) -> None:
        """Note after a backward pass whether DDP has reduced in it; if not, the gradients stay the rank's own until a later pass reduces."""
        numbers = self._context.log.now.numbers
        numbers.pop(NOT_REDUCED, None)
        for model in self._context.models:
            # DDP decides this when the model is called, wherever the backward pass begins.
            ddp = model.ddp
            if ddp is not None and not (ddp.require_backward_grad_sync or ddp.require_forward_param_sync):
                numbers[NOT_REDUCED] = 1.0

    def reduced_gradients(self) -> None:
        """Read the gradients as a reducing backward pass left them, before any clipping."""
        models = [
            model
            for model in self._context.models
            if (model.ddp.require_backward_grad_sync if model.ddp is not None else bool(model.axes))
        ]
        chosen = self._selections.where(
            ("reduced", *map(id, models)),
            lambda model, p: (
                model in models
                and p.requires_grad
                and model.is_compared(p, with_own=True)
                and all(p is not other for name, other in model.parameters if name in model.reduced_by_hand)
            ),
        )
        self._hold("gradients_reduced", chosen)

    def reduced_by_hand(self, parameters: Sequence[torch.Tensor]) -> None:
        """Read gradients that the script has just reduced itself: all of them, or a single one that it reduces for the first time."""
        if self.is_due():
            places = self._selections.places_of(parameters)
            size = self._selections.num_parameters
            name = "gradients_by_hand" + (f".{places[0]}" if len(places) == 1 else "")
            self._hold(name, Selection(size, places, list(parameters)))

    def frozen(self) -> None:
        """Read parameters that do not train, of replicated models and of frozen components; in slices if they are large."""
        chosen = self._selections.where(
            "frozen",
            lambda model, p: (
                not p.requires_grad and (model.is_compared(p) or (not model.is_trained and not is_sharded(p)))
            ),
        )
        part = self._selections.slice_of(chosen, self._context.log.step, SLICE_BYTES)
        self._read("frozen", part, part.tensors)

    def hyperparameters(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Read learning rates and other settings of these optimizers, and how far they have counted steps."""
        self._hyperparameters.read(optimizers)

    def buffers(self, model: Model) -> None:
        """Read the buffers (normalisation statistics, tables) of a model that is being called."""
        chosen = self._selections.buffers(model)
        if chosen.tensors:
            self._read("buffers", chosen, chosen.tensors)

    def randomness(self) -> None:
        """Note the random state of the model's last call, if dropout is active and tensor-parallel ranks compute parts of one result."""
        if not any(model.axes for model in self._context.models):
            return
        call = self._context.inputs.last
        root = call.model() if call is not None else None
        model = self._context.models.of(root) if root is not None else None
        axes = [axis for axis in model.axes if axis.kind == "tensor"] if model is not None else []
        if call is None or model is None or not axes or not any(_drops(module) for _, module in model.named_parts()):
            return
        state = call.device_state if call.device_state is not None else call.random_state
        ranks = [self._context.writer.rank]
        for axis in axes:
            base = [one - one // axis.stride % axis.size * axis.stride for one in ranks]
            ranks = [one + place * axis.stride for one in base for place in range(axis.size)]
        scope = of_group("+".join(axis.name for axis in axes), ranks).scope
        digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()
        self._context.log.now.roots[f"randomness{scope}"] = int.from_bytes(digest, "little")

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Read moments and whatever else the optimizer keeps for its parameters, at every fourth comparison."""
        plan = self._context.schedule.plan
        if self._context.log.step // plan.check_interval % STATE_EVERY or "ZeroRedundancy" in type(optimizer).__name__:
            return
        chosen = self._selections.parameters([optimizer], held_only=True)
        states = list(map(optimizer.state.get, chosen.tensors))
        if not all(states):
            states = [state or {} for state in states]
        keys, tensors = _state_tensors(states)
        if keys:
            self._read("optimizer_state", self._selections.once_for_each(chosen, keys), tensors)

    def _hold(self, name: str, chosen: Selection) -> None:
        """Read reduced gradients and hold the answer; which of them count is known only when an optimizer is about to apply them."""
        step = self._context.log.now
        if self._reduced.step is not step:
            self._reduced = _ReducedGradients(step)
        gradients = gradients_of(chosen.tensors)
        # Register a part only if it will be read: all registered parts are waited for.
        if type(gradients) is SeenTensors or any(gradient is not None for gradient in gradients):
            self._launch(name, chosen, gradients, self._reduced.part(name))

    def _read(self, tensor_class: str, chosen: Selection, tensors: Sequence[Entry]) -> None:
        """Read these tensors of the chosen entries, and report their root and table."""
        step, outline = self._context.log.now, chosen.outline
        self._launch(tensor_class, chosen, tensors, lambda rows: self._tell(step, tensor_class, outline, rows))

    def _launch(self, name: str, chosen: Selection, tensors: Sequence[Entry], then: OnRows) -> None:
        step, reading_s = self._context.log.now, self._context.reading_s
        kept: Sequence[Entry] = (see(tensors) or tensors) if type(tensors) is list and tensors else tensors
        places, traits = chosen.places, chosen.traits
        if type(kept) is not SeenTensors and not are_plain(kept):
            is_kept = [tensor is not None and not tensor.is_sparse and not is_partial(tensor) for tensor in tensors]
            kept = [tensor for tensor, is_one in zip(tensors, is_kept, strict=True) if is_one]
            places = places[is_kept]
            traits = DtypeTraits.of([tensor.dtype for tensor in kept if tensor is not None])
        if type(kept) is SeenTensors or kept:

            def learn(table: Any) -> None:
                then(FingerprintRows(places, table.rows, traits))

            if name.startswith("gradients"):
                self._context.gradient_answers.read(self._context, name, kept, learn, step=step)
            else:
                self._context.read(name, kept, learn, step=step)
        step.cost.check_s += self._context.reading_s - reading_s

    def _note_factor(self, step: OpenStep, tensor_class: str, rows: FingerprintRows) -> None:
        """Note by which factor this rank's own gradient shards were clipped between reduction and optimizer; it must be the same on all ranks."""
        norm = math.sqrt(max(0.0, float(rows.rows["square_sum"].sum())))
        if tensor_class == CLIPPED[0]:
            self._own_reduced = step, len(rows.places), norm
            return
        # In the very first step some shards become known too late to be read at the end of the backward pass.
        is_whole = self._own_reduced[:2] == (step, len(rows.places))
        reduced = self._own_reduced[2] if is_whole else 0.0
        if reduced and math.isfinite(reduced) and math.isfinite(norm):
            step.numbers |= {"clip.factor": norm / reduced, "clip.given": norm}

    def _tell(self, step: OpenStep, tensor_class: str, chosen: Selection, rows: FingerprintRows) -> None:
        for scope, places in chosen.by_scope:
            own = rows if len(places) >= len(rows.places) else rows.of_places(places)
            if tensor_class in CLIPPED and scope == f"@{OWN}":
                self._note_factor(step, tensor_class, own)
                continue
            told = own.told(chosen.size, places)
            step.roots[tensor_class + scope] = told.root
            if not scope:
                # The differences of sum and norm over all tensors show how far apart ranks are.
                norm = math.sqrt(told.square_sum) if told.square_sum >= 0 else math.nan
                step.numbers |= {f"sum.{tensor_class}": told.sum, f"norm.{tensor_class}": norm}
            packed = PackedTable(
                tensor_class=tensor_class + scope,
                root=told.root,
                fingerprints=told.fingerprints,
                norms=told.norms,
                sums=told.sums,
                marks=told.marks,
                over=chosen.over,
                keys=list(chosen.keys),
                names=list(chosen.names),
            )
            self._context.writer.say(step.step, packed)


class _ReducedGradients:
    """Readings of reduced gradients of one step, held until an optimizer shows which of them it will apply."""

    def __init__(self, step: OpenStep) -> None:
        self.step = step
        self._parts: dict[str, FingerprintRows | None] = {}
        self._then: Callable[[list[FingerprintRows]], None] | None = None

    @property
    def num_parts(self) -> int:
        """Number of readings that have started."""
        return len(self._parts)

    def part(self, name: str) -> OnRows:
        """Register a reading and return what takes its rows; a later reading of the same name replaces it."""
        self._parts[name] = None

        def learn(rows: FingerprintRows) -> None:
            self._parts[name] = rows
            self._answer()

        return learn

    def ask(self, then: Callable[[list[FingerprintRows]], None]) -> None:
        """Call `then` with all readings as soon as they are complete."""
        self._then = then
        self._answer()

    def _answer(self) -> None:
        if self._then is None:
            return
        rows = [part for part in self._parts.values() if part is not None]
        if len(rows) == len(self._parts):
            self._then(rows)
            self._then = None


def _state_tensors(states: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[Entry]]:
    """Return the names of an optimizer's state tensors, and the tensors: those of all parameters for the first name, then for the second."""
    first = sorted(states[0]) if states else []
    if set(map(len, states)) == {len(first)} and all(map(set(first).issuperset, states)):
        # The usual case, all states alike, is done in native loops.
        tensors: list[Any] = list(chain.from_iterable(map(operator.itemgetter(key), states) for key in first))
        if PLAIN.issuperset(map(type, tensors)):
            return tuple(first), tensors
    keys = sorted({key for state in states for key, value in state.items() if isinstance(value, torch.Tensor)})
    found = (state.get(key) for key in keys for state in states)
    return tuple(keys), [value if isinstance(value, torch.Tensor) else None for value in found]


def _drops(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.training and module.p > 0  # noqa: SLF001


@dataclass(frozen=True)
class _OptimizerGroup:
    """What is read of one group of an optimizer. The optimizer is held weakly, like everything that belongs to the script."""

    optimizer: "weakref.ref[torch.optim.Optimizer]"
    place: int
    counter: "weakref.ref[torch.Tensor] | None"
    """The group's first replica whose state counts steps; None if there is none."""
    keys: list[tuple[str, int]]
    """Each setting with the place in it; the place is -1 if the setting is a number itself."""
    num_remembered: int
    """Number of the group's replicas for which the optimizer keeps a state; it drops when a state is cleared."""

    def add_values(self, values: list[float]) -> None:
        """Append the group's numbers, as they are now, to `values`."""
        optimizer = self.optimizer()
        assert optimizer is not None, "it is about to step"
        group = optimizer.param_groups[self.place]
        for key, place in self.keys:
            values.append(float(group[key] if place < 0 else group[key][place]))
        if self.counter is not None:
            values.append(float(optimizer.state[self.counter()]["step"]))
        values.append(float(self.num_remembered))

    def names(self, prefix: str) -> Iterator[str]:
        """Yield the names of the numbers that `add_values` appends, in the same order."""
        for key, place in self.keys:
            yield prefix + key if place < 0 else f"{prefix}{key}.{place}"
        if self.counter is not None:
            yield f"{prefix}step"
        yield f"{prefix}remembered"


class Hyperparameters:
    """Settings of the step's optimizers, which every replica has the same: rates, betas, weight decay, step counts, number of tensors with a state.

    They are read at every step, and the table is reported when something changed. A value is its own fingerprint: the bits of the number as
    float64. Values on a device are left out, because reading them would wait.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """Number of each optimizer, in the order of their first steps."""
        self._known: list[int] = []
        self._groups: list[_OptimizerGroup] = []
        self._names: list[str] = []
        self._encoded_names = b""
        self._has_scaler = False
        self._told = b""
        self._root = 0

    def read(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Read the settings with which these optimizers are about to step."""
        log = self._context.log.now
        scale = log.losses.scale
        self._has_scaler |= scale is not None and scale != 1.0
        shape = [self._context.models.generation, self._has_scaler and scale is not None]
        for optimizer in optimizers:
            shape += (id(optimizer), len(optimizer.state), *map(len, optimizer.param_groups))
        if shape != self._known:
            self._known = shape
            self._learn(optimizers, has_scale=self._has_scaler and scale is not None)
        if not self._names:
            return
        values: list[float] = []
        for group in self._groups:
            group.add_values(values)
        if len(values) < len(self._names) and scale is not None:
            values.append(scale)
        bits = struct.pack(f"<{len(values)}d", *values)
        if bits != self._told:
            self._told = bits
            self._tell(bits, values)
        log.roots["hyperparameters"] = self._root

    def _tell(self, bits: bytes, values: Sequence[float]) -> None:
        digest = hashlib.blake2b(bits + self._encoded_names, digest_size=8).digest()
        self._root = int.from_bytes(digest, "little")
        if max(values) > LARGEST or min(values) < -LARGEST:
            values = [min(max(value, -LARGEST), LARGEST) for value in values]
        norms = struct.pack(f"<{len(values)}f", *values)
        table = PackedTable(
            tensor_class="hyperparameters", root=self._root, fingerprints=bits, norms=norms, names=self._names
        )
        self._context.writer.say(self._context.log.step, table)

    def _learn(self, optimizers: Sequence[torch.optim.Optimizer], *, has_scale: bool) -> None:
        """Find out which settings there are, in groups that hold a replica or a part of what all ranks hold together."""
        for optimizer in optimizers:
            self._numbers.setdefault(optimizer, len(self._numbers))
        replicas = set().union(*(model.shared_by_all() for model in self._context.models))
        for optimizer in optimizers:
            if optimizer in self._context.frameworks.partitions:
                replicas |= held_by([optimizer])
        flat = {key for model in self._context.models for key in model.whole_shapes}
        self._groups, self._names, self._told = [], [], b""
        for optimizer in sorted(optimizers, key=self._numbers.__getitem__):
            for place, group in enumerate(optimizer.param_groups):
                held = [p for p in group["params"] if id(p) in replicas]
                # ZeRO's third stage lends its groups their partitions for the step alone.
                if held or optimizer in self._context.frameworks.partitions:
                    # A frozen or unused parameter has no state: the step count is that of the first parameter with one.
                    counting = (p for p in held if _is_number(optimizer.state.get(p, {}).get("step")))
                    first = next(counting, None)
                    counter = weakref.ref(first) if first is not None else None
                    # Not counted: a partition's tensors, which are lent and taken back, and FSDP's flat parameters, of which a rank may hold
                    # an empty part without a state.
                    own = (
                        []
                        if optimizer in self._context.frameworks.partitions
                        else [p for p in held if id(p) not in flat]
                    )
                    num_remembered = sum(bool(optimizer.state.get(p)) for p in own)
                    found = _OptimizerGroup(weakref.ref(optimizer), place, counter, list(_keys(group)), num_remembered)
                    self._groups.append(found)
                    self._names += found.names(f"optimizer{self._numbers[optimizer]}.group{place}.")
        if self._names and has_scale:
            self._names.append("scaler.scale")
        self._encoded_names = "\n".join(self._names).encode()


def _keys(group: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for key, value in group.items():
        if _is_number(value):
            yield key, -1
        elif isinstance(value, (tuple, list)) and key != "params":
            yield from ((key, place) for place, part in enumerate(value) if _is_number(part))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_cpu and value.numel() == 1 and not value.is_complex()
    return isinstance(value, (bool, int, float))
