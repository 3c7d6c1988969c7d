"""Follows backward passes, and the loss scaler around them.

The raw loss is read where backward is called: what a logger shows may be an average that hides a NaN. A callback that the first hook of the
pass queues runs when the gradients are complete and still the rank's own, before DDP's callback copies the reduced gradients back.

Steps that a loss scaler skips are reported as a series: how many in a row, and how its factor changed. The first steps of a healthy run are
skipped too, while the scaler searches for its factor. So reports are few: at 1, 2, 4, 8, 12, 16, 20, 32, 64 … in a row, and, with 0 in a
row, when a step was taken again.
"""

import functools
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holter.rank.context import Context
from holter.rank.publish.step_log import OpenStep
from holter.rank.readings import graph_origin
from holter.rank.readings.batches import Leaf
from holter.rank.readings.inspection import is_compiled
from holter.rank.readings.loss_lines import trace
from holter.records import Nonfinite, Origin, Phase, Skipped

MAX_NODES = 16
LOOKED_THROUGH = (
    "MulBackward",
    "DivBackward",
    "AddBackward",
    "SubBackward",
    "ToCopyBackward",
    "SqueezeBackward",
    "ViewBackward",
)
REPORTED_AT = frozenset({1, 2, 4, 8, 12, 16, 20})
REPORTED_FROM = 32
"""Number of skips in a row from which on only powers of two are reported."""
STUCK_AT = 8
"""Number of skips in a row after which the origin of a non-finite loss is searched for; not on a device, for which we would have to wait."""
MAX_SKIP_SUSPECTS = 8
MAX_TRACES = 3
"""Number of non-finite losses whose source lines are searched for: the first is the one that counts."""


class LossProbe:
    """Follows `torch.autograd.backward`; calls back when a pass begins, when its gradients are there, when it is over, and when a scaler ends a round."""

    def __init__(  # noqa: PLR0913  one a moment
        self,
        context: Context,
        *,
        on_begin: Callable[[], None],
        on_gradients: Callable[[], None],
        on_end: Callable[[], None],
        on_round: Callable[[], None],
        on_stuck: Callable[[], None],
        on_loss: Callable[[torch.Tensor], None] = lambda _: None,
    ) -> None:
        self._context = context
        self._skips = SkipProbe(context, on_stuck)
        self._on_begin, self._on_end, self._on_round, self._on_loss = on_begin, on_end, on_round, on_loss
        on_gradients = context.guard.wrap(on_gradients, "any")
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001
        self._queue = context.guard.wrap(lambda _: engine.queue_callback(on_gradients), "any")
        self._depth = self._num_traced = 0
        self._is_round_over = False
        self._interrupted = Phase.OTHER
        self._unscaled: tuple[Any, torch.Tensor, float | None] | None = None
        self._recomputed: graph_origin.RecomputedForward | None = None

    def install(self) -> None:
        """Patch `backward`, and the methods with which a loss scaler multiplies the loss and updates its factor."""
        patches = self._context.patches
        patches.replace("backward", self._around_backward, torch.autograd)
        patches.replace("scale", self._around_scale, torch.amp.GradScaler)
        patches.replace("update", self._around_update, torch.amp.GradScaler)

    def _around_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        begin, end = self._context.guard.wrap(self._begin, "claims"), self._context.guard.wrap(self._end)

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling():
                return original(tensors, *args, **kwargs)
            if not isinstance(tensors, (torch.Tensor, list, tuple)):
                # A generator can be read only once, and torch has to read it too.
                tensors = tuple(tensors)
            hooks: list[Any] = []
            try:
                # Reentrant checkpointing calls backward inside backward: only the outermost call is a pass of the step.
                self._depth += 1
                if self._depth == 1:
                    begin(tensors, hooks)
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
            remember(scaler, scaled, outputs)
            return scaled

        return scale

    def _around_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        end_round, begin_round = (self._context.guard.wrap(call) for call in (self._end_round, self._begin_round))

        @functools.wraps(original)
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            end_round(scaler)
            result = original(scaler, *args, **kwargs)
            begin_round()
            return result

        return update

    def _remember(self, scaler: Any, scaled: Any, outputs: Any) -> None:
        if isinstance(scaled, torch.Tensor) and isinstance(outputs, torch.Tensor) and scaler.is_enabled():
            factor = scaler._scale  # noqa: SLF001  get_scale() would wait for a device
            is_here = factor is not None and factor.device.type == "cpu"
            self._unscaled = weakref.ref(scaled), outputs.detach(), float(factor) if is_here else None

    def _end_round(self, scaler: Any) -> None:
        """Note that the scaler's round is over. If the step is still open, its gradients were not applied: the optimizer was not called."""
        if not scaler.is_enabled():
            return
        # `update` may also be called in the middle of a round, to set the factor by hand.
        self._is_round_over = any(state["found_inf_per_device"] for state in scaler._per_optimizer_states.values())  # noqa: SLF001
        self._context.guard.attempt(self._skips.end_round, scaler)
        self._context.log.now.acquit(is_skipped=True)
        self._context.inputs.suspect = self._context.inputs.trace = None

    def _begin_round(self) -> None:
        is_over, self._is_round_over = self._is_round_over, False
        if is_over:
            self._on_round()

    def _begin(self, tensors: Any, hooks: list[Any]) -> None:
        self._context.guard.is_in_backward = True
        self._context.guard.attempt(self._on_begin)
        self._interrupted = self._context.enter(Phase.BACKWARD)
        roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        loss = None
        for root in roots:
            if isinstance(root, torch.Tensor) and root.requires_grad:
                loss = root
                break
        given = self._context.inputs.take_unread() if self._context.inputs.unread else []
        if loss is None:
            return
        self._context.guard.attempt(self._read, loss, given)
        self._context.inputs.outputs = []
        self._context.guard.attempt(self._on_loss, loss)
        hooks.append(loss.register_hook(self._queue))

    def _end(self, hooks: list[Any]) -> None:
        self._context.guard.is_in_backward = False
        for hook in hooks:
            hook.remove()
        self._end_recomputed()
        self._context.guard.attempt(self._on_end)
        self._context.log.now.passes.num_done += 1
        self._context.enter(self._interrupted)

    def _read(self, loss: torch.Tensor, given: list[Leaf]) -> None:
        """Read the loss, together with the models' inputs on a device, in one reading; nobody waits for its answer."""
        raw = self._raw(loss) if loss.numel() == 1 else None
        step = self._context.log.now
        if raw is not None and raw.device.type == "cpu":
            self._learn(step, value := float(raw))
            if not math.isfinite(value):
                self._context.guard.attempt(self._trace, loss)
            if not given:
                return
            raw = None
        number, first = step.passes.num_done, 0 if raw is None else 1
        asked = ([] if raw is None else [raw]) + [tensor for _, tensor in given]
        if not asked:
            return
        names = [(path, tensor.numel()) for path, tensor in given]

        def learn(table: Any) -> None:
            # This closure refers to no tensor, because it would keep it alive until the device has answered.
            if first:
                odd = math.nan if table.nans[0] else math.inf if table.pos_infs[0] + table.neg_infs[0] else 0.0
                self._learn(step, float(table.sum[0]) + odd)
            if number >= step.passes.num_dropped:
                infs = table.pos_infs + table.neg_infs
                for row in np.flatnonzero(table.nans[first:] + infs[first:]).tolist():
                    path, numel = names[row]
                    nans = int(table.nans[first + row])
                    step.suspects.inputs.append(
                        Nonfinite(where="input", name=path, nans=nans, infs=int(infs[first + row]), numel=numel)
                    )

        # Each micro-step has a reading of its own: the device may not have answered the one before.
        self._context.read(f"loss{number}", asked, learn, step=step)

    def _trace(self, loss: torch.Tensor) -> None:
        """Find the source lines, and if possible the operation, that made the loss non-finite: only now the graph still holds its operations' inputs."""
        inputs = self._context.inputs
        if inputs.trace is None and self._num_traced < MAX_TRACES:
            self._num_traced += 1
            inputs.trace = trace(loss, inputs.last.called if inputs.last is not None else None)
            inputs.trace.are_outputs_finite = self._context.guard.attempt(inputs.are_outputs_finite)
            if not inputs.trace.are_outputs_finite:
                inputs.trace.origin = self._context.guard.attempt(self._origin, loss)

    def _origin(self, loss: torch.Tensor) -> Origin | None:
        models = self._context.models.active()
        names = {key: name for model in models for key, name in model.names_in_graphs()}
        parts = [(model.prefix + name, part) for model in models for name, part in model.named_parts()]
        kinds = {name: type(part).__name__ for name, part in parts}
        found = graph_origin.find(loss, names, kinds)
        are_compiled = any(model.inner is not None and is_compiled(model.inner) for model in models)
        if found is None and not are_compiled and graph_origin.is_recomputed(loss):
            guarded = functools.partial(self._context.guard.wrap, thread="any")
            called = {id(part): name for name, part in parts}
            self._recomputed = graph_origin.RecomputedForward(loss, names, kinds, called, guarded)
        return found

    def _end_recomputed(self) -> None:
        """Take over the origin that was found by watching modules that checkpointing called again in the backward pass."""
        watched, self._recomputed = self._recomputed, None
        origin = self._context.guard.attempt(watched.end) if watched is not None else None
        if origin is not None and self._context.inputs.trace is not None:
            self._context.inputs.trace.origin = origin

    def _raw(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss as it was before a scaler multiplied it."""
        raw, step, node = loss.detach(), self._context.log.now, loss.grad_fn
        if self._unscaled is not None and self._unscaled[0]() is loss:
            raw, step.losses.scale = self._unscaled[1:]
            # The outermost node is the product with the scaler's factor, so we look at the one before it.
            node = node.next_functions[0][0] if node is not None else None
            if step.losses.scale is not None:
                step.numbers["loss_scale"] = step.losses.scale
        self._unscaled = None
        is_mean = is_divided(node) or is_divided_later()
        step.numbers["loss.is_divided"] = min(step.numbers.get("loss.is_divided", 1.0), float(is_mean))
        return raw

    def _learn(self, step: OpenStep, value: float) -> None:
        step.losses.values.append(value)
        if not math.isfinite(value):
            is_nan = math.isnan(value)
            step.suspects.add(Nonfinite(where="loss", name="loss", nans=int(is_nan), infs=int(not is_nan), numel=1))
            self._context.inputs.suspect_last()


def is_divided(node: Any) -> bool:
    """Whether a loss is a quotient or product with a constant, also if sums, casts or views come after that.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> is_divided((x.sum() / 4).grad_fn), is_divided(x.mean().grad_fn)
    (True, False)
    """
    nodes = [node]
    for _ in range(MAX_NODES):
        if not nodes:
            break
        node = nodes.pop(0)
        name = node.name() if node is not None else ""
        inner = [function for function, _ in node.next_functions if function is not None] if name else []
        if name.startswith(("MulBackward", "DivBackward")) and len(inner) == 1:
            return True
        if name.startswith(LOOKED_THROUGH):
            nodes += inner
    return False


def is_divided_later() -> bool:
    """Whether a schedule of torch's pipelining calls this backward pass, and will itself divide the gradients after all micro-batches."""
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    frame = sys._getframe() if schedules is not None else None  # noqa: SLF001
    while frame is not None:
        if frame.f_globals is vars(schedules) and getattr(frame.f_locals.get("self"), "scale_grads", False):
            return True
        frame = frame.f_back
    return False


@dataclass
class _ScalerRound:
    step: int
    loss: float
    suspects: list[Nonfinite]


@dataclass
class _SkipSeries:
    first_scale: float
    lowest_scale: float
    in_a_row: int = 0
    num_taken: int = 0


class SkipProbe:
    """Follows the rounds of each loss scaler."""

    def __init__(self, context: Context, on_stuck: Callable[[], None]) -> None:
        self._context, self._on_stuck = context, on_stuck
        self._series: weakref.WeakKeyDictionary[Any, _SkipSeries] = weakref.WeakKeyDictionary()

    def end_round(self, scaler: Any) -> None:
        """Learn whether the scaler, which is about to update its factor, called its optimizers or skipped the step."""
        found = [
            flag
            for state in scaler._per_optimizer_states.values()  # noqa: SLF001
            for flag in state["found_inf_per_device"].values()
        ]
        scale, step = scaler._scale, self._context.log.now  # noqa: SLF001  get_scale() would wait for a device
        if not found or scale is None:
            return
        reference = weakref.ref(scaler)
        loss = step.losses.values[-1] if step.losses.values else math.nan
        ended = _ScalerRound(step.step, loss, step.suspects.tensors[:MAX_SKIP_SUSPECTS])
        if all(flag.device.type == "cpu" for flag in (*found, scale)):
            self._learn(scaler, ended, scale=float(scale), is_skipped=any(map(bool, found)))
            if self._series[scaler].in_a_row == STUCK_AT and not math.isfinite(loss):
                # No scale mends a loss that is non-finite before scaling: its origin is searched for while its batch is still there.
                self._on_stuck()
            return

        def learn(table: Any) -> None:
            if (alive := reference()) is not None:
                is_skipped = bool((table.square_sum[:-1] > 0).any())
                self._learn(alive, ended, scale=float(table.sum[-1]), is_skipped=is_skipped)

        self._context.read(f"scaler{id(scaler)}", [*found, scale], learn)

    def _learn(self, scaler: Any, ended: _ScalerRound, *, scale: float, is_skipped: bool) -> None:
        series = self._series.get(scaler)
        if series is None:
            series = self._series[scaler] = _SkipSeries(scale, scale)
        was = series.in_a_row
        series.in_a_row = was + 1 if is_skipped else 0
        series.num_taken += not is_skipped
        series.lowest_scale = min(series.lowest_scale, scale)
        if not (_is_reported(series.in_a_row) if is_skipped else was):
            return
        skipped = Skipped(
            in_a_row=series.in_a_row,
            scale=scale,
            lowest_scale=series.lowest_scale,
            first_scale=series.first_scale,
            loss=ended.loss,
            nonfinite=ended.suspects if is_skipped else [],
            num_taken=series.num_taken,
        )
        self._context.writer.say(ended.step, skipped)


def _is_reported(in_a_row: int) -> bool:
    return in_a_row in REPORTED_AT or (in_a_row >= REPORTED_FROM and in_a_row & (in_a_row - 1) == 0)
