"""Steps that a loss scaler does not let happen: how many in a row, and what became of its factor.

The first steps of a healthy run are skipped too, while the factor is searched for. So little is said: at 1, 2, 4, 8, 12, 16, 20, 32, 64 … in a
row, and, with 0 in a row, when a step was taken again.
"""

import math
import weakref
from dataclasses import dataclass
from typing import Any

from holter.rank.context import Context
from holter.records import Nonfinite, Skipped

SAID_AT = frozenset({1, 2, 4, 8, 12, 16, 20})
SAID_FROM = 32
"""From here on every power of two."""
MAX_SUSPECTS = 8


@dataclass
class _Round:
    step: int
    loss: float
    suspects: list[Nonfinite]


@dataclass
class _Series:
    first_scale: float
    lowest_scale: float
    in_a_row: int = 0
    num_taken: int = 0


class SkipProbe:
    """Follows the rounds of each loss scaler."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._series: weakref.WeakKeyDictionary[Any, _Series] = weakref.WeakKeyDictionary()

    def end_round(self, scaler: Any) -> None:
        """The scaler is about to update its factor: say whether its optimizers were called."""
        found = [
            flag
            for state in scaler._per_optimizer_states.values()  # noqa: SLF001
            for flag in state["found_inf_per_device"].values()
        ]
        scale, step = scaler._scale, self._context.log.now  # noqa: SLF001  get_scale() would wait for a device
        if not found or scale is None:
            return
        reference = weakref.ref(scaler)
        ended = _Round(step.step, step.losses[-1] if step.losses else math.nan, step.suspects[:MAX_SUSPECTS])
        if all(flag.device.type == "cpu" for flag in (*found, scale)):
            self._learn(scaler, ended, scale=float(scale), is_skipped=any(map(bool, found)))
            return

        def learn(table: Any) -> None:
            if (alive := reference()) is not None:
                is_skipped = bool((table.square_sum[:-1] > 0).any())
                self._learn(alive, ended, scale=float(table.sum[-1]), is_skipped=is_skipped)

        self._context.readings.read(f"scaler{id(scaler)}", [*found, scale], learn)

    def _learn(self, scaler: Any, ended: _Round, *, scale: float, is_skipped: bool) -> None:
        series = self._series.get(scaler)
        if series is None:
            series = self._series[scaler] = _Series(scale, scale)
        was = series.in_a_row
        series.in_a_row = was + 1 if is_skipped else 0
        series.num_taken += not is_skipped
        series.lowest_scale = min(series.lowest_scale, scale)
        if not (_is_said(series.in_a_row) if is_skipped else was):
            return
        skipped = Skipped(
            in_a_row=series.in_a_row,
            scale=scale,
            lowest_scale=series.lowest_scale,
            first_scale=series.first_scale,
            loss=ended.loss,
            nonfinite=ended.suspects if is_skipped else [],
            num_taken=series.num_taken,
        )
        self._context.writer.say(ended.step, skipped)


def _is_said(in_a_row: int) -> bool:
    return in_a_row in SAID_AT or (in_a_row >= SAID_FROM and in_a_row & (in_a_row - 1) == 0)
