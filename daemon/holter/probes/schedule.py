"""What is read at which step, so that holter keeps to its budget.

Two dials, both powers of two, so that ranks which turned them differently still read the same steps now and then:

    gradient_stride   1, 2, 4 ...   every step reads the gradients of every stride-th tensor, another share each step
    check_interval    1, 2, 4 ...   every interval-th step fingerprints parameters and reduced gradients, for comparison between ranks

The costs are measured in the rank itself; `plan` is a pure function of them.
"""

from dataclasses import dataclass

MAX_STRIDE = 32
MAX_INTERVAL = 64
SETTLED_STEPS = 4
"""The first steps compile, allocate and warm up; what they cost says nothing about the rest."""
SMOOTHING = 0.2
RETURN_MARGIN = 0.7
"""To read more again there must be room to spare, or the dial would flutter."""


@dataclass(frozen=True)
class Costs:
    """Seconds, smoothed over recent steps."""

    step_s: float
    fixed_s: float
    """Hooks, heartbeat and page, whatever is read."""
    gradients_s: float
    """One reading of all gradients."""
    check_s: float
    """One comparison: parameters before, reduced gradients, parameters after."""


@dataclass(frozen=True)
class Plan:
    """The dials."""

    gradient_stride: int = 1
    check_interval: int = 1

    def is_check(self, step: int) -> bool:
        """Whether parameters and reduced gradients are read at this step."""
        return step % self.check_interval == 0

    def is_after_check(self, step: int) -> bool:
        """Whether parameters are read before this step only to be held against what the step before left."""
        return self.check_interval > 1 and step % self.check_interval == 1

    def share(self, step: int, count: int) -> range:
        """Indices of the tensors whose gradients are read at this step."""
        return range(step % self.gradient_stride, count, self.gradient_stride)


def plan(costs: Costs, *, budget: float, floor_s: float, current: Plan) -> Plan:
    """The most that fits into the budget."""
    allowed = max(budget * costs.step_s, floor_s) - costs.fixed_s
    stride = _fit(costs.gradients_s, 0.6 * allowed, current.gradient_stride, MAX_STRIDE)
    left = allowed - costs.gradients_s / stride
    # A check has a fourth reading, at the start of the next step.
    interval = _fit(costs.check_s * 4 / 3, left, current.check_interval, MAX_INTERVAL)
    return Plan(gradient_stride=stride, check_interval=interval)


def _fit(cost_s: float, room_s: float, current: int, largest: int) -> int:
    needed = 1
    while needed < largest and cost_s / needed > room_s:
        needed *= 2
    if needed < current and cost_s / needed > RETURN_MARGIN * room_s:
        return min(current, needed * 2)
    return needed


class Schedule:
    """Measures, and turns the dials every few steps."""

    def __init__(self, *, budget: float, floor_s: float) -> None:
        self.plan = Plan()
        self.overhead_ratio = 0.0
        self._budget, self._floor_s = budget, floor_s
        self._costs = Costs(0.0, 0.0, 0.0, 0.0)
        self._thinning = 0
        self._num_steps = 0

    def thin(self, doublings: int) -> None:
        """The sidecar cannot keep up: compare this many doublings less often than the budget would allow."""
        self._thinning = min(max(doublings, 0), 6)

    def observe(self, *, step_s: float, own_s: float, reading_s: float, gradients_s: float, check_s: float) -> None:
        """Learn what a step took, what we took of it, what of that went into reading, and into which; 0: it was not read."""
        self._num_steps += 1
        if self._num_steps <= SETTLED_STEPS:
            return
        self._costs = Costs(
            step_s=_smooth(self._costs.step_s, step_s),
            fixed_s=_smooth(self._costs.fixed_s, max(own_s - reading_s, 0.0)),
            gradients_s=_smooth(self._costs.gradients_s, gradients_s * self.plan.gradient_stride),
            check_s=_smooth(self._costs.check_s, check_s),
        )
        ratio = own_s / max(step_s - own_s, 1e-9)
        self.overhead_ratio += SMOOTHING / 4 * (ratio - self.overhead_ratio)
        if self._num_steps == SETTLED_STEPS + 1:
            self.overhead_ratio = ratio
        chosen = plan(self._costs, budget=self._budget, floor_s=self._floor_s, current=self.plan)
        self.plan = Plan(chosen.gradient_stride, min(chosen.check_interval << self._thinning, MAX_INTERVAL))


def _smooth(old: float, new: float) -> float:
    if new == 0.0:
        return old
    return new if old == 0.0 else old + SMOOTHING * (new - old)
