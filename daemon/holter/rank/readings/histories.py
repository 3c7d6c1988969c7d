"""What is remembered of parameters from step to step: fingerprints, missing gradients, and gradients that nobody cleared.

after the last step read  |  before this step  |  after this step
a                            b                    c           a != b: moved between steps;  b != c: moved in this one
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holter.rank.context import Context
from holter.rank.readings.samples import is_readable, local, spread

MAX_NAMES = 32
MANY = 16
"""A tensor with at least so many elements does not return to its old value by chance."""
SCALED_SHARE, LEAST_SCALED = 0.02, 5e-6
"""How closely ratios must agree, as a share of their distance from one, and the least distance that is not due to rounding."""
LONG_STEPS = 8
"""Number of steps after which an idle parameter is worth an inspection."""
MAX_WATCHED = 1024
"""Number of parameters without a gradient that are looked at in every step."""
NUM_WATCHED = 4
MAX_OPTIMIZERS = 4
MAX_NUMEL = 1 << 20
TOLD_CHECKS = (4, 5, 16, 17)
"""Gradients left for so many steps of comparison are reported at once: always two in a row, because a single report is not believed."""


@dataclass
class _KnownTensor:
    parameter: "weakref.ref[Any]"
    first: int
    last: int
    last_step: int
    before: int = 0
    """Fingerprint before the last step that was read."""
    num_still: int = 0
    """Number of readings in a row, before this one, in which the tensor had not moved."""
    sizes: tuple[float, ...] = ()
    """Norm, sum of magnitudes, least and largest value at the last reading before which it had moved."""


@dataclass
class MovedTensors:
    """Places of the tensors of a list that moved, by when and how they moved."""

    in_step: list[int] = field(default_factory=list)
    between: list[int] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)
    """Moved in the last step read, but before this step had its old value again: the last step was undone."""
    since_first: list[int] = field(default_factory=list)
    """Differ from what they were when they were first read."""
    scaled: list[int] = field(default_factory=list)
    """Moved between two steps, by multiplying every element by the same factor."""
    still: list[int] = field(default_factory=list)
    """For each tensor of the list, the number of readings before this one in which it had not moved."""


class FingerprintHistory:
    """Keeps the last fingerprints of each tensor."""

    def __init__(self) -> None:
        self._known: dict[int, _KnownTensor] = {}

    def compare(
        self, step: int, parameters: Sequence[Any], before: Any, after: Any, *, is_adjacent: bool
    ) -> MovedTensors:
        """Compare each tensor's fingerprints before and after this step (0: not read) with its earlier ones, and remember them.

        With `is_adjacent`, only tensors that were also read after the step just before can have moved between steps.
        """
        moves = MovedTensors()
        for place, parameter in enumerate(parameters):
            was, now = int(before[place]), int(after[place])
            known = self._known.get(id(parameter))
            if known is None or known.parameter() is not parameter:
                known = self._known[id(parameter)] = _KnownTensor(weakref.ref(parameter), was, was, step - 1)
            moves.still.append(known.num_still)
            if not was or not now:
                continue
            is_comparable = known.last_step == step - 1 or not is_adjacent
            has_moved_between = is_comparable and bool(known.last) and known.last != was
            if was != now:
                moves.in_step.append(place)
            if has_moved_between:
                moves.between.append(place)
            if was == known.before != known.last and (has_moved_between or parameter.numel() >= MANY):
                moves.restored.append(place)
            if known.first not in (0, now):
                moves.since_first.append(place)
            known.num_still = 0 if was != now or has_moved_between else known.num_still + 1
            known.last, known.last_step, known.first = now, step, known.first or was
            known.before = was
        if len(self._known) > 2 * len(parameters) + 1024:
            self._known = {key: known for key, known in self._known.items() if known.parameter() is not None}
        return moves

    def see_sizes(self, parameters: Sequence[Any], moves: MovedTensors, before: Any, after: Any) -> None:
        """Find, in the tables that were just compared, the tensors that moved between two steps and were only scaled."""
        for place in moves.between:
            known = self._known[id(parameters[place])]
            if parameters[place].numel() >= MANY and _is_scaled(known.sizes, _sizes(before, place)):
                moves.scaled.append(place)
            known.sizes = _sizes(after, place)

    def moved_since(self, step: int, parameters: Sequence[Any], now: Any) -> list[int]:
        """Return the places of the tensors that a reading between two steps found different from what the step before had left."""
        moved = []
        for place, parameter in enumerate(parameters):
            known = self._known.get(id(parameter))
            if known is None or known.parameter() is not parameter or known.last_step != step - 1:
                continue
            if known.last and int(now[place]) and known.last != int(now[place]):
                moved.append(place)
        return moved


def _sizes(table: Any, place: int) -> tuple[float, ...]:
    return (
        math.sqrt(float(table.square_sum[place])),
        float(table.abs_sum[place]),
        float(table.min[place]),
        float(table.max[place]),
    )


def _is_scaled(was: tuple[float, ...], now: tuple[float, ...]) -> bool:
    """Whether norm, sum of magnitudes, least and largest value all changed by the same ratio, other than one."""
    if not was or not all(was) or not all(map(math.isfinite, (*was, *now))):
        return False
    ratio, *others = (new / old for new, old in zip(now, was, strict=True))
    tolerance = SCALED_SHARE * abs(ratio - 1) + 2 * torch.finfo(torch.float32).eps
    return abs(ratio - 1) > LEAST_SCALED and all(abs(other - ratio) <= tolerance for other in others)


def prints(table: Any) -> Any:
    """Return the fingerprints of a reading; 0 for a tensor whose memory was freed."""
    return np.where(table.numel > 0, table.fingerprint, 0)


Parameters = Sequence[tuple[str, Any]]


@dataclass
class _IdleSince:
    parameter: "weakref.ref[Any]"
    name: str
    since: int


class IdleParameters:
    """Trainable parameters that get no gradient (None, or exactly zero everywhere), and for how many steps in a row.

    They are looked for at steps of comparison (None) and in every reading of the gradients (zero). Those that were found are looked at in every
    step from then on, so that a branch that is only used between steps of comparison is not taken for idle.
    """

    def __init__(self) -> None:
        self._none: dict[int, _IdleSince] = {}
        self._zero: dict[int, _IdleSince] = {}

    def look(self, step: int, trainable: Parameters, *, has_none: bool) -> None:
        """Find, at a step of comparison, the parameters whose gradient is None; `has_none` says whether there may be any."""
        if not self._none and not has_none:
            return
        known = self._none
        self._none = {
            id(p): known.get(id(p)) or _IdleSince(weakref.ref(p), name, step) for name, p in trainable if p.grad is None
        }

    def glance(self) -> None:
        """Forget, at any step, the parameters that have a gradient now."""
        if not self._none:
            return
        for key, idle in list(self._none.items())[:MAX_WATCHED]:
            parameter = idle.parameter()
            if parameter is None or parameter.grad is not None:
                del self._none[key]

    @property
    def has_zero(self) -> bool:
        """Whether some gradient was zero everywhere when it was last read."""
        return bool(self._zero)

    def see(self, step: int, named: Parameters, table: Any) -> None:
        """Find, in a reading of gradients, those that are zero everywhere."""
        rows = np.flatnonzero((table.zeros == table.numel) & (table.numel > 0)).tolist()
        if self._zero:
            zero = {id(named[row][1]) for row in rows}
            read = {id(p) for _, p in named} if self._zero.keys() - zero else set()
            for key in (self._zero.keys() - zero) & read:
                del self._zero[key]
        for row in rows:
            name, parameter = named[row]
            if parameter is None:
                continue
            idle = self._zero.get(id(parameter))
            if idle is None or idle.parameter() is not parameter:
                self._zero[id(parameter)] = _IdleSince(weakref.ref(parameter), name, step)

    def none(self, step: int, trainable: Parameters) -> dict[str, int]:
        """Return the names of the parameters without a gradient, each with the number of steps for which it has had none."""
        return self._streaks(self._none, step, trainable)

    def zero(self, step: int, trainable: Parameters) -> dict[str, int]:
        """Return the same for the parameters whose gradient is zero everywhere."""
        return self._streaks(self._zero, step, trainable)

    def is_long(self, step: int) -> bool:
        """Whether a parameter has been idle for at least `LONG_STEPS` steps."""
        if not self._none and not self._zero:
            return False
        return any(step - idle.since + 1 >= LONG_STEPS for idles in (self._none, self._zero) for idle in idles.values())

    @staticmethod
    def _streaks(idles: dict[int, _IdleSince], step: int, trainable: Parameters) -> dict[str, int]:
        if not idles:
            return {}
        return {
            name: step - idle.since + 1
            for name, p in trainable
            if (idle := idles.get(id(p))) is not None and idle.parameter() is p
        }


def longest_idle(*streaks: dict[str, int]) -> tuple[list[list[str]], int]:
    """Return the names to report, and the least number of steps among them; once some have been idle for long, only those."""
    longest = [{name: steps for name, steps in each.items() if steps >= LONG_STEPS} for each in streaks]
    chosen = longest if any(longest) else list(streaks)
    return [list(each) for each in chosen], min((steps for each in chosen for steps in each.values()), default=0)


@dataclass
class _Followed:
    """What the gradients of one optimizer held when its steps began."""

    watched: "list[weakref.ref[Any]]" = field(default_factory=list)
    left: float | None = None
    """Norm of what was left in the gradients when the current step began; None if it was judged already, or nobody looked."""
    num_checks: int = 0
    """Number of checks in a row that found something left."""
    first: float = 0.0
    growth: float = 0.0

    def learn(self, table: Any) -> None:
        """Take the norm of what was left in the gradients."""
        self.left = math.sqrt(float(table.square_sum.sum()))

    def judge(self) -> None:
        """Count what was left, or start over if nothing was, when the optimizer is about to step."""
        norm, self.left = self.left, None
        if norm is None:
            return
        if norm <= 0:
            self.num_checks, self.first, self.growth = 0, 0.0, 0.0
        else:
            self.first = self.first if self.num_checks else norm
            self.num_checks, self.growth = self.num_checks + 1, norm / self.first


class LeftoverGradients:
    """What is left in the gradients when the first backward pass of a step begins: something only if nobody clears them.

    A few parameters of each optimizer are read. The reading counts only for the optimizer that then steps: two optimizers that take turns
    clear their gradients at different times.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._followed: dict[weakref.ref[torch.optim.Optimizer], _Followed] = {}

    @property
    def num_checks(self) -> int:
        """Number of checks in a row that found something left, for the optimizer with the most."""
        most = 0
        for followed in self._followed.values():
            most = max(most, followed.num_checks)
        return most

    @property
    def growth(self) -> float:
        """Norm of that optimizer's leftovers, divided by the norm at the first of these checks."""
        return max(self._followed.values(), key=lambda one: one.num_checks, default=_Followed()).growth

    def take(self) -> None:
        """Read the gradients when the first backward pass of a step is about to begin."""
        for reference, followed in list(self._followed.items())[:MAX_OPTIMIZERS]:
            if reference() is None:
                del self._followed[reference]
                continue
            gradients = []
            for one in followed.watched:
                gradient = None if (p := one()) is None else p.grad
                if gradient is not None and not gradient.is_sparse and is_readable(local(gradient)):
                    gradients.append(gradient)
            if gradients:
                self._context.read(f"leftovers{id(reference)}", gradients, followed.learn)
            else:
                followed.left = 0.0

    def judge(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Judge whether the gradients of these optimizers, which are about to step, were cleared; a device may answer for an earlier step."""
        for optimizer in optimizers:
            followed = self._followed.get(weakref.ref(optimizer))
            if followed is None:
                followed = self._followed[weakref.ref(optimizer)] = _Followed()
            followed.judge()
            for one in followed.watched:
                if (p := one()) is None or p.grad is None:
                    followed.watched = []
                    break
            if not followed.watched:
                followed.watched = self._choose(optimizer)

    @staticmethod
    def _choose(optimizer: torch.optim.Optimizer) -> "list[weakref.ref[Any]]":
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        held = [p for p in held if p.numel() <= MAX_NUMEL] or held[:1]
        return [weakref.ref(held[index]) for index in spread(len(held), NUM_WATCHED)]
