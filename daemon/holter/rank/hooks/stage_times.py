"""How long a stage of torch's pipelines computes, micro-batch by micro-batch: its own passes, without what it waits for.

On a device these are the times of the host, which says nothing of a stage that is late there: nothing is told.
"""

from holter import clock
from holter.rank.context import Context
from holter.records import StageTimes

EVERY = 8
"""Steps that are told together."""
MAX_MICRO_BATCHES = 64


class StageTimesProbe:
    """One rank's. A rank with several stages tells none: its passes take turns."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._step = -1
        self._num_steps = 0
        self._began_s = 0.0
        self._stages: set[int] = set()
        self._passes: dict[str, list[float]] = {}
        """Forward and backward -> seconds of each micro-batch, summed over steps."""
        self._numbers: dict[str, int] = {}
        """Passes of this step so far."""

    def begin(self) -> None:
        """A pass of the stage begins."""
        stage, last, step = self._context.inputs.stage, self._context.inputs.last, self._context.log.step
        if stage is None or (last is not None and last.device.type != "cpu"):
            return
        if step != self._step:
            self._next_step(step)
        self._stages.add(stage[0])
        self._began_s = clock.monotonic_s()

    def end(self, which: str) -> None:
        """It is over."""
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
