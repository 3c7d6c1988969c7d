"""What is remembered of parameters from step to step: fingerprints, missing gradients, gradients that nobody cleared.

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
"""From so many elements on, a tensor does not return to its old value by chance."""
SCALED_SHARE, LEAST_SCALED = 0.02, 5e-6
"""How well ratios must agree, as a share of their distance from one, and the least distance that is not rounding."""
LONG_STEPS = 8
"""Steps after which an idle parameter is worth an inspection."""
MAX_WATCHED = 1024
"""Candidates that are looked at in every step."""
NUM_WATCHED = 4
MAX_OPTIMIZERS = 4
MAX_NUMEL = 1 << 20
TOLD_CHECKS = (4, 5, 16, 17)
"""Gradients left for so many steps of comparison are told at once: twice, because one report is not believed."""


@dataclass
class _KnownTensor:
    parameter: "weakref.ref[Any]"
    first: int
    last: int
    last_step: int
    before: int = 0
    """Before the last step read."""
    num_still: int = 0
    """Readings in a row, before this one, in which it had not moved."""
    sizes: tuple[float, ...] = ()
    """As of the last reading before which it had moved."""


@dataclass
class MovedTensors:
    """Which tensors of a list moved and when, by their places in it."""

    in_step: list[int] = field(default_factory=list)
    between: list[int] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)
    """Moved in the last step read, and before this one again what it was before that one: the step was undone."""
    since_first: list[int] = field(default_factory=list)
    """Ever changed since it was first read."""
    scaled: list[int] = field(default_factory=list)
    """Of those between: every element was multiplied by the same factor."""
    still: list[int] = field(default_factory=list)
    """For each of the list: for how many readings it had not moved before this one."""


class FingerprintHistory:
    """The last fingerprints of each tensor."""

    def __init__(self) -> None:
        self._known: dict[int, _KnownTensor] = {}

    def compare(
        self, step: int, parameters: Sequence[Any], before: Any, after: Any, *, is_adjacent: bool
    ) -> MovedTensors:
        """Take in two fingerprints of each, 0 where it was not read.

        With `is_adjacent`, only what was read after the very step before can have moved between steps.
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
        """By the tables that were just compared: which of those that moved between two steps were only scaled."""
        for place in moves.between:
            known = self._known[id(parameters[place])]
            if parameters[place].numel() >= MANY and _is_scaled(known.sizes, _sizes(before, place)):
                moves.scaled.append(place)
            known.sizes = _sizes(after, place)

    def moved_since(self, step: int, parameters: Sequence[Any], now: Any) -> list[int]:
        """Places of those that are not what the step before left; a reading between two steps."""
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
    """Whether norm, sum of magnitudes, least and largest value all have the same ratio, and it is not one."""
    if not was or not all(was) or not all(map(math.isfinite, (*was, *now))):
        return False
    ratio, *others = (new / old for new, old in zip(now, was, strict=True))
    tolerance = SCALED_SHARE * abs(ratio - 1) + 2 * torch.finfo(torch.float32).eps
    return abs(ratio - 1) > LEAST_SCALED and all(abs(other - ratio) <= tolerance for other in others)


def prints(table: Any) -> Any:
    """Fingerprints of a reading; 0 where a tensor had lost its memory."""
    return np.where(table.numel > 0, table.fingerprint, 0)


Parameters = Sequence[tuple[str, Any]]


@dataclass
class _IdleSince:
    parameter: "weakref.ref[Any]"
    name: str
    since: int


class IdleParameters:
    """Parameters that are to be trained and get no gradient (None, or exactly zero everywhere), and for how many steps in a row.

    They are looked for at steps of comparison (None) and in every reading of the gradients (zero). What was found is looked at in every step
    from then on, so that a branch that is used in other steps than those of comparison is not taken for idle.
    """

    def __init__(self) -> None:
        self._none: dict[int, _IdleSince] = {}
        self._zero: dict[int, _IdleSince] = {}

    def look(self, step: int, trainable: Parameters, *, has_none: bool) -> None:
        """A step of comparison: which gradients are None, if any of these optimizers' is."""
        if not self._none and not has_none:
            return
        known = self._none
        self._none = {
            id(p): known.get(id(p)) or _IdleSince(weakref.ref(p), name, step) for name, p in trainable if p.grad is None
        }

    def glance(self) -> None:
        """Any step: forget those that have a gradient now."""
        if not self._none:
            return
        for key, idle in list(self._none.items())[:MAX_WATCHED]:
            parameter = idle.parameter()
            if parameter is None or parameter.grad is not None:
                del self._none[key]

    @property
    def has_zero(self) -> bool:
        """Whether some were zero everywhere when they were last read."""
        return bool(self._zero)

    def see(self, step: int, named: Parameters, table: Any) -> None:
        """A reading of gradients: which are zero everywhere."""
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
        """Names of those without a gradient, with the number of steps for which that has been so."""
        return self._streaks(self._none, step, trainable)

    def zero(self, step: int, trainable: Parameters) -> dict[str, int]:
        """The same of those whose gradient is zero."""
        return self._streaks(self._zero, step, trainable)

    def is_long(self, step: int) -> bool:
        """Whether one of them has been idle for long."""
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
    """Which names to tell, and the least number of steps among them: only those that are idle for long, once there are any."""
    longest = [{name: steps for name, steps in each.items() if steps >= LONG_STEPS} for each in streaks]
    chosen = longest if any(longest) else list(streaks)
    return [list(each) for each in chosen], min((steps for each in chosen for steps in each.values()), default=0)


@dataclass
class _Followed:
    """One optimizer, and what its gradients held when its steps began."""

    watched: "list[weakref.ref[Any]]" = field(default_factory=list)
    left: float | None = None
    """Norm of what was left when the step under way began; None: it was judged, or nobody looked."""
    num_checks: int = 0
    """In a row, with something left."""
    first: float = 0.0
    growth: float = 0.0

    def learn(self, table: Any) -> None:
        """What was left was read."""
        self.left = math.sqrt(float(table.square_sum.sum()))

    def judge(self) -> None:
        """It is about to step."""
        norm, self.left = self.left, None
        if norm is None:
            return
        if norm <= 0:
            self.num_checks, self.first, self.growth = 0, 0.0, 0.0
        else:
            self.first = self.first if self.num_checks else norm
            self.num_checks, self.growth = self.num_checks + 1, norm / self.first


class LeftoverGradients:
    """What is left in the gradients when the first backward pass of a step begins: nothing, unless nobody clears them.

    Read of a few parameters of each optimizer, and believed only of the optimizer that then steps: of two that take turns, each clears its own
    gradients at its own time.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._followed: dict[weakref.ref[torch.optim.Optimizer], _Followed] = {}

    @property
    def num_checks(self) -> int:
        """In a row, of the optimizer that has the most."""
        most = 0
        for followed in self._followed.values():
            most = max(most, followed.num_checks)
        return most

    @property
    def growth(self) -> float:
        """Its norm of the leftovers over what that was at the first of those."""
        return max(self._followed.values(), key=lambda one: one.num_checks, default=_Followed()).growth

    def take(self) -> None:
        """The first backward pass of a step is about to begin."""
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
        """These are about to step: were their gradients cleared before? A device may answer for an earlier step."""
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
