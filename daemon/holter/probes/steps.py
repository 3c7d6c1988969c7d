"""The step boundary: torch's global optimizer hooks, which fire for every optimizer of every framework.

    backward … backward   optimizer A   optimizer B   │   backward …        one step: what came before belongs to it

Optimizers that step with no backward pass between them make one step together. It is told at once when all that took part in the
last one have stepped, and at the latest when the next backward pass begins. An optimizer inside another's step is the other's matter.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from holter import clock
from holter.probes.census import CensusTaker
from holter.probes.companion import Companion
from holter.probes.comparison import ComparisonProbe
from holter.probes.context import Context
from holter.probes.feeding import FeedingProbe
from holter.probes.gradients import GradientProbe
from holter.probes.guard import say
from holter.probes.vitals import VitalsProbe
from holter.records import Phase, SightLost, StepDone

REFRESH_EVERY = 16
"""Steps between two looks for parameters that were frozen, thawed or added."""
THAW_EVERY = 4
"""Steps between two quick looks for what was frozen or thawed: the same steps on all ranks, whatever their budgets allow."""

Optimizers = weakref.WeakSet


@dataclass
class Looks:
    """What looks at a step while it is taken."""

    gradients: GradientProbe
    comparison: ComparisonProbe
    feeding: FeedingProbe
    vitals: VitalsProbe


class StepProbe:
    """Follows every optimizer; tells a step when it is over."""

    def __init__(
        self,
        context: Context,
        looks: Looks,
        find_models: Callable[[], None],
    ) -> None:
        self._context = context
        self._find_models = find_models
        self._gradients = looks.gradients
        self._comparison = looks.comparison
        self._feeding = looks.feeding
        self._vitals = looks.vitals
        self._known: list[weakref.ref[torch.optim.Optimizer]] = []
        """In order of their first step."""
        self._stepped: Optimizers[torch.optim.Optimizer] = Optimizers()
        """Took part in the open step."""
        self._last: Optimizers[torch.optim.Optimizer] = Optimizers()
        """Took part in the step before."""
        self._depth = 0
        self._is_straggler = False
        self._is_questioned = False
        self._census = CensusTaker(context.declared_frozen)
        self._told_census: Any = None
        self._outline: Any = None
        self._began = clock.monotonic_s()
        self._own_began = 0.0
        self._read_began = 0.0
        self._interrupted = Phase.OTHER
        self._companion = Companion(context.recorder.page)
        self._handles: list[Any] = []

    def install(self) -> None:
        """Listen to every optimizer, those that do not exist yet included."""
        wrap = self._context.guard.wrap
        before, after = wrap(self._before, "claims"), wrap(self._after)

        def pre(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            # A compiled step is left as it is: a hook that is traced would change it.
            if not torch.compiler.is_compiling():
                before(optimizer)

        def post(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                after(optimizer)

        self._handles = [register_optimizer_step_pre_hook(pre), register_optimizer_step_post_hook(post)]

    def uninstall(self) -> None:
        """Hear nothing more."""
        for handle in self._handles:
            handle.remove()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that have stepped and still exist, in order of their first step."""
        alive = [optimizer for reference in self._known if (optimizer := reference()) is not None]
        if len(alive) < len(self._known):
            self._known = [reference for reference in self._known if reference() is not None]
        return alive

    def end_open_step(self) -> None:
        """A backward pass begins: what stepped before it is a step of its own."""
        if self._stepped and not self._depth:
            self._close()

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        context = self._context
        if optimizer in self._stepped:
            self._close()
        if not any(known is optimizer for known in self.optimizers):
            self._meet(optimizer)
        # Nothing was computed since the last step was told, and this one had no part in it: it comes late to that one.
        self._is_straggler = (
            not context.log.micro_step and not self._stepped and optimizer not in self._last and bool(self._last)
        )
        step = context.log.step
        if step % REFRESH_EVERY == 0 or (step % THAW_EVERY == 0 and context.models.has_thawed()):
            context.models.refresh()
        self._tell_census(is_thorough=step % THAW_EVERY == 0)
        self._judge(optimizer)
        if not self._stepped and not self._is_straggler:
            self._compare_before(optimizer)
        self._interrupted = context.enter(Phase.OPTIMIZER)

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        context = self._context
        context.enter(self._interrupted)
        if self._is_straggler and not context.log.micro_step:
            self._last.add(optimizer)
            return
        # A closure calls backward inside the step.
        self._judge(optimizer)
        self._stepped.add(optimizer)
        rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
        if context.log.now.learning_rate is None and isinstance(rate, (int, float)):
            context.log.now.learning_rate = float(rate)
        if all(other in self._stepped for other in self._last):
            self._close()

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        self._known.append(weakref.ref(optimizer))
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if held - {id(p) for model in self._context.models for _, p in model.parameters}:
            self._find_models()
        for model in self._context.models:
            model.is_active |= any(id(p) in held for _, p in model.parameters)

    def _judge(self, optimizer: torch.optim.Optimizer) -> None:
        """Ask whether what the optimizer applies is finite, and if not, where that comes from."""
        self._gradients.read_applied(optimizer)
        if self._context.log.now.is_applied and not self._is_questioned:
            self._is_questioned = True
            self._feeding.question()

    def _compare_before(self, optimizer: torch.optim.Optimizer) -> None:
        context = self._context
        step, plan = context.log.step, context.schedule.plan
        is_check, together = plan.is_check(step), self._taking_part(optimizer)
        self._feeding.observe(is_check=is_check)
        self._comparison.hyperparameters(together)
        self._vitals.glance(together)
        if not is_check and not plan.is_after_check(step):
            return
        if self._comparison.is_possible():
            self._comparison.parameters("before", together)
            if is_check:
                self._comparison.gradients(optimizer)
        if is_check:
            self._comparison.frozen()
            self._vitals.before_step(together)

    def _taking_part(self, optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
        """Whose models are compared: those of the last round if this optimizer was in it, else its own alone."""
        return [other for other in self.optimizers if other in self._last] if optimizer in self._last else [optimizer]

    def _close(self) -> None:
        context = self._context
        log = context.log
        if self._comparison.is_due() and self._stepped:
            first = next(optimizer for optimizer in self.optimizers if optimizer in self._stepped)
            self._comparison.parameters("after", self._taking_part(first))
            self._comparison.optimizer_state(first)
        if self._stepped:
            self._vitals.after_step()
        now = clock.monotonic_s()
        context.schedule.observe(
            step_s=now - self._began,
            own_s=context.guard.own_s - self._own_began,
            reading_s=context.readings.spent_s - self._read_began,
            gradients_s=log.now.gradients_s,
            check_s=log.now.check_s if context.schedule.plan.is_check(log.step) else 0.0,
        )
        log.close({"seconds": now - self._began, "phase_seconds": context.phases.take()})
        self._began, self._own_began, self._read_began = now, context.guard.own_s, context.readings.spent_s
        self._last, self._stepped = self._stepped, Optimizers()
        self._is_questioned = False
        context.inputs = context.held_inputs = None
        context.readings.poll()
        self._tell_ready()
        self._heed_sidecar()
        context.recorder.beat(log.step, context.phases.phase, 0)

    def _tell_ready(self) -> None:
        context = self._context
        for step in context.log.ready():
            context.recorder.say(
                step.step,
                StepDone(
                    seconds=step.told["seconds"],
                    phase_seconds=step.told["phase_seconds"],
                    micro_steps=step.micro_steps,
                    loss=step.loss,
                    gradient_norm=step.gradient_norm,
                    learning_rate=step.learning_rate,
                    batch=step.batch,
                    roots=step.roots,
                    nonfinite=step.suspects if step.is_applied else [],
                    overhead_ratio=context.schedule.overhead_ratio,
                    check_interval=context.schedule.plan.check_interval,
                    view=step.view,
                    numbers=step.numbers,
                ),
            )

    def _tell_census(self, *, is_thorough: bool) -> None:
        """If it changed. A thorough look goes by identity; between two, only numbers are held against the last."""
        context, optimizers = self._context, self.optimizers
        known = len(list(context.models)), context.models.generation, len(self._gradients.ready_order)
        outline = known, [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
        if outline == self._outline and not is_thorough:
            return
        self._outline = outline
        held = {frozenset([id(p) for g in optimizer.param_groups for p in g["params"]]) for optimizer in optimizers}
        if (known, held) == self._told_census or not known[0]:
            return
        self._told_census = known, held
        for part in self._census.take(context.models, optimizers, list(self._gradients.ready_order)):
            context.recorder.say(context.log.step, part)

    def _heed_sidecar(self) -> None:
        context = self._context
        context.schedule.thin(self._companion.thinning())
        notice = self._companion.notice()
        if notice:
            say(notice)
        loss = self._companion.loss()
        if loss:
            say(f"rank {context.recorder.rank} trains unobserved: {loss}")
            context.recorder.say(context.log.step, SightLost(what=loss, dropped=context.recorder.page.dropped))
