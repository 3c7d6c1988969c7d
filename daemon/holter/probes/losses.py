"""The raw loss, read where backward is called: what a logger shows may be an average that hides a NaN.

Also the moment at which gradients are complete and still the rank's own: a callback queued by the first hook of the backward pass
runs when the pass is over and before DDP's own callback copies the reduced gradients back.
"""

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from holter.probes import batches, origin
from holter.probes.context import Context
from holter.records import Nonfinite, Phase

MAX_REPLAYS = 3
"""A NaN is born once; a run that goes on with it need not be replayed at every step."""


class LossProbe:
    """Follows `torch.autograd.backward`."""

    def __init__(self, context: Context, on_begin: Callable[[], None], on_gradients: Callable[[], None]) -> None:
        self._context = context
        self._on_begin = on_begin
        self._on_gradients = context.guard.wrap(on_gradients)
        self._depth = 0
        self._unscaled: tuple[Any, torch.Tensor] | None = None
        self._num_replays = 0
        self._healthy_bad_inputs: dict[str, int] = {}

    def install(self) -> None:
        """Call through ours: backward, and the scaler that multiplies the loss before it."""
        self._context.patches.replace(torch.autograd, "backward", self._around_backward)
        self._context.patches.replace(torch.amp.GradScaler, "scale", self._around_scale)

    def _around_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        begin, end = self._context.guard.wrap(self._begin), self._context.guard.wrap(self._end)

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            # Reentrant checkpointing calls backward inside backward: only the outermost is the step's.
            self._depth += 1
            hooks: list[Any] = []
            if self._depth == 1:
                begin(tensors, hooks)
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    end(hooks)

        return backward

    def _around_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        remember = self._context.guard.wrap(self._remember)

        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            remember(scaled, outputs)
            return scaled

        return scale

    def _remember(self, scaled: Any, outputs: Any) -> None:
        if isinstance(scaled, torch.Tensor) and isinstance(outputs, torch.Tensor):
            self._unscaled = weakref.ref(scaled), outputs.detach()

    def _begin(self, tensors: Any, hooks: list[Any]) -> None:
        context = self._context
        self._interrupted = context.enter(Phase.BACKWARD)
        self._on_begin()
        roots: Sequence[Any] = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        loss = next((t for t in roots if isinstance(t, torch.Tensor) and t.requires_grad), None)
        if loss is None:
            return
        if loss.numel() == 1 and loss.device.type == "cpu":
            self._read(loss)
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001
        hooks.append(loss.register_hook(lambda _: engine.queue_callback(self._on_gradients)))

    def _end(self, hooks: list[Any]) -> None:
        for hook in hooks:
            hook.remove()
        self._context.log.now.micro_steps += 1
        self._context.enter(self._interrupted)

    def _read(self, loss: torch.Tensor) -> None:
        raw = loss.detach()
        if self._unscaled is not None and self._unscaled[0]() is loss:
            raw = self._unscaled[1]
        self._unscaled = None
        value = float(raw)
        step = self._context.log.now
        step.losses.append(value)
        if not math.isfinite(value):
            step.suspect(
                Nonfinite(where="loss", name="loss", nans=int(math.isnan(value)), infs=int(math.isinf(value)), numel=1)
            )
            self.question_inputs()

    def question_inputs(self) -> None:
        """Something of this step is not finite: ask whether the batch was, and if it was, which module is to blame."""
        context = self._context
        inputs = context.inputs
        _, bad = batches.read([(path, t) for path, t, _ in inputs.leaves] if inputs else [])
        for entry in bad:
            known = self._healthy_bad_inputs.get(entry.name, 0)
            context.log.now.suspect(
                Nonfinite(
                    where="input",
                    name=entry.name,
                    nans=entry.nans,
                    infs=entry.infs,
                    numel=entry.numel,
                    healthy_steps=known,
                )
            )
        is_fed_badly = any(entry.name not in self._healthy_bad_inputs for entry in bad)
        if not is_fed_badly and self._num_replays < MAX_REPLAYS:
            self._num_replays += 1
            model = next((m for m in context.models if inputs and m.inner is inputs.model()), None)
            with context.guard.paused():
                found = origin.find(inputs, model.prefix if model else "")
            context.recorder.say(context.log.step, found)

    def learn_inputs(self) -> int:
        """On a healthy step: the batch's fingerprint, and which of its tensors hold -inf masks as a matter of course."""
        inputs = self._context.inputs
        fingerprint, bad = batches.read([(path, t) for path, t, _ in inputs.leaves] if inputs else [])
        for entry in bad:
            self._healthy_bad_inputs[entry.name] = self._healthy_bad_inputs.get(entry.name, 0) + 1
        return fingerprint
