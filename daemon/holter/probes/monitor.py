"""All probes of a rank, put on and taken off together."""

import os
from collections.abc import Callable, Sequence

import torch

from holter.probes.calls import CallProbe
from holter.probes.clips import ClipProbe
from holter.probes.comparison import ComparisonProbe
from holter.probes.components import ComponentProbe
from holter.probes.context import Context
from holter.probes.data import DataProbe
from holter.probes.farewell import FarewellProbe
from holter.probes.feeding import FeedingProbe
from holter.probes.gradients import GradientProbe
from holter.probes.inspection import InspectionProbe
from holter.probes.logs import LogProbe
from holter.probes.losses import LossProbe
from holter.probes.models import Models, wrapped
from holter.probes.recorder import Recorder
from holter.probes.regions import RegionProbe
from holter.probes.replication import ReplicationProbe
from holter.probes.schedule import Schedule
from holter.probes.steps import Looks, StepProbe
from holter.probes.vitals import VitalsProbe
from holter.probes.warned import WarningProbe
from holter.records import Phase
from holter_kernels import set_num_threads


class Monitor:
    """What a rank wears."""

    def __init__(  # noqa: PLR0913 - settings, all named
        self,
        recorder: Recorder,
        *,
        world_size: int,
        budget: float,
        floor_s: float,
        threads: int = 1,
        local_buffers: Sequence[str] = (),
        frozen: Sequence[str] = (),
    ) -> None:
        set_num_threads(threads)
        self.context = Context(
            recorder,
            Schedule(budget=budget, floor_s=floor_s),
            world_size,
            models=Models(local_buffers),
            declared_frozen=tuple(frozen),
        )
        self._inspection = InspectionProbe(self.context)
        self._regions = RegionProbe(self.context)
        self._vitals = VitalsProbe(self.context, budget=budget, floor_s=floor_s, on_idle=self._inspection.ask)
        self._gradients = GradientProbe(self.context, self._vitals.see_gradients)
        self._comparison = ComparisonProbe(self.context)
        self._losses = LossProbe(
            self.context,
            on_begin=self._on_backward,
            on_gradients=self._on_gradients,
            on_end=self._on_backward_end,
        )
        self._calls = CallProbe(self.context, self._on_call, on_call=self._regions.begin, on_return=self._on_return)
        self._clips = ClipProbe(self.context)
        self._components = ComponentProbe(self.context, self._calls)
        self._replication = ReplicationProbe(self.context, self._comparison.reduced_by_hand)
        self._feeding = FeedingProbe(self.context)
        looks = Looks(self._gradients, self._comparison, self._feeding, self._vitals)
        self._steps = StepProbe(self.context, looks, self._find_models)
        self._data = DataProbe(self.context)
        self._farewell = FarewellProbe(self.context)
        self._warnings = WarningProbe(self.context)
        self.logs = LogProbe(self.context)
        self.before_backward: list[Callable[[], None]] = []
        """Called at every backward pass, by those who wait for the script to import something."""
        self._is_searched = False

    def install(self) -> None:
        """Put everything on; a forked child of the rank is not a rank and wears nothing."""
        for probe in (self._steps, self._losses, self._calls, self._data, self._farewell, self._warnings):
            probe.install()
        self._replication.install()
        self._regions.install()
        self._clips.install()
        os.register_at_fork(after_in_child=self._forget)
        self.context.enter(Phase.OTHER)

    def uninstall(self) -> None:
        """Take everything off."""
        self._inspection.end(is_told=False)
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
        self._feeding.see_call()
        model = self.context.models.of(module)
        if model is None:
            return
        model.is_active = True
        if self.context.log.micro_step == 0 and self._comparison.is_due():
            self._comparison.buffers(model)
        self._inspection.begin(module)

    def _on_return(self, module: torch.nn.Module, output: object) -> None:
        self._regions.end(module, output)
        self._inspection.failed()

    def _on_backward(self) -> None:
        """Backward begins: by now the models exist; learn the order of their gradients, once."""
        self._steps.end_open_step()
        self._feeding.begin_backward(self._data.trained())
        for call in self.before_backward:
            call()
        self._calls.find_wrapped()
        if not self._is_searched and not list(self.context.models):
            self._find_models()
        self._gradients.follow_order()
        if self.context.log.micro_step == 0:
            self._components.look()
            self._vitals.begin_backward()

    def _on_backward_end(self) -> None:
        self._gradients.unfollow_order()
        self._inspection.end()
        if self._comparison.is_due():
            self._comparison.reduced_gradients()

    def _on_gradients(self) -> None:
        self._gradients.read_local()
        if self.context.log.now.suspects:
            self.context.hold_inputs()

    def _forget(self) -> None:
        self.context.guard.is_on = False
        self.context.recorder.page.close()
