"""The step boundary: torch's global optimizer hooks, which fire for every optimizer of every framework.

    backward … backward   optimizer A   optimizer B   │   backward …        one step: what came before belongs to it

Optimizers that step with no backward pass between them make one step together. It is over when all that took part in the last one have
stepped, and at the latest when the next backward pass begins. An optimizer that steps inside another's step is a part of that step.

Before the first optimizer of a step nothing of it is applied: here the rank may be held, for as long as it takes to decide what
becomes of the step. Before a later one it is held only for numbers that are not finite, and says that its weights are partly new: whether
an optimizer's gradients are still clipped, zeroed or computed before its own step cannot be known earlier.

A loss scaler that skips a step calls no optimizer: the step starts again under the same number. So that such a run can be halted too, the
rank is asked before the scaler decides, and rounds count as steps towards the one that was agreed on.

torch calls no hook if `step()` raises: such a step is over when no call of it is running any more. If it is tried again, it is the same step.
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
"""Steps between two looks for parameters that were frozen, thawed or added."""
THAW_EVERY = 4
"""Steps between two quick looks for what was frozen or thawed: the same steps on all ranks, whatever their budgets allow."""

Optimizers: TypeAlias = "set[weakref.ref[torch.optim.Optimizer]]"


class StepReaders(NamedTuple):
    """What reads a step: before it, while it is applied, and after it."""

    gradients: GradientProbe
    comparison: ComparisonProbe
    batches: BatchBlameProbe
    vitals: VitalsProbe
    modes: ModeProbe
    finite: FiniteGuard
    scales: GradientScaleProbe


class StepProbe:
    """Follows every optimizer; has a step told when it is over."""

    def __init__(self, context: Context, readers: StepReaders, find_models: Callable[[], None]) -> None:
        self._context = context
        self._attempt = context.guard.attempt
        self._find_models = find_models
        self._gradients, self._comparison, self._batches, self._vitals, self._modes, self._finite, self._scales = (
            readers
        )
        self._shards = Shards(context)
        self._known: list[weakref.ref[torch.optim.Optimizer]] = []
        """In order of their first step."""
        self._stepped: Optimizers = set()
        """Took part in the open step."""
        self._last: Optimizers = set()
        """Took part in the step before."""
        self._depth = 0
        """Calls of `step` that have begun, each inside the one before, and have not ended."""
        self._num_around = 0
        """Of these, the calls of a framework's own step (`begin`, `end`)."""
        self._caller: Any = None
        """The code of torch that calls our hooks, and runs for as long as a step does."""
        self._current: Callable[[], torch.optim.Optimizer | None] = lambda: None
        """The optimizer that steps, or stepped last."""
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
        """Listen to every optimizer, those that do not exist yet included."""
        wrap = self._context.guard.wrap
        before, after = wrap(self._before, "steps"), wrap(self._after, "steps")

        def pre(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> closures.Arguments | None:
            # A compiled step is left as it is: a hook that is traced would change it.
            if torch.compiler.is_compiling():
                return None
            self._caller = getattr(sys._getframe().f_back, "f_code", None)  # noqa: SLF001
            has_closure = closures.has_closure(args, kwargs)
            before(optimizer, has_closure=has_closure)
            # Unless it is inside another's step: that one's closure is followed.
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
        """Those that have stepped and still exist, in order of their first step."""
        alive = []
        for reference in self._known:
            if (optimizer := reference()) is not None:
                alive.append(optimizer)  # noqa: PERF401 - a comprehension is a call of its own
        if len(alive) < len(self._known):
            self._known = [reference for reference in self._known if reference() is not None]
        return alive

    @property
    def next_step(self) -> int:
        """The step that a forward pass belongs to if it begins now: where an optimizer has stepped, the open step had its own."""
        return self._context.log.step + bool(self._stepped)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """A framework's own step begins, around those of this optimizer."""
        self._num_around += 1
        self._before(optimizer)

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """A framework's own step is over."""
        try:
            self._after(optimizer)
        finally:
            self._num_around -= 1

    def replayed(self, num_steps: int) -> None:
        """A graph was replayed that contains so many steps: none of their hooks has run."""
        for _ in range(0 if self._depth or self._stepped else num_steps):
            last = self._last
            self._close()
            self._last = last

    def end_open_step(self) -> None:
        """A backward pass begins: what stepped before it is a step of its own."""
        if self._depth and self._drop_raised():
            self._is_applying = self._is_straggler = False
            self._context.enter(self._interrupted)
        if self._stepped and not self._depth:
            self._close(is_late=True)

    def end_round(self) -> None:
        """A loss scaler's round is over: if it called no optimizer, it has thrown away what was computed for the step."""
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
                # It is tried again: all was looked at, and other ranks are not asked twice.
                return
            self._is_applying = False
            context.enter(self._interrupted)
        self._current = weakref.ref(optimizer)
        if self._current in self._stepped:
            self._close()
        if self._current not in self._known:
            self._attempt(self._learn_optimizer, optimizer)
        # Nothing was computed since the last step was closed, and this optimizer had no part in it: it comes late to that step.
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
            # What was reduced is one value, what is applied another: a script may have written to `.data`, which torch does not count.
            context.gradient_answers.clear()
        self._attempt(self._read_applied, optimizer)
        if context.hold.agent is not None:
            self._attempt(self._hold_if_need_be, optimizer, has_closure=has_closure)
        if not self._stepped and not self._is_straggler and not (has_closure and closures.is_followed(optimizer)):
            self._attempt(self._compare_before, optimizer, has_gradients=not has_closure)

    def _begin_closure(self) -> None:
        """The step computes its own gradients: nothing is applied meanwhile."""
        self._is_applying = False

    def _end_closure(self, optimizer: torch.optim.Optimizer, is_unwritten: bool) -> None:  # noqa: FBT001
        """They are there, and are about to be applied."""
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
        # A closure calls backward inside the step.
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
        """Forget calls of `step` that raised; True if the outermost is among them."""
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
        """Ask whether what the optimizer applies is finite, and if not, where that comes from."""
        self._gradients.read_applied(optimizer)
        now = self._context.log.now
        # What its device leaves out is not in the weights, however soon the device tells of it: it is asked about once the rank stands.
        if now.suspects.is_applied and not (is_applied and self._finite.flags.decides(optimizer, now.step)):
            self._ask_about_batch(is_applied=is_applied)

    def _ask_about_batch(self, *, is_applied: bool = False) -> None:
        if not self._context.log.now.suspects.is_questioned:
            self._batches.investigate(is_applied=is_applied)

    def is_torn(self) -> bool:
        """Whether weights are partly new: inside an optimizer's step, or between two optimizers of one step."""
        return self._is_applying or bool(self._stepped) or self._is_straggler

    def _hold_if_need_be(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Nothing of this optimizer's step is applied yet. Once one of several has stepped, only a NaN is worth stopping in between."""
        context = self._context
        halts = context.hold.agent
        assert halts is not None
        # What is captured is not applied, and to ask the device anything would spoil the capture.
        if halts.is_wanted() and not is_capturing():
            self._attempt(self._hold_if_bad, optimizer, has_closure=has_closure)
        was_torn = self.is_torn()
        # Set before it is asked: a rescue that begins from now on must not take what is about to change.
        self._is_applying = True
        if halts.is_due(self._round) and not was_torn:
            self._is_applying = False
            self._hold("agreed")

    def _hold_if_due(self) -> None:
        """A loss scaler is about to decide whether to call an optimizer: if it does not, no other hook asks."""
        halts = self._context.hold.agent
        if halts is not None and not self._depth and not self.is_torn() and halts.is_due(self._round):
            self._hold("agreed")

    @property
    def _round(self) -> int:
        """The step, plus the rounds that a scaler has skipped since: the same number on all ranks that share their gradients."""
        return self._context.log.step + self._context.log.now.passes.num_skipped_rounds

    def _hold_if_bad(self, optimizer: torch.optim.Optimizer, *, has_closure: bool = False) -> None:
        """This rank's gradients are not finite, or another's shards are not; with a closure they are not there yet."""
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
        # Released: the script goes on with what it has.
        self._note_poisoned(first)
        if context.hold.agent is not None and not context.hold.agent.is_wanted():
            self._shards.leave()

    def _hold_left_out(self, left_out: LeftOut) -> None:
        """A device has left out a step, and all since: the weights are those from before it, and so is everything else once it is decided to save it."""
        context = self._context
        hold, step = context.hold, context.log.step
        self._finite.flags.act()
        self._reporter.tell_until(left_out.step, self._batches.investigate_left_out)
        hold.left_out = left_out
        # It stands where its weights are: one that has beaten at a later step is taken to have gone on.
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
            # Nobody has seen all of this rank's own gradients: it cannot be said that another one made the NaN.
            self._attempt(self._gradients.read_applied, optimizer, is_known_bad=True)
            self._attempt(self._ask_about_batch)
        elif step.suspects.tensors:
            # A device has answered only now that this rank's own are not finite.
            self._attempt(self._ask_about_batch)
        return True

    def _hold(self, why: HoldReason, step: int | None = None) -> None:
        """Stand still until it is decided what to do. The time is neither the step's nor holter's."""
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
        """What is equal on all replicas before a step; its gradients only if they are those that it applies: a closure may still have to reduce them."""
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
        """Optimizers whose models are compared: all of the last step if this one was in it, else this one alone."""
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
        """The step is over, whatever could be read of it."""
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
            # Even to ask a device whether it is done would spoil a graph that is being captured.
            self._attempt(context.readings.poll)
        self._attempt(self._reporter.tell_ready)
        self._attempt(self._reporter.heed_sidecar)
        context.writer.beat(log.step, context.phases.phase, 0)
