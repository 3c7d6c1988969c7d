"""All probes of a rank, put on and taken off together."""

import os

import torch

from holter.probes.calls import CallProbe
from holter.probes.comparison import ComparisonProbe
from holter.probes.context import Context
from holter.probes.data import DataProbe
from holter.probes.farewell import FarewellProbe
from holter.probes.feeding import FeedingProbe
from holter.probes.gradients import GradientProbe
from holter.probes.losses import LossProbe
from holter.probes.models import wrapped
from holter.probes.recorder import Recorder
from holter.probes.schedule import Schedule
from holter.probes.steps import Looks, StepProbe
from holter.probes.vitals import VitalsProbe
from holter.records import Phase
from holter_kernels import set_num_threads


class Monitor:
    """What a rank wears."""

    def __init__(self, recorder: Recorder, *, world_size: int, budget: float, floor_s: float, threads: int = 1) -> None:
        set_num_threads(threads)
        self.context = Context(recorder, Schedule(budget=budget, floor_s=floor_s), world_size)
        self._gradients = GradientProbe(self.context)
        self._comparison = ComparisonProbe(self.context)
        self._losses = LossProbe(
            self.context,
            on_begin=self._on_backward,
            on_gradients=self._on_gradients,
            on_end=self._on_backward_end,
        )
        self._calls = CallProbe(self.context, self._on_call)
        self._vitals = VitalsProbe(self.context)
        looks = Looks(self._gradients, self._comparison, FeedingProbe(self.context), self._vitals)
        self._steps = StepProbe(self.context, looks, self._find_models)
        self._data = DataProbe(self.context)
        self._farewell = FarewellProbe(self.context)
        self._is_searched = False

    def install(self) -> None:
        """Put everything on; a forked child of the rank is not a rank and wears nothing."""
        for probe in (self._steps, self._losses, self._calls, self._data, self._farewell):
            probe.install()
        os.register_at_fork(after_in_child=self._forget)
        self.context.enter(Phase.OTHER)

    def uninstall(self) -> None:
        """Take everything off."""
        self.context.guard.is_on = False
        self.context.patches.restore()
        for probe in (self._steps, self._calls, self._farewell):
            probe.uninstall()

    def add_model(self, model: torch.nn.Module) -> None:
        """Watch a model that the script names."""
        self.context.guard.wrap(self._add)(model)

    def _add(self, root: torch.nn.Module) -> None:
        self._calls.find_wrapped()
        model = self.context.models.add(wrapped(root) if self.context.world_size > 1 else root)
        if model is not None:
            model.is_active = True
            self._calls.follow(model.inner)

    def _find_models(self) -> None:
        """Look for models that were not told and are not DDP's."""
        self._is_searched = True
        self._calls.find_wrapped()
        for model in self.context.models.discover():
            self._calls.follow(model.inner)

    def _on_call(self, module: torch.nn.Module) -> None:
        """A model is called in training; for its buffers, the first of several micro-steps is enough."""
        model = self.context.models.of(module)
        if model is None:
            return
        model.is_active = True
        if self.context.log.micro_step == 0 and self._comparison.is_due():
            self._comparison.buffers(model)

    def _on_backward(self) -> None:
        """Backward begins: by now the models exist; learn the order of their gradients, once."""
        self._steps.end_open_step()
        self._calls.find_wrapped()
        if not self._is_searched and not list(self.context.models):
            self._find_models()
        self._gradients.follow_order()
        if self.context.log.micro_step == 0:
            self._vitals.begin_backward()

    def _on_backward_end(self) -> None:
        self._gradients.unfollow_order()
        if self._comparison.is_due():
            self._comparison.reduced_gradients()

    def _on_gradients(self) -> None:
        self._gradients.read_local()
        if self.context.log.now.suspects:
            self.context.hold_inputs()

    def _forget(self) -> None:
        self.context.guard.is_on = False
        self.context.recorder.page.close()
