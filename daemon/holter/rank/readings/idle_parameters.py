"""Parameters that are to be trained and get no gradient: None, or exactly zero everywhere.

They are looked for at steps of comparison (None) and in every reading of the gradients (zero). What was found is looked at in every step
from then on, so that a branch that takes its turn in other steps than those of comparison is not taken for idle.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LONG_STEPS = 8
"""Idle for this long, a parameter is worth a question."""
MAX_WATCHED = 1024
"""Candidates that are looked at in every step."""

Parameters = Sequence[tuple[str, Any]]


@dataclass
class _Idle:
    parameter: "weakref.ref[Any]"
    name: str
    since: int


class IdleWatch:
    """Who has had no gradient, and for how many steps in a row."""

    def __init__(self) -> None:
        self._none: dict[int, _Idle] = {}
        self._zero: dict[int, _Idle] = {}

    def look(self, step: int, trainable: Parameters) -> None:
        """A step of comparison: which gradients are None."""
        known = self._none
        self._none = {
            id(p): known.get(id(p)) or _Idle(weakref.ref(p), name, step) for name, p in trainable if p.grad is None
        }

    def glance(self) -> None:
        """Any step: whose gradient came."""
        if not self._none:
            return
        for key, idle in list(self._none.items())[:MAX_WATCHED]:
            parameter = idle.parameter()
            if parameter is None or parameter.grad is not None:
                del self._none[key]

    def see(self, step: int, named: Parameters, table: Any) -> None:
        """A reading of gradients: which are zero everywhere."""
        is_zero = table.zeros == table.numel
        if not self._zero and not is_zero.any():
            return
        is_zero &= table.numel > 0
        if self._zero:
            for row in np.flatnonzero(~is_zero):
                self._zero.pop(id(named[int(row)][1]), None)
        for row in np.flatnonzero(is_zero):
            name, parameter = named[int(row)]
            idle = self._zero.get(id(parameter))
            if idle is None or idle.parameter() is not parameter:
                self._zero[id(parameter)] = _Idle(weakref.ref(parameter), name, step)

    def none(self, step: int, trainable: Parameters) -> dict[str, int]:
        """Names of those without a gradient, with the number of steps for which that has been so."""
        return self._streaks(self._none, step, trainable)

    def zero(self, step: int, trainable: Parameters) -> dict[str, int]:
        """The same of those whose gradient is zero."""
        return self._streaks(self._zero, step, trainable)

    def is_long(self, step: int) -> bool:
        """Whether one of them has been idle for long."""
        return any(step - idle.since + 1 >= LONG_STEPS for idles in (self._none, self._zero) for idle in idles.values())

    @staticmethod
    def _streaks(idles: dict[int, _Idle], step: int, trainable: Parameters) -> dict[str, int]:
        if not idles:
            return {}
        return {
            name: step - idle.since + 1
            for name, p in trainable
            if (idle := idles.get(id(p))) is not None and idle.parameter() is p
        }


def named(*streaks: dict[str, int]) -> tuple[list[list[str]], int]:
    """Who is to be named, and the least number of steps among them: the patient ones alone once there are any."""
    longest = [{name: steps for name, steps in each.items() if steps >= LONG_STEPS} for each in streaks]
    chosen = longest if any(longest) else list(streaks)
    return [list(each) for each in chosen], min((steps for each in chosen for steps in each.values()), default=0)
