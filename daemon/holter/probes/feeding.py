"""Was the batch to blame? Asked when the optimizer is given a gradient that is not finite; the weights are still untouched then.

The batch of the step is still held. If it was finite, it is replayed to find the module that made the NaN. On a healthy step of
comparison the batch is fingerprinted, and what of it is never finite, a mask of -inf, is learnt.
"""

from holter.probes import batches, origin
from holter.probes.batches import Inputs
from holter.probes.context import Context
from holter.records import Nonfinite

MAX_REPLAYS = 3
"""A NaN is born once; a run that goes on with it need not be replayed at every step."""


class FeedingProbe:
    """Looks at batches when there is a reason to."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._num_replays = 0
        self._healthy_steps: dict[str, int] = {}
        """Tensors of a batch that were not finite on steps that were."""

    def question(self) -> None:
        """The step is spoiled: look at its batch, and if that is sound, for the module."""
        context = self._context
        inputs = context.held_inputs or context.inputs
        _, bad = batches.read(_tensors(inputs))
        for entry in bad:
            context.log.now.suspect(
                Nonfinite(
                    where="input",
                    name=entry.name,
                    nans=entry.nans,
                    infs=entry.infs,
                    numel=entry.numel,
                    healthy_steps=self._healthy_steps.get(entry.name, 0),
                )
            )
        is_sound = all(entry.name in self._healthy_steps for entry in bad)
        if is_sound and self._num_replays < MAX_REPLAYS:
            self._num_replays += 1
            self._replay(inputs)

    def observe(self, *, is_check: bool) -> None:
        """A step is about to be applied: remember what it was fed."""
        if is_check and not self._context.log.now.suspects:
            self._context.log.now.batch = self.learn()

    def learn(self) -> int:
        """The step is healthy: its batch's fingerprint."""
        fingerprint, bad = batches.read(_tensors(self._context.inputs))
        for entry in bad:
            self._healthy_steps[entry.name] = self._healthy_steps.get(entry.name, 0) + 1
        return fingerprint

    def _replay(self, inputs: Inputs | None) -> None:
        context = self._context
        module = inputs.model() if inputs is not None else None
        model = next((model for model in context.models if model.inner is module), None)
        with context.guard.paused():
            found = origin.find(inputs, model.prefix if model else "")
        context.recorder.say(context.log.step, found)


def _tensors(inputs: Inputs | None) -> list[batches.Leaf]:
    return [(path, tensor) for path, tensor, _ in inputs.leaves] if inputs else []
