"""All hooks of a rank, which are installed and removed together, and what they do when a forward or backward pass begins and ends."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from holter.rank import accelerator
from holter.rank.context import Context, ObservationWriter
from holter.rank.framework import Framework, Frameworks
from holter.rank.hold.finite_guard import FiniteGuard
from holter.rank.hooks.autocast import RegionProbe
from holter.rank.hooks.backward import LossProbe
from holter.rank.hooks.data import DataProbe, FetchedBatch
from holter.rank.hooks.endings import EndingProbe, ExitProbe
from holter.rank.hooks.gradient_calls import ClipProbe, ReplicationProbe
from holter.rank.hooks.graphs import GraphProbe
from holter.rank.hooks.loads import LoadProbe
from holter.rank.hooks.logs import LogProbe, WarningProbe
from holter.rank.hooks.model_calls import CallProbe, ComponentProbe
from holter.rank.hooks.rank_facts import DeviceProbe, GroupProbe
from holter.rank.hooks.receives import ReceiveProbe
from holter.rank.hooks.saves import SaveProbe
from holter.rank.hooks.stage_times import StageTimesProbe
from holter.rank.hooks.step import StepProbe, StepReaders
from holter.rank.models import Models, wrapped
from holter.rank.publish.budget import Schedule
from holter.rank.readings.batches import leaves, tensors_of
from holter.rank.readings.comparison import ComparisonProbe
from holter.rank.readings.gradient_scales import GradientScaleProbe
from holter.rank.readings.gradients import GradientProbe
from holter.rank.readings.inspection import InspectionProbe
from holter.rank.readings.labels import LabelProbe
from holter.rank.readings.memory import MemoryProbe
from holter.rank.readings.modes import ModeProbe
from holter.rank.readings.nan_origin import BatchBlameProbe
from holter.rank.readings.routing import RoutingProbe
from holter.rank.readings.vitals import VitalsProbe
from holter.rank.readings.warming import KernelWarmUp
from holter.rank.undo.past_steps import PastSteps
from holter.rank.undo.rewind import Rewind
from holter.records import Phase
from holter_kernels import set_num_threads
from holter_kernels.seen import is_sound

LOOK_EVERY = 16
"""Number of steps between two looks for what no import shows, such as the first use of a device."""


class Monitor:
    """Everything that observes one rank."""

    def __init__(  # noqa: PLR0913 - settings, all named
        self,
        writer: ObservationWriter,
        *,
        world_size: int,
        budget: float,
        floor_s: float,
        threads: int = 1,
        local_buffers: Sequence[str] = (),
        frozen: Sequence[str] = (),
        mesh: str = "",
        snapshot_every: int = 0,
        snapshot_bytes: int = 0,
        guard_wait_s: float = 0.0,
        frameworks: Sequence[Framework] = (),
    ) -> None:
        set_num_threads(threads)
        # Binds and checks the native code now, and not inside a hook.
        is_sound()
        self.context = Context(
            writer,
            Schedule(budget=budget, floor_s=floor_s),
            world_size,
            models=Models(local_buffers, declared_frozen=frozen, said=mesh),
            frameworks=Frameworks(frameworks),
        )
        self.context.undo.rewind = Rewind(self.context)
        self._past = self.context.undo.rewind.past = PastSteps(self.context, lambda: self.optimizers)
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
            on_round=lambda: self.steps.end_round(),  # noqa: PLW0108  they are made later
            on_stuck=lambda: self._batches.investigate(),  # noqa: PLW0108  likewise
            on_loss=lambda loss: self._labels.look(loss, lambda: self._batches.num_last_samples),
        )
        self._calls = CallProbe(
            self.context,
            self._on_call,
            on_compiled_call=self._on_forward,
            on_call=self._on_any_call,
            on_return=self._on_return,
        )
        self._modes = ModeProbe(self.context)
        self._routing = RoutingProbe(self.context)
        self._clips = ClipProbe(self.context)
        self._components = ComponentProbe(self.context, self._calls)
        self._replication = ReplicationProbe(self.context, self._comparison.reduced_by_hand)
        self._receives = ReceiveProbe(self.context)
        self._graphs = GraphProbe(self.context, lambda num_steps: self.steps.replayed(num_steps))  # noqa: PLW0108  they are made later
        self._batches = BatchBlameProbe(self.context)
        self._finite = FiniteGuard(self.context, guard_wait_s)
        self._labels = LabelProbe(self.context)
        self._kernels = KernelWarmUp(self.context)
        self._scales = GradientScaleProbe(self.context)
        self._stage_times = StageTimesProbe(self.context)
        readers = StepReaders(
            self._gradients, self._comparison, self._batches, self._vitals, self._modes, self._finite, self._scales
        )
        self.steps = StepProbe(self.context, readers, self._find_models)
        if snapshot_every:
            from holter.rank.undo.snapshots import Snapshots  # noqa: PLC0415  imports what most scripts do not

            self.context.undo.snapshots = Snapshots(
                self.context, lambda: self.optimizers, every=snapshot_every, max_bytes=snapshot_bytes
            )
        self._data = self.context.data = DataProbe(self.context)
        self._ending = EndingProbe(self.context)
        self._exits = ExitProbe(self.context, self._ending)
        self._warnings = WarningProbe(self.context)
        self._saves = SaveProbe(self.context)
        self._loads = LoadProbe(self.context)
        self.logs = LogProbe(self.context)
        self._groups = GroupProbe(self.context)
        self._always = (self._groups.look, self._kernels.settle, MemoryProbe(self.context).look)
        self.before_backward: list[Callable[[], None]] = [
            self._saves.look,
            self._loads.tell,
            DeviceProbe(self.context).look,
        ]
        """Functions that wait for the script to import something. They are called at a backward pass if something was imported, and now and then."""
        self._num_modules = 0
        self._is_searched = False

    def install(self) -> None:
        """Install everything. In a forked child, which is not a rank, every hook is off."""
        for probe in (self.steps, self._losses, self._calls, self._data, self._ending, self._warnings):
            probe.install()
        for each in (
            self._replication,
            self._scales,
            self._receives,
            self._regions,
            self._clips,
            self._finite,
            self._exits,
            self._saves,
            self._loads,
            self._groups,
            self._graphs,
        ):
            each.install()
        os.register_at_fork(after_in_child=self._forget)
        self.context.enter(Phase.OTHER)

    def uninstall(self) -> None:
        """Remove all hooks and put back what was replaced."""
        self._inspection.end(is_complete=False)
        self.context.guard.is_on = False
        self.context.patches.restore()
        for probe in (self.steps, self._calls, self._ending):
            probe.uninstall()
        if self.context.undo.snapshots is not None:
            self.context.undo.snapshots.forget()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have stepped and still exist, in the order of their first steps."""
        return self.steps.optimizers

    def is_torn(self) -> bool:
        """Whether the weights are partly new: inside an optimizer's step, or between two optimizers of one step."""
        return self.steps.is_torn()

    def add_model(self, model: torch.nn.Module) -> None:
        """Watch a model that the script names."""
        self.context.guard.wrap(self._add)(model)

    def _add(self, root: torch.nn.Module) -> None:
        self._calls.find_wrapped()
        model = self.context.models.add(wrapped(root) if self.context.world_size > 1 else root)
        if model is not None:
            model.is_active = True
            self._calls.follow(model.inner)
            self._calls.follow_compiled(model.root)

    def _find_models(self) -> None:
        """Search for models that the script has not named and DDP does not wrap."""
        self._is_searched = True
        self._calls.find_wrapped()
        for model in self.context.models.discover():
            self._calls.follow(model.inner)
            self._calls.follow_compiled(model.root)

    def _on_forward(self) -> None:
        """Handle the beginning of a training call; the first of a step fixes the state to which the step can be rewound."""
        context = self.context
        step, snapshots, attempt = self.steps.next_step, context.undo.snapshots, context.guard.attempt
        call = context.inputs.last
        if not attempt(context.undo.rewind.forward_begins, step, call.random_state if call is not None else None):
            return
        if self._past.is_needed:
            attempt(self._past.begin, step)
        if snapshots is not None:
            attempt(snapshots.begin, step)

    def _on_call(self, module: torch.nn.Module) -> None:
        """Handle a training call of a model; its buffers are compared in the first of several micro-steps."""
        context = self.context
        attempt = context.guard.attempt
        if context.inputs.stage is not None:
            attempt(self._stage_times.begin)
        self._on_forward()
        if accelerator.kind():
            attempt(self._kernels.see, module)
        attempt(self._batches.see_call)
        model = context.models.of(module)
        if model is None:
            return
        model.is_active = True
        if context.world_size > 1 and context.log.micro_step == 0 and attempt(self._comparison.is_due):
            attempt(self._comparison.buffers, model)
        attempt(self._inspection.begin, module)
        attempt(self._routing.begin, module)

    def _on_any_call(self, module: torch.nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Handle any call of a model, in training or not; `given` are its arguments."""
        if accelerator.is_autocast_on():
            self.context.guard.attempt(self._regions.begin, module, given)
        if not module.training:
            self._data.overlap.evaluation_call(lambda: list(leaves(given, "input")))

    def _see_samples(self, fetched: list[FetchedBatch]) -> None:
        """Note the samples on which a backward pass is about to train."""
        if fetched:
            last = fetched[-1]
            self._data.overlap.train(last.leaves, last.origin.loader.number, last.origin.epoch)
        else:
            self._data.overlap.train(tensors_of(self.context.inputs.last), -1, 0)

    def _on_return(self, module: torch.nn.Module, output: object) -> None:
        attempt = self.context.guard.attempt
        if accelerator.is_autocast_on():
            attempt(self._regions.end, module, output)
        if torch.is_grad_enabled():
            attempt(self._modes.see, module, output)
            if module.training:
                if self.context.inputs.stage is not None:
                    attempt(self._stage_times.end, "forward")
                attempt(self.context.inputs.give_back, output)
        if self._routing.is_open:
            attempt(self._routing.returned, module)
        self._inspection.failed()

    def _on_backward(self) -> None:
        """Handle the beginning of a backward pass, by which time the models exist."""
        context = self.context
        attempt = context.guard.attempt
        attempt(self.steps.end_open_step)
        attempt(context.undo.rewind.backward_begins)
        context.hold.known_finite.clear()
        context.gradient_answers.clear()
        fetched = attempt(self._data.trained) or []
        attempt(self._batches.begin_backward, fetched)
        attempt(self._see_samples, fetched)
        for call in self._always:
            attempt(call)
        is_first = context.log.now.passes.num_done == 0
        if len(sys.modules) != self._num_modules or context.log.step % LOOK_EVERY == 0:
            self._num_modules = len(sys.modules)
            for call in self.before_backward:
                attempt(call)
        if self._calls.wrapped:
            attempt(self._calls.find_wrapped)
        if not self._is_searched and not list(context.models):
            attempt(self._find_models)
        if not self._gradients.ready_order:
            attempt(self._gradients.follow_order)
        if is_first:
            if context.log.step >= self._components.next_step:
                attempt(self._components.look)
            attempt(self._vitals.begin_backward)
        if context.inputs.stage is not None:
            attempt(self._stage_times.begin)

    def _on_backward_end(self) -> None:
        context = self.context
        attempt = context.guard.attempt
        if context.inputs.stage is not None:
            attempt(self._stage_times.end, "backward")
        attempt(self._gradients.unfollow_order)
        attempt(self._inspection.end)
        if self._routing.is_open:
            attempt(self._routing.end)
        if not self._scales.is_told:
            attempt(self._scales.backward_ended)
        attempt(self._comparison.note_reduction)
        if context.world_size > 1 and attempt(self._comparison.is_due):
            attempt(self._comparison.reduced_gradients)
            attempt(self._comparison.randomness)

    def _on_gradients(self) -> None:
        self.context.guard.attempt(self._gradients.read_local)
        if self.context.log.now.suspects.tensors:
            self.context.inputs.suspect_last()

    def _forget(self) -> None:
        self.context.guard.is_on = False
        self._calls.forget()
        self.context.writer.page.close()
