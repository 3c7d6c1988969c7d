"""The census: all tensors of the models with name, shape, dtype, whether frozen, what is odd about their values, and which optimizer holds them.

What is odd about the values is computed from the statistics of one fused pass (`marks`). A small buffer is also tested for a progression:

    inv_freq     1.0, 0.1, 0.01, …      geometric      as rotary embeddings have it
    positions    0, 1, 2, 3, …          arithmetic

A progression may deviate by what rounding explains, so that it is still recognised after a cast to a narrower dtype.

Readings go over entries of the census: `SelectionCache` finds the entries of a class of tensors once, and again when the models or the
optimizers change.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from holter.rank.guard import Guard
from holter.rank.models import Model, Models, held_by, is_sharded, pipeline_stages
from holter.rank.readings.samples import local
from holter.records import Census, Component, Mark, TensorEntry
from holter_kernels import summarize

if TYPE_CHECKING:
    from holter.rank.context import Context

HUGE = 1e6
NEARLY_ALL = 0.99
MANY_SUBNORMALS = 0.01
MIN_ROUNDED = 16
"""Fewest nonzero values that are judged as rounded: a few may have short mantissas by chance, such as ones and halves."""
MAX_ELEMENTS = 65_536
"""Largest number of elements of a buffer that is looked at element by element."""
MIN_TERMS = 4
MIN_RANGE = 1.5
"""Least ratio between the ends of a geometric progression: one that hardly grows looks like any other progression."""
MAX_BYTES = 1 << 30
"""Most bytes that one census reads of all tensors together; with more, it reads no values."""
MARK_THRESHOLDS = (HUGE, NEARLY_ALL, MANY_SUBNORMALS, float(MIN_ROUNDED))
"""The thresholds of the marks in the order in which the native code takes them."""
WIDE = (torch.float32, torch.float64)
ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20, torch.float64: 2.0**-20}
"""Relative rounding error of one value; generous for the wide dtypes, whose values were computed, mostly in float32."""
ENTRIES_PER_PART = 500
"""Number of entries in one part of the census, which makes about 50 KB: small compared with the page's ring."""
ValueTraits = tuple[int, str, int]
"""Marks, progression (`geometric`, `arithmetic` or empty), and number of different values (-1: not counted)."""


NOT_READ: ValueTraits = (0, "", -1)


@dataclass(frozen=True)
class DtypeTraits:
    """What the dtypes of a list of tensors mean for their marks; each array has one entry per tensor."""

    is_wide: np.ndarray
    is_float: np.ndarray
    is_normal: np.ndarray
    """Whether it is a float dtype in which subnormal values are rare; in float16 they begin at 6e-5."""

    @cached_property
    def flags(self) -> np.ndarray:
        """All three as bits of one byte per tensor, as the native code reads them."""
        bits = self.is_wide * np.uint8(1) | self.is_float * np.uint8(2) | self.is_normal * np.uint8(4)
        return np.asarray(bits, dtype=np.uint8)

    @staticmethod
    def of(dtypes: Sequence[torch.dtype]) -> "DtypeTraits":
        """Return the traits of tensors with these dtypes."""
        is_float = np.array([dtype.is_floating_point for dtype in dtypes], dtype=bool)
        is_half = np.array([dtype is torch.float16 for dtype in dtypes], dtype=bool)
        return DtypeTraits(np.array([dtype in WIDE for dtype in dtypes], dtype=bool), is_float, is_float & ~is_half)


def marks(table: Any, traits: DtypeTraits) -> np.ndarray:
    """Return the `Mark`s of each tensor of a pass, as uint8."""
    numel, zeros = table.numel.astype(np.float64), table.zeros.astype(np.float64)
    nonzeros = numel - zeros
    is_bad = table.nans + table.pos_infs + table.neg_infs > 0
    is_constant = (numel > 1) & (table.min == table.max) & ~is_bad
    is_short = (table.low_mantissa_zero - zeros >= NEARLY_ALL * nonzeros) & (nonzeros >= MIN_ROUNDED)
    is_huge = traits.is_float & (table.absmax > HUGE) | traits.is_normal & (table.subnormals > MANY_SUBNORMALS * numel)
    found = is_constant * np.uint8(Mark.CONSTANT)
    found |= ((numel > 0) & (nonzeros == 0)) * np.uint8(Mark.ZERO)
    found |= is_bad * np.uint8(Mark.NONFINITE)
    found |= (traits.is_wide & ~is_constant & is_short) * np.uint8(Mark.ROUNDED)
    found |= is_huge * np.uint8(Mark.HUGE)
    return np.asarray(found, dtype=np.uint8)


def progression(buffer: torch.Tensor) -> tuple[str, int]:
    """Return `geometric`, `arithmetic` or an empty string, and the number of different values.

    The number is -1 for a buffer that is not read: empty, too large, complex, or on a device.
    """
    if buffer.device.type != "cpu" or not 0 < buffer.numel() <= MAX_ELEMENTS or buffer.is_complex():
        return "", -1
    values = buffer.detach().to(torch.float64).reshape(-1).numpy()
    num_distinct = len(np.unique(values))
    is_line = sum(size > 1 for size in buffer.shape) == 1
    if not is_line or values.size < MIN_TERMS or not np.isfinite(values).all() or values[0] == values[-1]:
        return "", num_distinct
    roundoff = ROUNDOFF.get(buffer.dtype, 0.0)
    if buffer.dtype in WIDE and _is_short(buffer):
        roundoff = ROUNDOFF[torch.bfloat16]
    if _is_line(values, tolerance=2 * roundoff * float(np.abs(values).max()) + 1e-12):
        return "arithmetic", num_distinct
    # Rounding enters three times: by the term and by both ends.
    if values.min() > 0 and values.max() / values.min() > MIN_RANGE and _is_line(np.log(values), 4 * roundoff):
        return "geometric", num_distinct
    return "", num_distinct


def _is_line(values: np.ndarray, tolerance: float) -> bool:
    ideal = np.linspace(values[0], values[-1], values.size)
    return bool((np.abs(values - ideal) <= tolerance).all())


def _is_short(buffer: torch.Tensor) -> bool:
    """Whether the values of a wide dtype fit bfloat16."""
    return bool((buffer.detach().to(torch.bfloat16).to(buffer.dtype) == buffer).all())


class CensusTaker:
    """Takes the census of all watched models, in parts; a tensor's values are read only when it is first seen."""

    def __init__(self, guard: Guard, declared_frozen: Sequence[str] = ()) -> None:
        self._guard = guard
        self._declared_frozen = list(declared_frozen)
        self._values: dict[tuple[str, torch.dtype], ValueTraits] = {}

    def take(
        self, models: Models, optimizers: Sequence[torch.optim.Optimizer], ready_order: Sequence[int]
    ) -> Iterator[Census]:
        """Yield the census in parts; `ready_order` holds the ids of parameters in the order in which their gradients became ready."""
        watched = models.all()
        tensors = [(name, p) for model in watched for name, p in model.parameters]
        place = {id(p): index for index, (_, p) in enumerate(tensors)}
        every = [*tensors, *((name, b) for model in watched for name, b in model.buffers)]
        self._guard.attempt(self._read_new, every)
        entries = self._entries(watched, optimizers)
        held = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
        foreign = [[p for p in parameters if id(p) not in place] for parameters in held]
        parts = max(1, -(-len(entries) // ENTRIES_PER_PART))
        for part in range(parts):
            yield Census(
                model=0,
                wrapper=watched[0].wrapper if watched else "",
                is_replicated=any(model.is_replicated for model in watched),
                optimizers=[type(optimizer).__name__ for optimizer in optimizers],
                components=[_component(model, held) for model in watched],
                num_held=[len(parameters) for parameters in held],
                num_foreign=[len(parameters) for parameters in foreign],
                num_foreign_with_gradient=[sum(p.grad is not None for p in parameters) for parameters in foreign],
                declared_frozen=self._declared_frozen,
                backward_order=[place[i] for i in ready_order if i in place] if part == 0 else [],
                part=part,
                parts=parts,
                entries=entries[part * ENTRIES_PER_PART : (part + 1) * ENTRIES_PER_PART],
                axes=next((model.axes for model in watched if model.axes), []),
                stages=sorted({int(stage.stage_index) for stage in pipeline_stages()}),
            )

    def _entries(self, watched: Sequence[Model], optimizers: Sequence[torch.optim.Optimizer]) -> list[TensorEntry]:
        holder = {
            id(parameter): index
            for index, optimizer in enumerate(optimizers)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        owners = [_owners(model) for model in watched]
        parameters = [(number, name, p, False) for number, model in enumerate(watched) for name, p in model.parameters]
        buffers = [(number, name, b, True) for number, model in enumerate(watched) for name, b in model.buffers]
        entries = []
        for number, name, t, is_buffer in parameters + buffers:
            module_class, is_persistent = owners[number].get(name, ("", True))
            found, pattern, num_distinct = self._values.get((name, t.dtype), NOT_READ)
            entries.append(
                TensorEntry(
                    name=name,
                    shape=tuple(_whole_shape(watched[number], t)),
                    dtype=str(t.dtype).removeprefix("torch."),
                    requires_grad=t.requires_grad,
                    is_buffer=is_buffer,
                    optimizer=holder.get(id(t), -1),
                    is_replicated=id(t) in watched[number].replicas,
                    is_sharded=is_sharded(t),
                    component=number,
                    module_class=module_class,
                    is_persistent=is_persistent,
                    marks=found,
                    pattern=pattern if is_buffer else "",
                    num_distinct=num_distinct if is_buffer else -1,
                    axis=holders.axis if (holders := watched[number].holders.get(id(t))) else "",
                    placements=holders.placements if holders else "",
                    policy=watched[number].policies.get(id(t), ""),
                )
            )
        return entries

    def _read_new(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Read the values of new tensors, except those on a device: we would have to wait for the answer."""
        new = [(name, t) for name, t in named if (name, t.dtype) not in self._values]
        self._values.update({(name, t.dtype): NOT_READ for name, t in new})
        # A shard of a trained parameter may well be constant (a bias, a row of padding), so only frozen shards, which were loaded, are read.
        new = [(name, t if t.requires_grad else held_part(t)) for name, t in new]
        new = [(name, t) for name, t in new if _is_readable(t)]
        if sum(t.nbytes for _, t in new) > MAX_BYTES or not new:
            return
        buffers = {name for name, t in named if not isinstance(t, torch.nn.Parameter)}
        found = marks(summarize([t for _, t in new], histogram="off"), DtypeTraits.of([t.dtype for _, t in new]))
        for (name, t), mark in zip(new, found.tolist(), strict=True):
            is_buffer = name in buffers
            self._values[name, t.dtype] = (mark, *(progression(t) if is_buffer else ("", -1)))


def _component(model: Model, held: Sequence[Sequence[Any]]) -> Component:
    ids = {id(p) for parameters in held for p in parameters}
    model.was_optimized |= any(id(p) in ids for _, p in model.parameters)
    inner = model.inner
    return Component(
        name=model.prefix.removesuffix("."),
        module_class=type(inner).__name__ if inner is not None else "",
        wrapper=model.wrapper,
        is_trained=model.was_optimized,
        num_replicas=model.num_replicas,
        is_find_unused=bool(getattr(model.ddp, "find_unused_parameters", False)),
    )


def held_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds; ZeRO's third stage keeps it beside the parameter."""
    part: torch.Tensor | None = getattr(tensor, "ds_tensor", None)
    return local(part if part is not None else tensor)


def _whole_shape(model: Model, tensor: torch.Tensor) -> Sequence[int]:
    """Return the shape of the whole tensor, which is the same on every rank, even if this rank holds only a shard."""
    whole: Sequence[int] = model.whole_shapes.get(id(tensor)) or getattr(tensor, "ds_shape", ()) or tensor.shape
    return whole


def _owners(model: Model) -> dict[str, tuple[str, bool]]:
    """Map the name of each tensor to the class of its module, and to whether a state dict holds it."""
    found = {}
    for path, module in model.inner.named_modules() if model.inner is not None else ():
        prefix = f"{model.prefix}{path}." if path else model.prefix
        volatile = getattr(module, "_non_persistent_buffers_set", ())
        own = *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
        for name, _ in own:
            found[prefix + name] = (type(module).__name__, name not in volatile)
    return found


def _is_readable(tensor: torch.Tensor) -> bool:
    kinds = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return (
        type(tensor) in kinds and tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() > 0
    )


@dataclass(frozen=True)
class Selection:
    """Some entries of the census: parameters, or buffers."""

    size: int
    """Number of all entries of the census, chosen or not."""
    places: np.ndarray
    """Places of the chosen entries among all, ascending."""
    tensors: list[torch.Tensor]
    over: Literal["parameters", "buffers"] = "parameters"
    keys: Sequence[str] = ()
    """Names of an optimizer's state tensors; the entries are then all parameters, once for each of these names."""
    scopes: tuple[str, ...] = ()
    """For each entry, the scope over which it is compared (`holter.rank.mesh`); empty if all are compared over all ranks."""
    names: Sequence[str] = ()
    """Names of the entries if they are not entries of the census."""

    @cached_property
    def traits(self) -> DtypeTraits:
        """What the dtypes of the chosen tensors mean for their marks."""
        return DtypeTraits.of([tensor.dtype for tensor in self.tensors])

    @cached_property
    def is_partitioned(self) -> bool:
        """Whether ZeRO's third stage keeps this rank's part beside some tensor. This does not change after the first step."""
        return any(getattr(tensor, "ds_tensor", None) is not None for tensor in self.tensors)

    @cached_property
    def outline(self) -> "Selection":
        """The same selection without the tensors, for a reader that waits for an answer: it must not keep the script's tensors alive."""
        return Selection(self.size, self.places, [], self.over, self.keys, self.scopes, self.names)

    @cached_property
    def by_scope(self) -> list[tuple[str, np.ndarray]]:
        """Each scope with the places of its entries, sorted by scope."""
        if not any(self.scopes):
            return [("", self.places)]
        scopes = np.array(self.scopes)
        return [(str(scope), self.places[scopes == scope]) for scope in sorted(set(self.scopes))]

    def part(self, indices: Sequence[int]) -> "Selection":
        """Return the entries at these indices of the selection."""
        scopes = tuple(self.scopes[i] for i in indices) if self.scopes else ()
        return Selection(
            self.size, self.places[list(indices)], [self.tensors[i] for i in indices], self.over, scopes=scopes
        )


class SelectionCache:
    """Keeps selections; each is made once, and made again when the models change."""

    def __init__(self, context: "Context") -> None:
        self._context = context
        self._made: dict[object, Selection] = {}
        self._sizes: dict[object, tuple[int, np.ndarray]] = {}
        self._places: dict[int, int] = {}
        """Place of each parameter in the census, by its id; a tensor that becomes a replica keeps its place."""
        self.num_parameters = 0
        """Number of parameters in the census when places were last looked up."""
        self._generation = -1
        self._is_possible = False

    def forget(self) -> None:
        """Drop all selections, because the script let go of a model: we must not hold its memory."""
        self._made, self._places, self._generation = {}, {}, -1

    def is_possible(self) -> bool:
        """Whether it is known of some tensor which other ranks hold it, or that none does."""
        models = self._context.models
        if self._generation != models.generation or models.has_lost:
            self._forget_if_changed()
        return self._is_possible

    def parameters(
        self, optimizers: Sequence[torch.optim.Optimizer], *, held_only: bool, with_own: bool = False
    ) -> Selection:
        """Return the trainable replicas of the models that these optimizers train.

        With `held_only` only those that the optimizers hold; with `with_own` also tensors that only this rank holds.
        """
        outline = self._context.models.outline(optimizers)

        def make() -> Selection:
            held = held_by(optimizers).union(*(self._context.frameworks.trains.get(one, ()) for one in optimizers))
            models = [model for model in self._context.models if any(id(p) in held for _, p in model.parameters)]
            return self._choose(
                lambda model, p: (
                    model.is_compared(p, with_own=with_own)
                    and p.requires_grad
                    and (id(p) in held if held_only else model in models)
                )
            )

        return self._once(("parameters", held_only, with_own, *outline), make)

    def where(self, key: object, is_chosen: Callable[[Model, torch.Tensor], bool]) -> Selection:
        """Return the parameters, including those of components, for which `is_chosen` holds."""
        return self._once(key, lambda: self._choose(is_chosen))

    def slice_of(self, chosen: Selection, step: int, at_least_bytes: int) -> Selection:
        """Return this step's slice of the selection: about as many bytes as the trainable parameters have, or `at_least_bytes` if that is more.

        The number of slices is odd. The interval between comparisons is a power of two, so every slice gets its turn.
        """
        num_slices, numbers = self._sliced(chosen, at_least_bytes)
        if num_slices == 1:
            return chosen
        turn = step % num_slices
        return self._once(("slice", turn), lambda: chosen.part(np.flatnonzero(numbers == turn).tolist()))

    def _sliced(self, chosen: Selection, at_least_bytes: int) -> tuple[int, np.ndarray]:
        """Return the number of slices, and the slice that each tensor is in."""
        if ("slices", at_least_bytes) not in self._sizes:
            trainable = sum(p.nbytes for model in self._context.models for _, p in model.parameters if p.requires_grad)
            sizes = np.array([tensor.nbytes for tensor in chosen.tensors], dtype=np.int64)
            most = max(at_least_bytes, trainable)
            num_slices = int(-(-sizes.sum() // most)) | 1
            begins = np.cumsum(sizes) - sizes
            self._sizes["slices", at_least_bytes] = num_slices, begins * num_slices // max(int(sizes.sum()), 1)
        return self._sizes["slices", at_least_bytes]

    def once_for_each(self, chosen: Selection, keys: tuple[str, ...]) -> Selection:
        """Return the same entries, repeated once for each of these keys."""

        def make() -> Selection:
            places = np.concatenate([chosen.places + chosen.size * turn for turn in range(len(keys))])
            tensors, scopes = chosen.tensors * len(keys), chosen.scopes * len(keys)
            return Selection(chosen.size * len(keys), places, tensors, keys=keys, scopes=scopes)

        return self._once(("keys", id(chosen), keys), make)

    def places_of(self, parameters: Sequence[torch.Tensor]) -> np.ndarray:
        """Return the places of these parameters among all parameters of the census."""
        count = sum(len(model.parameters) for model in self._context.models.all())
        is_known = all(id(p) in self._places for p in parameters)
        if not is_known or self.num_parameters != count:
            every = (p for model in self._context.models.all() for _, p in model.parameters)
            self._places = {id(p): place for place, p in enumerate(every)}
            self.num_parameters = count
        return np.array([self._places[id(p)] for p in parameters], dtype=np.int64)

    def buffers(self, model: Model) -> Selection:
        """Return the buffers of one model that must be equal on all ranks."""
        return self._once(
            ("buffers", id(model)),
            lambda: self._choose(lambda other, b: other is model and other.is_compared(b), "buffers"),
        )

    def _choose(
        self, is_chosen: Callable[[Model, torch.Tensor], bool], over: Literal["parameters", "buffers"] = "parameters"
    ) -> Selection:
        entries = [
            (is_chosen(model, t), t, model) for model in self._context.models.all() for _, t in getattr(model, over)
        ]
        places = [place for place, (is_in, tensor, _) in enumerate(entries) if is_in and not tensor.is_sparse]
        chosen = [entries[place] for place in places]
        return Selection(
            len(entries),
            np.array(places, dtype=np.int64),
            [tensor for _, tensor, _ in chosen],
            over,
            scopes=tuple(model.scope_of(tensor) for _, tensor, model in chosen),
        )

    def _once(self, key: object, make: Callable[[], Selection]) -> Selection:
        models = self._context.models
        if self._generation != models.generation or models.has_lost:
            self._forget_if_changed()
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make()
        return found

    def _forget_if_changed(self) -> None:
        models = self._context.models
        # Only iterating over the models notices that one is gone.
        watched = iter(models)
        if self._generation != models.generation:
            self._made, self._sizes = {}, {}
            self._is_possible = any(model.holders for model in watched)
            self._generation = models.generation
