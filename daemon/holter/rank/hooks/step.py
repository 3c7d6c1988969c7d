"""Finds the step boundary with torch's global optimizer hooks, which fire for every optimizer of every framework.

    backward … backward   optimizer A   optimizer B   │   backward …        one step: what came before belongs to it

Optimizers that step with no backward pass between them make one step together. It is over when all optimizers that took part in the step
before have stepped, and at the latest when the next backward pass begins. An optimizer that steps inside another's step is a part of that step.

Before the first optimizer of a step nothing of the step is applied: the rank may be held here for as long as it takes to decide what becomes
of the step. Before a later optimizer it is held only for numbers that are not finite, and says that its weights are partly new: its gradients
may still be clipped, zeroed or computed until just before its own step, so they cannot be judged earlier.

A loss scaler that skips a step calls no optimizer: the step starts again under the same number. So that such a run can be halted too, the
rank checks for a halt before the scaler decides, and skipped rounds count as steps towards the one that was agreed on.

torch calls no hook if `step()` raises: such a step is over once no call of it is running any more. If it is tried again, it is the same step.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from holter import clock
from holter.rank.accelerator import is_capturing
from holter.rank.context import Context
from holter.rank.guard import say
from holter.rank.hold.device_flags import LeftOut
from holter.rank.hold.finite_guard import FiniteGuard, Shards
from holter.rank.hold.halts import HoldReason
from holter.rank.hooks import closures
from holter.rank.models import held_by
from holter.rank.publish.budget import SMALL_ELEMENTS
from holter.rank.publish.step_log import StepReporter, StepTimes, tell_completed_before
from holter.rank.readings.comparison import ComparisonProbe
from holter.rank.readings.gradient_scales import GradientScaleProbe
from holter.rank.readings.gradients import GradientProbe
from holter.rank.readings.modes import ModeProbe
from holter.rank.readings.nan_origin import BatchBlameProbe
from holter.rank.readings.vitals import VitalsProbe
from holter.records import Phase

REFRESH_EVERY = 16
"""Number of steps between two searches for parameters that were frozen, thawed or added."""
THAW_EVERY = 4
"""Number of steps between two quick checks whether anything was thawed: the same steps on all ranks, whatever their budgets allow."""

Optimizers: TypeAlias = "set[weakref.ref[torch.optim.Optimizer]]"


class StepReaders(NamedTuple):
    """The probes that read a step before, while and after it is applied."""

    gradients: GradientProbe
    comparison: ComparisonProbe
    batches: BatchBlameProbe
    vitals: VitalsProbe
    modes: ModeProbe
    finite: FiniteGuard
    scales: GradientScaleProbe


class StepProbe:
    """Follows every optimizer, and has each step reported when it is over."""

    def __init__(self, context: Context, readers: StepReaders, find_models: Callable[[], None]) -> None:
        self._context = context
        self._attempt = context.guard.attempt
        self._find_models = find_models
        self._gradients, self._comparison, self._batches, self._vitals, self._modes, self._finite, self._scales = (
            readers
        )
        self._shards = Shards(context)
        self._known: list[weakref.ref[torch.optim.Optimizer]] = []
        """Optimizers in the order of their first step."""
        self._stepped: Optimizers = set()
        """Optimizers that have stepped in the open step."""
        self._last: Optimizers = set()
        """Optimizers that took part in the step before."""
        self._depth = 0
        """Number of nested calls of `step` that have begun and have not ended."""
        self._num_around = 0
        """How many of these are calls of a framework's own step (`begin`, `end`)."""
        self._caller: Any = None
        """Code object of the torch function that calls our hooks, which runs for as long as a step does."""
        self._current: Callable[[], torch.optim.Optimizer | None] = lambda: None
        """Weak reference to the optimizer that is stepping, or stepped last."""
        self._is_applying = False
        self._is_straggler = False
        self._reporter = StepReporter(context)
        self._began = clock.monotonic_s()
        self._own_began = 0.0
        self._computed_began = 0.0
        self._read_began = 0.0
        self._device_began = 0.0
        self._generation = -1
        self._interrupted = Phase.OTHER
        self._handles: list[Any] = []
        readers.finite.before_scaled = context.guard.wrap(self._hold_if_due, "claims")

    def install(self) -> None:
        """Register hooks on every optimizer, including those that do not exist yet."""
        wrap = self._context.guard.wrap
        before, after = wrap(self._before, "steps"), wrap(self._after, "steps")

        def pre(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> closures.Arguments | None:
            # A compiled step is left as it is: tracing our hook would change it.
            if torch.compiler.is_compiling():
                return None
            self._caller = getattr(sys._getframe().f_back, "f_code", None)  # noqa: SLF001
            has_closure = closures.has_closure(args, kwargs)
            before(optimizer, has_closure=has_closure)
            # Inside another optimizer's step it is that one's closure that is followed.
            if not has_closure or self._depth != 1 or not closures.is_followed(optimizer):
                return None
            return closures.follow(
                args, kwargs, wrap(self._begin_closure), wrap(functools.partial(self._end_closure, optimizer))
            )

        def post(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                self._finite.flags.take_back(optimizer)
                after(optimizer)

        self._handles = [register_optimizer_step_pre_hook(pre), register_optimizer_step_post_hook(post)]

    def uninstall(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._finite.end()
        self._attempt(self._reporter.tell_rest)
        self._shards.leave()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers that have stepped and still exist, in the order of their first step."""
        alive = []
        for reference in self._known:
            if (optimizer := reference()) is not None:
                alive.append(optimizer)  # noqa: PERF401 - a comprehension is a call of its own
        if len(alive) < len(self._known):
            self._known = [reference for reference in self._known if reference() is not None]
        return alive

    @property
    def next_step(self) -> int:
        """The step to which a forward pass belongs that begins now: the one after the open step if an optimizer has already stepped."""
        return self._context.log.step + bool(self._stepped)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that a framework's own step begins, within which this optimizer steps."""
        self._num_around += 1
        self._before(optimizer)

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that a framework's own step is over."""
        try:
            self._after(optimizer)
        finally:
            self._num_around -= 1

    def replayed(self, num_steps: int) -> None:
        """Count the steps of a graph that was replayed, because none of their hooks has run."""
        for _ in range(0 if self._depth or self._stepped else num_steps):
            last = self._last
            self._close()
            self._last = last

    def end_open_step(self) -> None:
        """Close the open step, if an optimizer has stepped in it, because a backward pass begins."""
        if self._depth and self._drop_raised():
            self._is_applying = self._is_straggler = False
            self._context.enter(self._interrupted)
        if self._stepped and not self._depth:
            self._close(is_late=True)

    def end_round(self) -> None:
        """Begin the step anew if a loss scaler's round is over and it called no optimizer: it has dropped the step's gradients."""
        log = self._context.log
        if not self._stepped and not self._depth and log.num_backwards:
            log.drop()
            self._context.undo.rewind.begin_anew()

    def _before(self, optimizer: torch.optim.Optimizer, *, has_closure: bool = False) -> None:
        context = self._context
        is_after_raised = self._depth > 0 and self._drop_raised(is_beginning=True)
        self._depth += 1
        if self._depth > 1:
            return
        if is_after_raised:
            if self._current() is optimizer:
                # The same step is tried again: all was already checked, and other ranks are not asked twice.
                return
            self._is_applying = False
            context.enter(self._interrupted)
        self._current = weakref.ref(optimizer)
        if self._current in self._stepped:
            self._close()
        if self._current not in self._known:
            self._attempt(self._learn_optimizer, optimizer)
        # Nothing was computed since the last step was closed, and this optimizer had no part in it: it belongs to that step and is late.
        self._is_straggler = (
            not context.log.now.passes.num_done
            and not self._stepped
            and self._current not in self._last
            and any(other() is not None for other in self._last)
        )
        self._attempt(self._take_census)
        context.gradient_answers.hold(optimizer)
        try:
            self._look_at_applied(optimizer, has_closure=has_closure)
        finally:
            context.gradient_answers.let_go()
        if context.undo.snapshots is not None:
            self._attempt(context.undo.snapshots.settle)
        self._is_applying = True
        self._interrupted = context.enter(Phase.OPTIMIZER)

    def _look_at_applied(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        context = self._context
        if context.world_size > 1:
            # What is applied may differ from what was reduced: a script may have written to `.data`, which torch does not count as a change.
            context.gradient_answers.clear()
        self._attempt(self._read_applied, optimizer)
        if context.hold.agent is not None:
            self._attempt(self._hold_if_need_be, optimizer, has_closure=has_closure)
        if not self._stepped and not self._is_straggler and not (has_closure and closures.is_followed(optimizer)):
            self._attempt(self._compare_before, optimizer, has_gradients=not has_closure)

    def _begin_closure(self) -> None:
        """Note that nothing is being applied while the step's closure computes its gradients."""
        self._is_applying = False

    def _end_closure(self, optimizer: torch.optim.Optimizer, is_unwritten: bool) -> None:  # noqa: FBT001
        """Check the gradients that the closure computed and that are about to be applied, as before a step without a closure.

        `is_unwritten`: the parameters have not been written to since the step began. Otherwise the rank cannot be held.
        """
        if is_unwritten:
            self._attempt(self._read_applied, optimizer)
            halts = self._context.hold.agent
            if halts is not None and halts.is_wanted() and not is_capturing():
                self._attempt(self._hold_if_bad, optimizer)
        if not self._stepped and not self._is_straggler:
            self._attempt(self._compare_before, optimizer, has_gradients=is_unwritten)
        self._is_applying = True

    def _take_census(self) -> None:
        models, step = self._context.models, self._context.log.step
        is_thorough = step % REFRESH_EVERY == 0
        if is_thorough or (step % THAW_EVERY == 0 and models.has_thawed()):
            models.refresh()
        if models.generation != self._generation:
            self._generation = models.generation
            num_elements = sum(p.numel() for model in models for _, p in model.parameters)
            self._context.schedule.is_small = num_elements < SMALL_ELEMENTS
        self._reporter.tell_census(self.optimizers, self._gradients.ready_order, is_thorough=is_thorough)

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        if self._depth > 1:
            self._drop_raised()
        self._depth = max(0, self._depth - 1)
        if self._depth > 0:
            return
        context = self._context
        self._is_applying = False
        context.enter(self._interrupted)
        if self._is_straggler and not context.log.micro_step:
            self._last.add(weakref.ref(optimizer))
            self._is_straggler = False
            return
        # The gradients are read again, because a closure calls backward inside the step.
        self._attempt(self._read_applied, optimizer, is_applied=True)
        self._stepped.add(weakref.ref(optimizer))
        self._attempt(self._note_rate, optimizer)
        if self._last <= self._stepped or all(other() is None for other in self._last - self._stepped):
            self._close()

    def _note_rate(self, optimizer: torch.optim.Optimizer) -> None:
        rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
        if self._context.log.now.learning_rate is None and isinstance(rate, (int, float)):
            self._context.log.now.learning_rate = float(rate)

    def _drop_raised(self, *, is_beginning: bool = False) -> bool:
        """Forget calls of `step` that raised; return True if the outermost is among them."""
        num_running, frame = self._num_around - is_beginning, sys._getframe().f_back  # noqa: SLF001
        while frame is not None:
            num_running += frame.f_code is self._caller
            frame = frame.f_back
        if num_running >= self._depth:
            return False
        self._finite.flags.take_back_all()
        self._depth = num_running
        return num_running == 0

    def _learn_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        is_first = not self._known and self._context.log.step == 0
        self._known.append(weakref.ref(optimizer))
        if is_first:
            self._context.guard.wrap(tell_completed_before, "steps")(self._context, optimizer)
            self._context.guard.wrap(self._find_registered, "steps")(optimizer)
        held = held_by([optimizer])
        if held - {id(p) for model in self._context.models for _, p in model.parameters}:
            self._find_models()
        for model in self._context.models:
            model.is_active |= any(id(p) in held for _, p in model.parameters)

    def _find_registered(self, optimizer: torch.optim.Optimizer) -> None:
        if (found := self._context.frameworks.registered(optimizer)) is not None:
            self._context.undo.rewind.registered.find = found

    def _read_applied(self, optimizer: torch.optim.Optimizer, *, is_applied: bool = False) -> None:
        """Read whether what the optimizer applies is finite, and if not, search for the origin."""
        self._gradients.read_applied(optimizer)
        now = self._context.log.now
        # What the device leaves out does not reach the weights, however early its answer comes: the origin is searched for once the rank is held.
        if now.suspects.is_applied and not (is_applied and self._finite.flags.decides(optimizer, now.step)):
            self._ask_about_batch(is_applied=is_applied)

    def _ask_about_batch(self, *, is_applied: bool = False) -> None:
        if not self._context.log.now.suspects.is_questioned:
            self._batches.investigate(is_applied=is_applied)

    def is_torn(self) -> bool:
        """Whether the weights may be partly new: inside an optimizer's step, or between two optimizers of one step."""
        return self._is_applying or bool(self._stepped) or self._is_straggler

    def _hold_if_need_be(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Hold the rank before this optimizer's step is applied, for non-finite gradients or an agreed halt.

        Once one of several optimizers has stepped, only a NaN is worth stopping in between.
        """
        context = self._context
        halts = context.hold.agent
        assert halts is not None
        # What is being captured is not applied, and asking the device anything would spoil the capture.
        if halts.is_wanted() and not is_capturing():
            self._attempt(self._hold_if_bad, optimizer, has_closure=has_closure)
        was_torn = self.is_torn()
        # Set before `is_due` is asked: a rescue that begins from now on must not save what is about to change.
        self._is_applying = True
        if halts.is_due(self._round) and not was_torn:
            self._is_applying = False
            self._hold("agreed")

    def _hold_if_due(self) -> None:
        """Hold the rank if a halt is due; called before a loss scaler decides whether to call an optimizer, since otherwise no hook may run."""
        halts = self._context.hold.agent
        if halts is not None and not self._depth and not self.is_torn() and halts.is_due(self._round):
            self._hold("agreed")

    @property
    def _round(self) -> int:
        """The step plus the rounds that a scaler has skipped since it began: the same number on all ranks that share their gradients."""
        return self._context.log.step + self._context.log.now.passes.num_skipped_rounds

    def _hold_if_bad(self, optimizer: torch.optim.Optimizer, *, has_closure: bool = False) -> None:
        """Hold the rank if its gradients, or another rank's shards, are not finite; with a closure its own are not computed yet."""
        context = self._context
        step = context.log.step
        if (left_out := self._attempt(self._finite.left_out, step)) is not None:
            self._hold_left_out(left_out)
            return
        late = self._attempt(self._finite.late)
        reading_s = context.reading_s
        own = step if late is None and not has_closure and self._attempt(self._is_nonfinite, optimizer) else late
        context.log.now.cost.guard_s += context.reading_s - reading_s
        is_asked_later = has_closure and closures.is_followed(optimizer)
        is_alone = is_asked_later or self._finite.is_scaled(optimizer)
        first = own if is_alone else self._shards.agree(optimizer, own)
        if first is None:
            return
        if late is not None or first < step:
            self._note_poisoned(first)
        self._hold("peer" if own is None else "nonfinite")
        # The rank was released: the script goes on, and applies what is not finite.
        self._note_poisoned(first)
        if context.hold.agent is not None and not context.hold.agent.is_wanted():
            self._shards.leave()

    def _hold_left_out(self, left_out: LeftOut) -> None:
        """Hold the rank because its device has left out a step and all later ones.

        The weights are those from before that step, and if a save is decided on, everything else is saved as it was then, too.
        """
        context = self._context
        hold, step = context.hold, context.log.step
        self._finite.flags.act()
        self._reporter.tell_until(left_out.step, self._batches.investigate_left_out)
        hold.left_out = left_out
        # The heartbeat names the step of the weights: a rank that reports a later step is taken to have gone on.
        context.writer.beat(left_out.step, context.phases.phase, 0)
        try:
            self._hold("nonfinite", step=left_out.step)
        finally:
            hold.left_out = None
        context.writer.beat(step, context.phases.phase, context.log.micro_step)
        self._finite.flags.forget()
        say(
            f"rank {context.writer.rank} goes on: gradients of step {left_out.step} were not finite, and the device has left out "
            f"steps {left_out.step} to {step - 1}; the weights have none of them"
        )

    def _note_poisoned(self, step: int) -> None:
        hold = self._context.hold
        hold.poisoned_step = step if hold.poisoned_step is None else min(step, hold.poisoned_step)

    def _is_nonfinite(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether what is about to be applied is not finite; if so, the step's suspects are completed."""
        step, is_shard = self._context.log.now, self._shards.concern(optimizer)
        is_flagged = self._finite.is_flagged(optimizer) and not is_shard
        if is_flagged and self._context.undo.rewind.past is not None:
            self._context.undo.rewind.past.need(step.step)
        is_known = step.suspects.is_applied and not is_flagged
        if not is_known and not self._finite.finds(optimizer, is_torn=self.is_torn(), is_flagged=is_flagged):
            return False
        if not step.suspects.is_applied and not step.gradients.is_local_whole:
            # Not all of this rank's own gradients were read: it cannot be said that another rank made the NaN.
            self._attempt(self._gradients.read_applied, optimizer, is_known_bad=True)
            self._attempt(self._ask_about_batch)
        elif step.suspects.tensors:
            # A device has answered only now that this rank's own gradients are not finite.
            self._attempt(self._ask_about_batch)
        return True

    def _hold(self, why: HoldReason, step: int | None = None) -> None:
        """Hold the main thread until it is decided what to do; the time is counted neither as the step's nor as holter's."""
        context = self._context
        log, halts, began = context.log, context.hold.agent, clock.monotonic_s()
        if why != "agreed" and step is None and not log.now.is_told:
            log.now.times = StepTimes(began - self._began, context.phases.take())
            self._reporter.tell_held(log.now)
        assert halts is not None
        num_skipped = log.now.passes.num_skipped_rounds if step is None else 0
        context.guard.wrap(halts.hold, "steps")(log.step if step is None else step, why, num_skipped=num_skipped)
        held_s = clock.monotonic_s() - began
        self._began += held_s
        context.guard.own_s -= held_s
        context.phases.take()

    def _compare_before(self, optimizer: torch.optim.Optimizer, *, has_gradients: bool = True) -> None:
        """Record what must be equal on all replicas before a step.

        Gradients are included only if they are those that the step applies: a closure may still have to reduce them.
        """
        context = self._context
        step, plan = context.log.step, context.schedule.plan
        is_check, together = plan.is_check(step), self._taking_part(optimizer)
        is_compared = context.world_size > 1 and self._attempt(self._comparison.is_possible)
        self._attempt(self._batches.observe, is_check=is_check)
        if is_compared:
            self._attempt(self._comparison.hyperparameters, together)
        self._attempt(self._modes.settle, together)
        self._attempt(self._vitals.glance, together, is_check=is_check)
        if not self._scales.is_told:
            self._attempt(self._scales.before_step, together)
        if is_compared and (is_check or plan.is_after_check(step)):
            self._attempt(self._comparison.parameters, "before", together)
            if is_check:
                if has_gradients:
                    self._attempt(self._comparison.gradients, optimizer)
                self._attempt(self._comparison.frozen)
        if is_check:
            self._attempt(self._vitals.before_step, together)

    def _taking_part(self, optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
        """Return the optimizers whose models are compared: all of the last step if this one was among them, else this one alone."""
        if len(self._last) == 1 or weakref.ref(optimizer) not in self._last:
            return [optimizer]
        return [other for other in self.optimizers if weakref.ref(other) in self._last]

    def _compare_after(self) -> None:
        if self._context.world_size > 1 and self._comparison.is_due():
            first = next(optimizer for optimizer in self.optimizers if weakref.ref(optimizer) in self._stepped)
            self._attempt(self._comparison.parameters, "after", self._taking_part(first))
            self._attempt(self._comparison.optimizer_state, first)

    def _learn_costs(self, step_s: float) -> None:
        context = self._context
        context.schedule.observe(
            step_s=step_s,
            own_s=context.guard.own_s - self._own_began,
            computed_s=context.guard.computed_s - self._computed_began,
            reading_s=context.reading_s - self._read_began - context.log.now.cost.guard_s,
            gradients_s=context.log.now.cost.gradients_s,
            check_s=context.log.now.cost.check_s if context.schedule.plan.is_check(context.log.step) else 0.0,
            device_s=context.readings.device_s - self._device_began,
        )
        self._device_began = context.readings.device_s

    def _close(self, *, is_late: bool = False) -> None:
        """Close and report the step, whatever could be read of it."""
        context = self._context
        log = context.log
        if self._stepped:
            self._attempt(self._compare_after)
            self._attempt(self._vitals.after_step, self.optimizers)
        now = clock.monotonic_s()
        self._attempt(self._learn_costs, now - self._began)
        log.close(StepTimes(now - self._began, context.phases.take()))
        self._began, self._own_began, self._read_began = now, context.guard.own_s, context.reading_s
        self._computed_began = context.guard.computed_s
        self._last, self._stepped = self._stepped, set()
        self._is_straggler = False
        context.inputs.clear()
        context.hold.known_finite.clear()
        context.gradient_answers.clear()
        self._attempt(context.undo.rewind.step_closed, log.step, is_late=is_late)
        if not is_capturing():
            # Even asking a device whether it is done would spoil a graph that is being captured.
            self._attempt(context.readings.poll)
        self._attempt(self._reporter.tell_ready)
        self._attempt(self._reporter.heed_sidecar)
        context.writer.beat(log.step, context.phases.phase, 0)
