"""Frozen modules beside the model: a text encoder, an autoencoder, a reference model. Nothing wraps them, and training needs them.

They are looked for twice, among all objects of the interpreter: when the first steps are done, and once more when that costs
little against the time that has passed. One counts when training calls it at several steps in a row.
"""

from holter import clock
from holter.rank.context import Context
from holter.rank.hooks.model_calls import CallProbe

FIRST_STEP = 1
SECOND_STEP = 32
SHARE = 0.002
"""Of the time since the first look that the second may take."""


class ComponentProbe:
    """Looks for them, and has their calls followed."""

    def __init__(self, context: Context, calls: CallProbe) -> None:
        self._context = context
        self._calls = calls
        self._num_looks = 0
        self._took_s = 0.0
        self._looked_at = 0.0

    def look(self) -> None:
        """A step begins: look if it is time to."""
        step = self._context.log.step
        if self._num_looks > 1 or step < (SECOND_STEP if self._num_looks else FIRST_STEP):
            return
        started = clock.monotonic_s()
        if self._num_looks and self._took_s > SHARE * (started - self._looked_at):
            return
        self._num_looks += 1
        for component in self._context.models.discover_components():
            self._calls.follow(component.root)
        self._looked_at = clock.monotonic_s()
        self._took_s = self._looked_at - started
