"""One step while it is observed: what is known of it, which readings a device still owes, and how long each phase took.

OpenStep    passes, losses, gradients, suspects, cost, report     filled by the hooks
StepLog     hands a step out once it is over and its readings have been answered
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holter import clock
from holter.records import Nonfinite, Phase, View

MAX_UNTOLD = 8
"""A step whose readings a device has not answered after this many further steps is told without them."""
MAX_SUSPECTS = 16
"""Of each kind: a NaN is soon in every tensor, and the first of them tell its story."""
PHASE_NAMES = [phase.name.lower() for phase in Phase]


@dataclass
class BackwardPasses:
    """How many backward passes the step has had, and what a loss scaler made of them."""

    num_done: int = 0
    num_dropped: int = 0
    """Of these, those whose gradients a loss scaler threw away."""
    num_skipped_rounds: int = 0
    """How often, since the step before, a loss scaler skipped the optimizer: the step then starts again under its number."""


@dataclass
class Losses:
    """The loss of each micro-step, as the script computed it."""

    values: list[float] = field(default_factory=list)
    scale: float | None = 1.0
    """What a scaler multiplied the loss by; None where only a device knows."""

    def mean(self) -> float | None:
        """Over the micro-steps; not finite if one of them was not."""
        odd = [loss for loss in self.values if not math.isfinite(loss)]
        if odd or not self.values:
            return odd[0] if odd else None
        return math.fsum(self.values) / len(self.values)


@dataclass
class GradientReading:
    """What was read of the gradients."""

    view: View = "local"
    """Whose gradients the norm is of."""
    square_sum: float | None = None
    """Of all gradients that were read whole; not finite if one of them was not."""
    is_local_read: bool = False
    """The rank's own gradients were read before any reduction."""
    is_local_whole: bool = False
    """All of them were: a rank that found nothing is not to blame."""
    was_clipped_finite: bool | None = None
    """This rank's shards were finite whenever the script clipped them by the norm of all ranks'; None: it did not."""

    def norm(self, loss_scale: float | None) -> float | None:
        """L2 norm over all models, without a scaler's factor."""
        if self.square_sum is None or loss_scale is None:
            return None
        return math.sqrt(self.square_sum) / loss_scale if math.isfinite(self.square_sum) else math.nan


@dataclass
class Suspects:
    """Tensors that are not finite. They matter only if what the optimizer applies is not finite either."""

    tensors: list[Nonfinite] = field(default_factory=list)
    is_applied: bool = False
    """The optimizer was given a non-finite gradient: no scaler and no script held it back."""

    def add(self, nonfinite: Nonfinite) -> None:
        """Remember a tensor, up to a number that still fits a message; of gradients those nearest to the loss."""
        self.tensors.append(nonfinite)
        alike = [entry for entry in self.tensors if entry.where == nonfinite.where]
        if len(alike) > MAX_SUSPECTS:
            self.tensors.remove(max(alike, key=lambda entry: entry.order))


@dataclass
class ReadingCost:
    """Seconds of the training thread."""

    gradients_s: float = 0.0
    check_s: float = 0.0


@dataclass
class StepTimes:
    """Fixed when the step ends, or is held."""

    seconds: float
    phase_seconds: dict[str, float]


@dataclass
class OpenStep:
    """What was seen of one step."""

    step: int
    passes: BackwardPasses = field(default_factory=BackwardPasses)
    losses: Losses = field(default_factory=Losses)
    gradients: GradientReading = field(default_factory=GradientReading)
    suspects: Suspects = field(default_factory=Suspects)
    cost: ReadingCost = field(default_factory=ReadingCost)
    batch: int = 0
    """Signature of what the models were fed; 0: nothing that can be signed."""
    learning_rate: float | None = None
    roots: dict[str, int] = field(default_factory=dict)
    """By class of tensors: the fingerprint over all that must be equal on all replicas."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Other figures, by the names of `records.NUMBERS`."""
    num_owed: int = 0
    """Readings not answered yet."""
    times: StepTimes | None = None
    is_told: bool = False

    def acquit(self, *, is_skipped: bool = False) -> None:
        """Drop the suspects: they never reached the weights.

        A loss that was not finite stays to be told, unless its gradients were thrown away: by a scaler that skipped the step, or by the
        script, which then went on to another backward pass.
        """
        losses = self.losses
        has_gradient = any(entry.where == "gradient" for entry in self.suspects.tensors)
        was_dropped = has_gradient and math.isfinite((losses.values or [0.0])[-1])
        self.suspects.tensors.clear()
        if is_skipped or was_dropped:
            losses.values = [loss for loss in losses.values if math.isfinite(loss)]

    def owe(self, then: Callable[[Any], None]) -> Callable[[Any], None]:
        """Count a reading as owed until it is answered."""
        self.num_owed += 1

        def answered(table: Any) -> None:
            self.num_owed -= 1
            then(table)

        return answered


class StepLog:
    """Counts steps and micro-steps from 0; hands out steps in order once they are complete."""

    def __init__(self) -> None:
        self.now = OpenStep(0)
        self.step = 0
        """Completed optimizer steps."""
        self._untold: deque[OpenStep] = deque()

    @property
    def micro_step(self) -> int:
        """Completed backward passes of this step."""
        return self.now.passes.num_done

    @property
    def num_backwards(self) -> int:
        """Of these, those that a halt undoes: a round that a scaler has skipped is over."""
        return self.now.passes.num_done - self.now.passes.num_dropped

    def drop(self) -> None:
        """A scaler has skipped the step: it starts again and keeps its number."""
        self.now.passes.num_dropped = self.now.passes.num_done
        self.now.passes.num_skipped_rounds += 1

    def close(self, times: StepTimes) -> None:
        """The step is done; the next one begins."""
        self.now.times = times
        self._untold.append(self.now)
        self.step += 1
        self.now = OpenStep(self.step)

    def ready(self) -> list[OpenStep]:
        """Steps that can be told now."""
        out = []
        while self._untold and (self._untold[0].num_owed == 0 or len(self._untold) > MAX_UNTOLD):
            out.append(self._untold.popleft())
        return out


class PhaseClock:
    """Which phase the main thread is in; adds up the seconds of each phase between two `take`s."""

    def __init__(self) -> None:
        self.phase = Phase.ATTACH
        self._since = clock.monotonic_s()
        self._seconds = [0.0] * len(PHASE_NAMES)

    def enter(self, phase: Phase) -> Phase:
        """Begin a phase; returns the one that it interrupts, to be entered again afterwards."""
        now = clock.monotonic_s()
        interrupted = self.phase
        self._seconds[interrupted] += now - self._since
        self.phase, self._since = phase, now
        return interrupted

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        self.enter(self.phase)
        seconds, self._seconds = self._seconds, [0.0] * len(PHASE_NAMES)
        return {PHASE_NAMES[phase]: round(spent, 7) for phase, spent in enumerate(seconds) if spent > 0}
