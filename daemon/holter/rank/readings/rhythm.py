"""At which steps of comparison the vitals are taken: often at first, then as rarely as a share of the budget says, by ranks in turn."""

import statistics
from collections import deque

from holter import clock

NUM_DENSE = 8
"""The first comparisons are all vital, if that is not too dear: what is wrong from the start is seen at the start."""
LEAST_STRIDE = 4
"""Comparisons from one vital step to the next, while comparisons are not rare themselves."""
RARE_STEPS = 64
MAX_STRIDE = 1024
MAX_SPEAKERS = 64
"""Ranks that speak at one step."""
SHARE = 0.1
"""Of the budget."""
DENSE_FACTOR = 4.0
"""What a vital step may take at the start, in whole budgets of one step."""
NUM_FLOORS = 4.0
"""Where a step is so short that the budget's floor counts, so many floors: a short run is to be seen too."""
NUM_COSTS = 5
NUM_STEPS = 32


class Rhythm:
    """Measures what vitals cost beside a step."""

    def __init__(self, *, rank: int, world_size: int, budget: float, floor_s: float) -> None:
        self._rank = rank
        self._turns = -(-world_size // MAX_SPEAKERS)
        self._budget, self._floor_s = budget, floor_s
        self._costs_s: deque[float] = deque(maxlen=NUM_COSTS)
        self._steps_s: deque[float] = deque(maxlen=NUM_STEPS)
        self._last_s: float | None = None
        self._num_checks = 0

    def tick(self) -> None:
        """A step begins."""
        now = clock.monotonic_s()
        if self._last_s is not None:
            self._steps_s.append(now - self._last_s)
        self._last_s = now

    def spend(self, seconds: float) -> None:
        """What one vital step took."""
        self._costs_s.append(seconds)

    def is_vital(self, step: int, check_interval: int) -> bool:
        """Asked once at each step of comparison."""
        self._num_checks += 1
        number = step // check_interval
        room_s = max(self._budget * statistics.median(self._steps_s or [0.0]), NUM_FLOORS * self._floor_s)
        cost_s = min(self._costs_s, default=0.0)
        if self._num_checks <= NUM_DENSE and cost_s <= DENSE_FACTOR * room_s:
            return number % self._turns == self._rank % self._turns
        stride = max(min(LEAST_STRIDE, RARE_STEPS // check_interval), 1)
        while stride < MAX_STRIDE and cost_s > SHARE * room_s * stride * check_interval:
            stride *= 2
        return number % stride == 0 and number // stride % self._turns == self._rank % self._turns
