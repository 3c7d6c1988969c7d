"""What is read at which step, so that holter keeps to its budget.

There are two settings, both powers of two, so that ranks whose settings differ still read the same steps now and then:

    gradient_stride   1, 2, 4 ...   every step reads the gradients of every n-th tensor, a different share each step
    check_interval    1, 2, 4 ...   one of n steps fingerprints parameters and reduced gradients, for comparison between ranks

The rank measures the costs itself; `plan` is a pure function of them. A cost is a thread's computing time, not the time that passed, and the least of
the last few measurements: what a neighbour's load adds is not our cost, and a busy machine is no reason to look away. A model of less than two million
parameters is compared at every step: all of holter should then take 1 ms, or 2 % of a step that is longer than 50 ms, and comparisons become rarer only
if one alone takes twice as much. A device's seconds count like the host's.
"""

import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

MAX_STRIDE = 32
MAX_INTERVAL = 64
USUAL_INTERVAL = 8
"""Interval between comparisons, in steps, that is kept even where steps are short, as long as comparisons are cheap."""
GRADIENT_SHARE, GRADIENT_FLOORS = 0.5, 4
"""Share of the budget that reading gradients may take in any case, and the number of floors that it may take in any case."""
CHECK_SHARE, CHECK_FLOORS = 0.1, 2
"""Share of the budget that comparisons may take in any case, and the number of floors per step up to which they count as cheap."""
SETTLED_STEPS = 4
"""Number of the first steps, which compile, allocate and warm up, and whose cost says nothing about the rest."""
NUM_SAMPLES = 9
"""A cost is the least of this many measurements."""
SMALL_ELEMENTS = 2_000_000
SMALL_S, SMALL_SHARE = 1e-3, 0.02
"""What all of holter should take of a small model's step, in seconds and as a share of the step; the larger of the two counts."""
SMALL_PATIENCE = 2.0
"""How many times that one comparison, or one reading of all gradients, may take before fewer are made.

A thread that shares its core's caches with a neighbour computes about twice as long, which is no reason to look away. Kernels that were never
compiled take a hundred times as long, which is a reason.
"""
WINDOW = 64
TURNS = 2654435761
"""An odd number with well mixed bits, for hashing."""
TURN_EVERY = 4
"""Number of steps between two adjustments of the plan, once so many steps were measured that one more says little."""
RETURN_MARGIN = 0.7
"""Share of the room that a denser setting may fill before it is chosen again; without such a margin the setting would flutter."""


@dataclass(frozen=True)
class Costs:
    """Costs in seconds, estimated from recent steps."""

    step_s: float
    fixed_s: float
    """Seconds a step for hooks, heartbeat and page, whatever is read."""
    gradients_s: float
    """Seconds for one reading of all gradients."""
    check_s: float
    """Seconds for one comparison: parameters before, reduced gradients, parameters after."""
    is_small: bool = False
    """Whether the model has so few parameters that it is compared at every step."""


@dataclass(frozen=True)
class StepPlan:
    """The two settings of what is read."""

    gradient_stride: int = 1
    check_interval: int = 1

    def is_check(self, step: int) -> bool:
        """Whether parameters and reduced gradients are read at this step.

        One step of each two is chosen, of those one of each two, and so on. Which of two is chosen has no period, so that optimizers which take
        turns all have steps of comparison.
        """
        interval = self.check_interval
        while interval > 1:
            step, place = divmod(step, 2)
            if place != step * TURNS >> 24 & 1:
                return False
            interval //= 2
        return True

    def is_after_check(self, step: int) -> bool:
        """Whether parameters are read before this step only to be compared with what the step before left."""
        return self.check_interval > 1 and step > 0 and self.is_check(step - 1)

    def reads_before(self, step: int) -> bool:
        """Whether parameters are read before this step: it is the first, or the step before was one of comparison."""
        return step == 0 or self.check_interval == 1 or self.is_check(step - 1)


def plan(costs: Costs, *, budget: float, floor_s: float, current: StepPlan) -> StepPlan:
    """Return the settings that read the most within the budget; gradients come first."""
    budget_s = budget * costs.step_s
    room_s = budget_s - costs.fixed_s - CHECK_SHARE * budget_s
    small_s = SMALL_PATIENCE * max(SMALL_S, SMALL_SHARE * costs.step_s) if costs.is_small else 0.0
    most_s = max(room_s, GRADIENT_SHARE * budget_s, GRADIENT_FLOORS * floor_s, small_s)
    stride = _fit(costs.gradients_s, most_s, current.gradient_stride, MAX_STRIDE)
    taken_s = costs.fixed_s + costs.gradients_s / stride
    left_s = max(budget_s - taken_s, CHECK_SHARE * budget_s, floor_s, small_s)
    # If not every step is compared, a comparison has a fourth reading, before the next step.
    check_s = costs.check_s if current.check_interval == 1 else costs.check_s * 4 / 3
    interval = _fit(check_s, left_s, current.check_interval, MAX_INTERVAL)
    if interval > USUAL_INTERVAL and check_s / USUAL_INTERVAL <= CHECK_FLOORS * floor_s:
        interval = USUAL_INTERVAL
    return StepPlan(gradient_stride=stride, check_interval=interval)


def _fit(cost_s: float, room_s: float, current: int, largest: int) -> int:
    needed = 1
    while needed < largest and cost_s / needed > room_s:
        needed *= 2
    if needed < current and cost_s / needed > RETURN_MARGIN * room_s:
        return min(current, needed * 2)
    return needed


class Schedule:
    """Measures the costs, and changes each setting by at most a factor of two at a time."""

    def __init__(self, *, budget: float, floor_s: float) -> None:
        self.plan = StepPlan()
        self._budget, self._floor_s = budget, floor_s
        self._step_s: deque[float] = deque(maxlen=WINDOW)
        self._own_s: deque[float] = deque(maxlen=WINDOW)
        self._sums_s = [0.0, 0.0]
        """Sums of `_own_s` and `_step_s`."""
        self._fixed_s: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._gradients_s: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._check_s: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._device_s: dict[bool, deque[float]] = {is_check: deque(maxlen=NUM_SAMPLES) for is_check in (False, True)}
        """Device seconds of recent steps without a comparison (False) and with one (True)."""
        self._has_device = False
        self.is_small = False
        """Whether the models have few parameters."""
        self._thinning = 0
        self._num_steps = 0

    @property
    def overhead_ratio(self) -> float:
        """The time that holter took in recent steps, as a share of the time that they would have taken without it."""
        own_s, all_s = self._sums_s
        # A device that is busy with readings alone leaves next to nothing to divide by.
        return own_s / max(all_s - own_s, all_s / 100, 1e-9)

    def thin(self, doublings: int) -> None:
        """Double the interval between comparisons this many times, at most 6, because the sidecar cannot keep up; 0 ends it."""
        self._thinning = min(max(doublings, 0), 6)

    def observe(  # noqa: PLR0913 - what was measured, all named
        self,
        *,
        step_s: float,
        own_s: float,
        computed_s: float,
        reading_s: float,
        gradients_s: float,
        check_s: float,
        device_s: float = 0.0,
    ) -> None:
        """Learn the times of one step, and adjust the plan.

        The whole step took `step_s`; our hooks took `own_s` of it and computed for `computed_s`, of which `reading_s` went into readings. Of these,
        `gradients_s` and `check_s` are 0 if gradients were not read, or nothing was compared. `device_s` is the device time of the readings that
        were answered since the step before.
        """
        self._num_steps += 1
        self._device_s[bool(check_s)].append(device_s)
        self._has_device |= device_s > 0
        # Here the first steps count too: after one bad measurement, the setting would not get a second one for long.
        if gradients_s:
            self._gradients_s.append(gradients_s * self.plan.gradient_stride)
        if check_s:
            self._check_s.append(max(check_s, computed_s - self._usual_s()) if self._fixed_s else check_s)
        if self._num_steps <= SETTLED_STEPS:
            return
        own_s += device_s
        if len(self._step_s) == WINDOW:
            self._sums_s[0] -= self._own_s[0]
            self._sums_s[1] -= self._step_s[0]
        self._step_s.append(step_s)
        self._own_s.append(own_s)
        self._sums_s[0] += own_s
        self._sums_s[1] += step_s
        self._fixed_s.append(max(computed_s - reading_s, 0.0))
        if self._num_steps < WINDOW or self._num_steps % TURN_EVERY == 0:
            self._turn()

    def _usual_s(self) -> float:
        """Return the cost of a step that compares nothing; whatever a step of comparison costs beyond that is the comparison's cost."""
        return _usual(self._fixed_s) + _usual(self._gradients_s) / self.plan.gradient_stride

    def _device_costs(self) -> tuple[float, float]:
        """Return the device seconds for the gradients of a step, and for a comparison.

        They are estimated from medians, because a device answers late and the cost of a single step is not known.
        """
        if not self._has_device:
            return 0.0, 0.0
        with_check_s = statistics.median(self._device_s[True] or [0.0])
        if not self._device_s[False]:
            # If every step is compared, the gradients are one of its four readings.
            return with_check_s / 4, with_check_s * 3 / 4
        without_s = statistics.median(self._device_s[False])
        return without_s, max(with_check_s - without_s, 0.0)

    def _turn(self) -> None:
        device_gradients_s, device_check_s = self._device_costs()
        costs = Costs(
            step_s=statistics.median(self._step_s),
            fixed_s=_usual(self._fixed_s),
            gradients_s=_usual(self._gradients_s) + device_gradients_s * self.plan.gradient_stride,
            check_s=_usual(self._check_s) + device_check_s,
            is_small=self.is_small,
        )
        chosen = plan(costs, budget=self._budget, floor_s=self._floor_s, current=self.plan)
        self.plan = StepPlan(
            gradient_stride=_notch(self.plan.gradient_stride, chosen.gradient_stride),
            check_interval=_notch(self.plan.check_interval, min(chosen.check_interval << self._thinning, MAX_INTERVAL)),
        )


def _usual(samples: Collection[float]) -> float:
    return min(samples, default=0.0)


def _notch(current: int, wanted: int) -> int:
    return min(max(wanted, current // 2), current * 2)
