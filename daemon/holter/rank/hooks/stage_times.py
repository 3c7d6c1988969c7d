"""Measures how long a stage of torch's pipelines computes for each micro-batch: its own passes, without its waits.

On a device only the host's times could be measured, which do not show a stage that is late there: nothing is reported.
"""

from holter import clock
from holter.rank.context import Context
from holter.records import StageTimes

EVERY = 8
"""Number of steps that are reported together, as a mean."""
MAX_MICRO_BATCHES = 64


class StageTimesProbe:
    """Measures this rank's stage. A rank with several stages reports nothing, because their passes take turns."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._step = -1
        self._num_steps = 0
        self._began_s = 0.0
        self._stages: set[int] = set()
        self._passes: dict[str, list[float]] = {}
        """Kind of pass (forward, backward) -> seconds of each micro-batch, summed over steps."""
        self._numbers: dict[str, int] = {}
        """Kind of pass (forward, backward) -> index of this step's latest micro-batch."""

    def begin(self) -> None:
        """Start timing: a pass of the stage begins."""
        stage, last, step = self._context.inputs.stage, self._context.inputs.last, self._context.log.step
        if stage is None or (last is not None and last.device.type != "cpu"):
            return
        if step != self._step:
            self._next_step(step)
        self._stages.add(stage[0])
        self._began_s = clock.monotonic_s()

    def end(self, which: str) -> None:
        """Add up the time of the pass that is over; `which` is "forward" or "backward"."""
        if not self._began_s:
            return
        took_s, self._began_s = clock.monotonic_s() - self._began_s, 0.0
        number = self._numbers[which] = self._numbers.get(which, -1) + 1
        sums = self._passes.setdefault(which, [])
        if number < MAX_MICRO_BATCHES:
            sums += [0.0] * (number + 1 - len(sums))
            sums[number] += took_s

    def _next_step(self, step: int) -> None:
        self._num_steps += self._step >= 0
        self._step, self._numbers = step, {}
        if self._num_steps < EVERY:
            return
        means = {which: [total / self._num_steps for total in sums] for which, sums in self._passes.items()}
        self._num_steps, self._passes = 0, {}
        if len(self._stages) == 1:
            told = StageTimes(
                stage=next(iter(self._stages)),
                num_steps=EVERY,
                forward_s=means.get("forward", []),
                backward_s=means.get("backward", []),
            )
            self._context.writer.say(step - 1, told)
