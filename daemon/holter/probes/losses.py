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

from holter.probes.context import Context
from holter.probes.steplog import OpenStep
from holter.records import Nonfinite, Phase


class LossProbe:
    """Follows `torch.autograd.backward`."""

    def __init__(self, context: Context, on_begin: Callable[[], None], on_gradients: Callable[[], None]) -> None:
        self._context = context
        self._on_begin = on_begin
        self._on_gradients = context.guard.wrap(on_gradients)
        self._depth = 0
        self._unscaled: tuple[Any, torch.Tensor] | None = None

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
        if loss.numel() == 1:
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
        if raw.device.type == "cpu":
            self._learn(self._context.log.now, float(raw))
            return
        step = self._context.log.now

        def learn(table: Any) -> None:
            odd = math.nan if table.nans[0] else math.inf if table.pos_infs[0] + table.neg_infs[0] else 0.0
            self._learn(step, float(table.sum[0]) + odd)

        # A list of its own for each micro-step: the device may not have answered the one before.
        self._context.readings.read(f"loss{step.micro_steps}", [raw], step.owe(learn))

    def _learn(self, step: OpenStep, value: float) -> None:
        step.losses.append(value)
        if not math.isfinite(value):
            is_nan = math.isnan(value)
            step.suspect(Nonfinite(where="loss", name="loss", nans=int(is_nan), infs=int(not is_nan), numel=1))
            self._context.hold_inputs()
