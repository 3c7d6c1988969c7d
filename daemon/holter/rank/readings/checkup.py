"""The readings of one vital step, before and after the optimizer, and what follows from them once all have been answered.

Parameters are reported in groups by module, few enough and under names that a person knows:

    blocks.0.attention.weight, blocks.0.mlp.weight, blocks.1.attention.weight, head.weight   ->   blocks.0, blocks.1, head

The groups use as many parts of the names as give no more than 32 groups. Parameters of another dtype or device form a group of their own.
"""

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holter.rank.accelerator import is_capturing
from holter.rank.context import Context
from holter.rank.models import Model, gradient_view, held_by
from holter.rank.readings import histories
from holter.rank.readings.gradient_answers import TableRows
from holter.rank.readings.histories import (
    MAX_NAMES,
    FingerprintHistory,
    IdleParameters,
    LeftoverGradients,
    MovedTensors,
    prints,
)
from holter.rank.readings.samples import Samples, is_readable, local, strided
from holter.records import ModuleVitals, Named, Vitals

ROUNDED_SHARE = 0.999
LEAST_ROUNDED = 16
"""Fewest nonzero values of a tensor for its mantissas to be judged."""
FAINT, MATRIX = 1e-8, 2
"""A faint gradient's norm is below this share of the largest gradient's norm; only parameters of at least this many dimensions are judged."""
HALF_BITS, NUM_HALF = 0x1FFF, 64
"""The mantissa bits of float32 that float16 lacks, and the number of elements of each tensor that are tested for them."""
RESOLUTION = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-7, "float16": 2.0**-10}
LOST_FACTOR = 4.0
"""A step (learning rate times gradient) of this many units in the last place of the weight cannot be lost to rounding."""
COPY_DISTANCE = 0.5
"""A frozen tensor is taken for a copy of a live one if their distance, divided by the live one's norm, is below this."""
NUM_TWINS = 16
NUM_COPY_ELEMENTS = 256
MAX_GROUPS = 32
MAX_DEPTH = 8
REST = "(others)"

Parameters = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class ModuleGroup:
    """Parameters of one module, given by their places in the list that was grouped."""

    module: str
    dtype: str
    places: list[int]


def grouped_by_module(named: Sequence[tuple[str, Any]]) -> list[ModuleGroup]:
    """Group the parameters of the list by module, each in exactly one group."""
    paths = [name.split(".")[:-1] for name, _ in named]
    kinds = [(p.dtype, p.device) for _, p in named]
    keys = _keys(paths, kinds, 1)
    for depth in range(2, MAX_DEPTH + 1):
        deeper = _keys(paths, kinds, depth)
        if len(set(deeper)) > MAX_GROUPS or deeper == keys:
            break
        keys = deeper
    members: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        rest = (REST, *key[1:])
        is_full = len(members) >= MAX_GROUPS - 1
        members.setdefault(key if key in members or not is_full else rest, []).append(place)
    return [
        ModuleGroup(module, str(dtype).removeprefix("torch."), places) for (module, dtype, _), places in members.items()
    ]


def _keys(paths: list[list[str]], kinds: list[Any], depth: int) -> list[Any]:
    return [(".".join(path[:depth]), *kind) for path, kind in zip(paths, kinds, strict=True)]


@dataclass
class CheckupMemory:
    """What is remembered from one checkup to the next."""

    idle: IdleParameters
    leftovers: LeftoverGradients
    trained: FingerprintHistory
    frozen: FingerprintHistory
    moved_names: list[str] = field(default_factory=list)
    """Names of trained parameters that were seen to move between two steps and have not been reported yet."""


@dataclass(frozen=True)
class UnheldParameters:
    """Parameters that have a gradient, but that no optimizer which ever stepped holds."""

    names: tuple[str, ...] = ()
    is_at_rest: bool | None = None
    """Whether an optimizer that never stepped holds one of them; None if nobody looked."""
    is_wrapped: bool = False
    """Whether they are all parameters of a model that the script wrapped for training, none of which an optimizer holds."""


@dataclass
class _Answers:
    gradients: Any = None
    before: Any = None
    after: Any = None
    frozen_before: Any = None
    frozen_after: Any = None
    samples: Any = None
    num_owed: int = 0


class Checkup:
    """Reads the parameters before and after one step, and writes `Vitals` once the device, too, has answered."""

    def __init__(
        self, context: Context, memory: CheckupMemory, trained: Parameters, frozen: Parameters, rates: dict[int, float]
    ) -> None:
        self.step = context.log.step
        self.unheld = UnheldParameters()
        self.resting: set[int] = set()
        """Ids of parameters whose learning rate a schedule keeps at zero for now."""
        self._context, self._memory = context, memory
        self._all = list(trained)
        self._trained = [(name, p) for name, p in trained if readable(p)]
        self._frozen = list(frozen)
        self._rates = [rates.get(id(p), math.nan) for _, p in self._trained]
        self._groups = grouped_by_module(self._trained)
        self._answers = _Answers()
        self._samples: Samples | None = None
        self._halved: set[int] = set()
        """Places of float32 tensors that held only values of float16 before the step."""
        self._left: list[list[tuple[str, weakref.ref[Any]]]] | None = None
        """Weak references to all, trained and frozen parameters while the device's answer is outstanding; None otherwise."""
        self._view = gradient_view(context.models.active())
        self._given = [
            place
            for place, (_, p) in enumerate(self._trained)
            if p.grad is not None and not p.grad.is_sparse and is_readable(local(p.grad))
        ]

    def begin(self) -> None:
        """Read gradients and weights before the optimizer steps."""
        self._read("gradients", [self._trained[place][1].grad for place in self._given], histogram="sampled")
        self._read_weights("before")
        self._halved = {place for place, (_, p) in enumerate(self._trained) if _is_halved(local(p))}
        self._samples = Samples([[self._trained[place][1] for place in group.places] for group in self._groups])

    def end(self) -> None:
        """Read the weights after the optimizer has stepped."""
        if self._samples is None or is_capturing() or not all(readable(p) for _, p in (*self._trained, *self._frozen)):
            self._all, self._trained, self._frozen, self._samples = [], [], [], None
            return
        self._read_weights("after")
        self._read("samples", self._samples.differences())
        self._samples = None
        self._conclude()
        self._let_go()

    def _let_go(self) -> None:
        """Keep only weak references: the device answers later, and what the script frees before then must not be held."""
        self._left = [
            [(name, weakref.ref(p)) for name, p in named] for named in (self._all, self._trained, self._frozen)
        ]
        self._all, self._trained, self._frozen = [], [], []

    def _take_back(self) -> bool:
        """Turn the weak references into parameters again; return False if the script has freed one of them."""
        if self._left is not None:
            lists = [[(name, reference()) for name, reference in named] for named in self._left]
            self._left = None
            if any(p is None for named in lists for _, p in named):
                return False
            self._all, self._trained, self._frozen = lists
        return True

    def _read_weights(self, moment: str) -> None:
        """Read the frozen weights, and the trained ones unless the comparison of replicas has just read them."""
        ids, table = self._context.readings.kept.get(f"parameters_{moment}", ([], None))
        rows = dict(zip(ids, range(len(ids)), strict=True))
        places = [rows.get(id(p), -1) for _, p in self._trained]
        if table is not None and min(places, default=-1) >= 0:
            setattr(self._answers, moment, TableRows(table, np.array(places)))
        else:
            self._read(moment, [p for _, p in self._trained])
        self._read(f"frozen_{moment}", [p for _, p in self._frozen])

    def _read(self, what: str, tensors: list[Any], *, histogram: str = "off") -> None:
        if not tensors:
            return
        self._answers.num_owed += 1

        def learn(table: Any) -> None:
            setattr(self._answers, what, table)
            self._answers.num_owed -= 1
            self._conclude()

        self._context.read(f"vitals.{what}", tensors, learn, histogram=histogram)

    def _conclude(self) -> None:
        answers = self._answers
        if answers.num_owed or self._samples is not None or answers.samples is None or answers.after is None:
            return
        left_out = self._context.hold.flags.left_out()
        if (left_out is not None and left_out.step <= self.step) or not self._take_back():
            return
        memory, before, after = self._memory, prints(answers.before), prints(answers.after)
        frozen = [prints(table) for table in (answers.frozen_before, answers.frozen_after) if table is not None]
        moves = memory.trained.compare(self.step, [p for _, p in self._trained], before, after, is_adjacent=True)
        still = MovedTensors()
        if self._frozen:
            parameters = [p for _, p in self._frozen]
            still = memory.frozen.compare(self.step, parameters, *frozen, is_adjacent=False)
            memory.frozen.see_sizes(parameters, still, answers.frozen_before, answers.frozen_after)
        moved, memory.moved_names = memory.moved_names, []
        self._context.state_history.touched.update(moved, (self._trained[place][0] for place in moves.between))
        live = {int(value) for value in (*before, *after)}
        between = [p for p in still.between if p not in still.in_step and not self._is_copy(p, frozen[0][p], live)]
        disturbed = sorted({*still.in_step, *between})
        for place in disturbed:
            self._context.state_history.see_disturbed(self._frozen[place][0], self.step, still.still[place])
        none, zero, idle_steps = self._idle()
        vitals = Vitals(
            view=self._view,
            modules=[self._module(number, group) for number, group in enumerate(self._groups)],
            num_trainable=len(self._all),
            no_gradient=none,
            zero_gradient=zero,
            idle_steps=idle_steps,
            unchanged=self._named(self._trained, self._unchanged(moves)),
            without_rate=self._named(self._trained, self._without_rate()),
            unheld=_names(self.unheld.names),
            faint=self._named(self._trained, self._faint()),
            is_unheld_at_rest=self.unheld.is_at_rest,
            is_unheld_wrapped=self.unheld.is_wrapped,
            rounded=self._named(self._trained, self._rounded(moves)),
            frozen_moved_in_step=self._named(self._frozen, still.in_step),
            frozen_moved_between=self._named(self._frozen, between),
            frozen_scaled=self._named(self._frozen, [place for place in between if place in still.scaled]),
            frozen_still_checks=min((still.still[place] for place in disturbed), default=0),
            moved_between=_names(dict.fromkeys([*moved, *(self._trained[place][0] for place in moves.between)])),
            uncleared_steps=memory.leftovers.num_checks,
            uncleared_growth=memory.leftovers.growth,
        )
        self._context.writer.say(self.step, vitals)
        # Hold nothing after the checkup, so that what the script frees is freed at once.
        self._all, self._trained, self._frozen, answers.samples = [], [], [], None

    def _idle(self) -> tuple[Named, Named, int]:
        """Return the parameters without a gradient, those whose gradient is zero when the optimizer gets it, and for how many steps.

        The gradient that the optimizer gets is what counts: a rank's own may be zero where the others' are not.
        """
        idle, table = self._memory.idle, self._answers.gradients
        is_given_zero = {
            self._trained[place][0]
            for row, place in enumerate(self._given)
            if table is not None and table.zeros[row] == table.numel[row]
        }
        zero = {name: n for name, n in idle.zero(self.step, self._all).items() if name in is_given_zero}
        (none_names, zero_names), steps = histories.longest_idle(idle.none(self.step, self._all), zero)
        return _names(none_names), _names(zero_names), steps

    def _module(self, number: int, group: ModuleGroup) -> ModuleVitals:
        answers, places = self._answers, set(group.places)
        rows = np.array([row for row, place in enumerate(self._given) if place in places], dtype=np.int64)
        table, samples = answers.gradients, answers.samples
        numel = int(table.numel[rows].sum()) if len(rows) else 0
        weight, added, masked = (3 * number + k for k in range(3))
        num_masked = int(samples.numel[masked] - samples.nans[masked])
        weight_norm = math.sqrt(samples.square_sum[weight])
        absmax = table.absmax[rows] if len(rows) else np.zeros(0)
        return ModuleVitals(
            module=group.module,
            dtype=group.dtype,
            numel=sum(int(answers.after.numel[place]) for place in group.places),
            weight_norm=math.sqrt(float(answers.after.square_sum[group.places].sum())),
            gradient_norm=math.sqrt(float(table.square_sum[rows].sum())) if numel else 0.0,
            gradient_zeros=float(table.zeros[rows].sum()) / numel if numel else math.nan,
            gradient_subnormals=float(table.subnormals[rows].sum()) / numel if numel else math.nan,
            gradient_absmax=float(np.nanmax(absmax)) if np.isfinite(absmax).any() else math.nan,
            update_ratio=math.sqrt(samples.square_sum[added]) / weight_norm if weight_norm else math.nan,
            changed=1.0 - float(samples.zeros[masked]) / num_masked if num_masked else math.nan,
            learning_rate=max((self._rates[place] for place in group.places), default=math.nan),
            exponents=table.histogram[rows].sum(axis=0).reshape(32, 8).sum(axis=1).tolist() if numel else [],
        )

    def _unchanged(self, moves: MovedTensors) -> list[int]:
        """Return parameters with a gradient that did not change, or whose last step was undone, although the step is too large to be lost to rounding."""
        moved, out = set(moves.in_step) - set(moves.restored), []
        table, before = self._answers.gradients, self._answers.before
        for row, place in enumerate(self._given):
            if place in moved:
                continue
            dtype = str(self._trained[place][1].dtype).removeprefix("torch.")
            unit = RESOLUTION.get(dtype, 1.0) * float(before.absmax[place])
            if self._rates[place] * float(table.absmax[row]) > LOST_FACTOR * unit and before.numel[place]:
                out.append(place)
        return out

    def _without_rate(self) -> list[int]:
        """Return parameters with a nonzero gradient and a learning rate of zero, except those that a schedule keeps there."""
        table = self._answers.gradients
        return [
            place
            for row, place in enumerate(self._given)
            if self._rates[place] == 0
            and table.zeros[row] < table.numel[row]
            and id(self._trained[place][1]) not in self.resting
        ]

    def _faint(self) -> list[int]:
        """Return the matrices with next to no gradient. Biases are left out: before a normalisation, their gradient is nothing but rounding."""
        table = self._answers.gradients
        if table is None or not len(table.square_sum):
            return []
        limit = FAINT * FAINT * float(np.nanmax(table.square_sum))
        return [
            place
            for row, place in enumerate(self._given)
            if 0 < table.square_sum[row] < limit and self._trained[place][1].dim() >= MATRIX
        ]

    def _rounded(self, moves: MovedTensors) -> list[int]:
        """Return float32 parameters that hold only values of a narrower dtype, before the step or after it.

        Before it as well, because a script that rounds between two steps rounds what the last step left.
        """
        tables = self._answers.before, self._answers.after
        return [
            place
            for place in moves.since_first
            if self._trained[place][1].dtype == torch.float32
            and (place in self._halved or any(_is_rounded(table, place) for table in tables))
        ]

    def _is_copy(self, place: int, fingerprint: Any, live: set[int]) -> bool:
        """Whether a frozen tensor that moved is a copy of a live tensor, as it is now or was a few steps ago."""
        if int(fingerprint) in live:
            return True
        mine = local(self._frozen[place][1])
        twins = [t for _, p in self._trained if (t := local(p)).shape == mine.shape and t.is_cpu and mine.is_cpu]
        sample = strided(mine, NUM_COPY_ELEMENTS).double()
        others = [strided(twin, NUM_COPY_ELEMENTS).double() for twin in twins[:NUM_TWINS]]
        return any(float((sample - other).norm()) < COPY_DISTANCE * float(other.norm()) for other in others)

    @staticmethod
    def _named(named: Parameters, places: Iterable[int]) -> Named:
        return _names([named[place][0] for place in places])


def _is_halved(weight: torch.Tensor) -> bool:
    """Whether a float32 tensor in host memory went through float16; the fused pass only tests for bfloat16."""
    if weight.dtype is not torch.float32 or not weight.is_cpu or weight.numel() < LEAST_ROUNDED:
        return False
    sample = strided(weight, NUM_HALF)
    bits = sample.view(torch.int32)
    # NaN has no low bits in any dtype.
    return (
        bool(sample.isfinite().all())
        and not bool((bits & HALF_BITS).any())
        and int(bits.count_nonzero()) >= LEAST_ROUNDED
    )


def _is_rounded(table: Any, place: int) -> bool:
    if table.nans[place]:
        return False
    num_infs = int(table.pos_infs[place] + table.neg_infs[place])
    num_values = int(table.numel[place] - table.zeros[place]) - num_infs
    num_short = int(table.low_mantissa_zero[place] - table.zeros[place]) - num_infs
    return num_values >= LEAST_ROUNDED and num_short > ROUNDED_SHARE * num_values


def readable(parameter: Any) -> bool:
    """Whether this rank holds elements of the parameter that can be read."""
    return is_readable(local(parameter))


def trained_by(models: Iterable[Model], optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[str, Any]]:
    """Return the parameters that require gradients, that these optimizers hold, and of which this rank holds elements."""
    held = held_by(optimizers)
    every = [(name, p) for m in models for name, p in m.parameters if p.requires_grad and id(p) in held]
    return [(name, p) for name, p in every if local(p).numel()]


def rates_of(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, float]:
    """Return the learning rate of each parameter, by the parameter's id; NaN if it is unknown."""
    return {
        id(p): rate
        for optimizer in optimizers
        for group in optimizer.param_groups
        for rate in (_rate(group),)
        for p in group["params"]
    }


def resting_by_schedule(optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
    """Return the ids of parameters whose learning rate a schedule has set to zero while others train: they will be thawed later.

    A group whose initial rate is zero or missing is not among them.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if not any(_rate(group) > 0 for group in groups):
        return set()
    waiting = [group for group in groups if _rate(group) == 0 and _rate(group, "initial_lr") > 0]
    return {id(p) for group in waiting for p in group["params"]}


def _rate(group: dict[str, Any], name: str = "lr") -> float:
    rate = group.get(name)
    if isinstance(rate, torch.Tensor):
        return float(rate) if rate.is_cpu else math.nan
    return float(rate) if isinstance(rate, (int, float)) else math.nan


def _names(names: Iterable[str]) -> Named:
    names = list(names)
    return Named(len(names), names[:MAX_NAMES])
