"""The step boundary: torch's global optimizer hooks, which fire for every optimizer of every framework.

A step ends when each optimizer that took part in the last one has stepped; an optimizer that comes round again begins the next. So
a script with two optimizers, or with one that steps more often, is counted alike on every rank.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from holter import clock
from holter.probes import census
from holter.probes.companion import Companion
from holter.probes.comparison import ComparisonProbe
from holter.probes.context import Context
from holter.probes.feeding import FeedingProbe
from holter.probes.gradients import GradientProbe
from holter.probes.guard import say
from holter.records import Phase, SightLost, StepDone

REFRESH_EVERY = 16
"""Steps between two looks for parameters that were frozen, thawed or added."""


class StepProbe:
    """Follows every optimizer; tells a step when it is over."""

    def __init__(
        self,
        context: Context,
        gradients: GradientProbe,
        comparison: ComparisonProbe,
        feeding: FeedingProbe,
        find_models: Callable[[], None],
    ) -> None:
        self._context = context
        self._find_models = find_models
        self._gradients = gradients
        self._comparison = comparison
        self._feeding = feeding
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._stepped: set[int] = set()
        self._expected: set[int] = set()
        self._is_step_closed = False
        self._is_questioned = False
        self._generation = -1
        self._num_order = -1
        self._began = clock.monotonic_s()
        self._own_began = 0.0
        self._read_began = 0.0
        self._interrupted = Phase.OTHER
        self._companion = Companion(context.recorder.page)
        self._handles: list[Any] = []

    def install(self) -> None:
        """Listen to every optimizer, those that do not exist yet included."""
        wrap = self._context.guard.wrap
        before, after = wrap(self._before), wrap(self._after)
        self._handles = [
            register_optimizer_step_pre_hook(lambda o, a, k: before(o)),  # noqa: ARG005
            register_optimizer_step_post_hook(lambda o, a, k: after(o)),  # noqa: ARG005
        ]

    def uninstall(self) -> None:
        """Hear nothing more."""
        for handle in self._handles:
            handle.remove()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that have stepped, in order of their first step."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        context = self._context
        if id(optimizer) in self._stepped:
            if not self._is_step_closed:
                self._close()
            self._stepped.clear()
        self._is_step_closed = False
        if not any(known is optimizer for known in self.optimizers):
            self._meet(optimizer)
        if context.log.step % REFRESH_EVERY == 0:
            context.models.refresh()
        self._tell_census()
        self._gradients.read_applied(optimizer)
        if context.log.now.is_applied and not self._is_questioned:
            self._is_questioned = True
            self._feeding.question()
        if not self._stepped:
            self._compare_before(optimizer)
        self._interrupted = context.enter(Phase.OPTIMIZER)

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))
        self._generation = -1
        known = {id(p) for model in self._context.models for _, p in model.parameters}
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            self._find_models()

    def _compare_before(self, optimizer: torch.optim.Optimizer) -> None:
        context = self._context
        step, plan = context.log.step, context.schedule.plan
        if not plan.is_check(step) and not plan.is_after_check(step):
            return
        if self._comparison.is_possible():
            self._comparison.parameters("before")
            if plan.is_check(step):
                self._comparison.gradients(optimizer)
        if plan.is_check(step) and not context.log.now.suspects:
            context.log.now.batch = self._feeding.learn()

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        context = self._context
        context.enter(self._interrupted)
        self._stepped.add(id(optimizer))
        rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
        if context.log.now.learning_rate is None and isinstance(rate, (int, float)):
            context.log.now.learning_rate = float(rate)
        if self._stepped >= self._expected & {id(alive) for alive in self.optimizers}:
            self._close()

    def _close(self) -> None:
        context = self._context
        log = context.log
        if self._comparison.is_due():
            self._comparison.parameters("after")
            for optimizer in self.optimizers[:1]:
                self._comparison.optimizer_state(optimizer)
        self._expected = set(self._stepped)
        self._is_step_closed = True
        now = clock.monotonic_s()
        own_s = context.guard.own_s - self._own_began
        reading_s = context.readings.spent_s - self._read_began
        context.schedule.observe(
            step_s=now - self._began,
            own_s=own_s,
            reading_s=reading_s,
            gradients_s=log.now.gradients_s,
            check_s=log.now.check_s if context.schedule.plan.is_check(log.step) else 0.0,
        )
        log.close({"seconds": now - self._began, "phase_seconds": context.phases.take()})
        self._began, self._own_began, self._read_began = now, context.guard.own_s, context.readings.spent_s
        context.inputs = context.held_inputs = None
        self._is_questioned = False
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
                ),
            )

    def _tell_census(self) -> None:
        context = self._context
        is_known = context.models.generation == self._generation and len(self._gradients.ready_order) == self._num_order
        if is_known or not list(context.models):
            return
        self._generation = context.models.generation
        self._num_order = len(self._gradients.ready_order)
        for part in census.take(context.models, self.optimizers, self._gradients.ready_order):
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
