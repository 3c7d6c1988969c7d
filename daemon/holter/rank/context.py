"""What the hooks of one rank share: the writer of observations, the current step, what decides whether it is applied, and ways back."""

import array
import functools
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from holter import clock
from holter.files import encoded
from holter.page import PageWriter
from holter.rank.accelerator import is_capturing
from holter.rank.framework import Frameworks
from holter.rank.guard import Guard, Patches, is_from_signal_handler
from holter.rank.hold.device_flags import DeviceFlags, LeftOut
from holter.rank.hold.peers import ShardPeers
from holter.rank.models import Models
from holter.rank.publish.budget import Schedule
from holter.rank.publish.step_log import OpenStep, OwedAnswer, PhaseClock, StepLog
from holter.rank.readings.batches import HOST, MAX_LEAVES, Inputs, Leaf, leaves, on_device, pipeline_stage
from holter.rank.readings.fused_pass import Readings
from holter.rank.readings.gradient_answers import GradientAnswers, GradientMark, num_collectives
from holter.rank.readings.loss_lines import LossTrace
from holter.rank.readings.samples import local
from holter.rank.readings.state_history import StateHistory
from holter.records import Body, Observation, Phase

if TYPE_CHECKING:
    from holter.rank.hold.halt_agent import HaltAgent
    from holter.rank.hooks.data import DataProbe
    from holter.rank.undo.rewind import Rewind
    from holter.rank.undo.snapshots import Snapshots


MAX_OUTPUTS = 16
MAX_OUTPUT_BYTES = 1 << 22
"""Most bytes of a model's output that is kept until the backward pass."""


class ObservationWriter:
    """Encodes the observations of one rank and writes them to the shared page, in microseconds, waiting for nobody."""

    def __init__(self, page: PageWriter, rank: int) -> None:
        self.page = page
        self.rank = rank
        self._encoder = msgspec.msgpack.Encoder()

    def say(self, step: int, body: Body) -> bool:
        """Write one observation; return False if the ring was full, which the page counts."""
        observation = Observation(rank=self.rank, step=step, at_ns=clock.wall_ns(), body=body)
        return self.page.write(encoded(observation, self._encoder.encode))

    def beat(self, step: int, phase: Phase, micro_step: int) -> None:
        """Show the sidecar where the main thread is now."""
        self.page.beat(step, phase, micro_step, clock.wall_ns())


@dataclass
class StepInputs:
    """Training calls of models in the current step, with their inputs."""

    last: Inputs | None = None
    suspect: Inputs | None = None
    """The call after which the first non-finite value of this step was seen."""
    trace: LossTrace | None = None
    """How the first loss of this step that was not finite was made; None if all were finite."""
    outputs: list[torch.Tensor] | None = field(default_factory=list)
    """Outputs of training calls since the last backward pass; None if one was too large or on a device, or there were too many."""
    num_models: int = 0
    """Number of models that were called in training since the step began."""
    unread: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)
    """Inputs on a device since the last backward pass, with their versions. They are read with the loss, because later they may be gone."""
    stage: tuple[int, bool] | None = None
    """Number of the pipeline stage that made the last call, and whether it is the first; None if torch's pipelining did not make it."""
    healthy_steps: Counter[str] = field(default_factory=Counter)
    """For tensors of a batch, the number of finite steps on which they were not finite, as masks are."""

    received: dict[int, int] = field(default_factory=dict)
    """Rank that sent a tensor in this step, by the tensor's address."""

    def see(self, call: Inputs | None) -> None:
        """Note that a model is called in training, with its inputs."""
        if call is not None and (self.last is None or self.last.model() is not call.model()):
            self.num_models += 1
        self.last, self.stage = call, pipeline_stage()
        if call is not None and call.device is not HOST and len(self.unread) < MAX_LEAVES:
            self.unread += on_device(call)

    def give_back(self, output: object) -> None:
        """Keep the output of a training call until its backward pass begins, if it is small."""
        for tensor in (output,) if isinstance(output, torch.Tensor) else [t for _, t in leaves(output, "")]:
            if self.outputs is None:
                return
            is_kept = len(self.outputs) < MAX_OUTPUTS and tensor.is_cpu and tensor.nbytes <= MAX_OUTPUT_BYTES
            self.outputs = [*self.outputs, tensor.detach()] if is_kept else None

    def are_outputs_finite(self) -> bool | None:
        """Whether the models' outputs are finite, except single numbers, which are losses; None if there are no others, or they were not kept."""
        told = [t for t in self.outputs or () if t.is_floating_point() and t.numel() > 1 and t.layout is torch.strided]
        return all(bool(torch.isfinite(t).all()) for t in told) if told else None

    def take_unread(self) -> list[Leaf]:
        """Return the unread inputs that nobody has written to since, and forget them all."""
        unread, self.unread = self.unread, []
        return [(path, tensor) for path, tensor, version in unread if tensor._version == version]  # noqa: SLF001

    def suspect_last(self) -> None:
        """Mark the last call for investigation, because something is not finite, unless an earlier micro-batch is marked."""
        if self.suspect is None:
            self.suspect = self.last

    def clear(self) -> None:
        """Forget all calls of a step that is done."""
        self.last = self.suspect = self.trace = None
        self.unread, self.num_models = [], 0
        self.outputs = []
        self.received.clear()


class KnownFinite:
    """Gradients that are known to be finite without a reading of ours, such as those of which clip_grad_norm_ returned a finite norm.

    This holds until the next backward pass, unless the gradient is written to. torch counts writes, except those of collectives.
    """

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        self._num_collectives: int | None = -1

    def note(self, gradients: Sequence[Any]) -> None:
        """Note that these gradients, as they are now, are finite."""
        now = num_collectives()
        if now is None:
            return
        if self._num_collectives != now:
            self._versions, self._num_collectives = {}, now
        mark = GradientMark.of(gradients)
        if mark is None:
            self._versions.update((local(g).data_ptr(), g._version) for g in gradients)  # noqa: SLF001
        else:
            self._versions.update(zip(array.array("Q", mark.addresses), array.array("Q", mark.versions), strict=True))

    def unshown(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return those of these gradients that are not known to be finite."""
        if not self._versions or self._num_collectives != num_collectives():
            return gradients
        known, mark = self._versions, GradientMark.of(gradients)
        if mark is not None and list(map(known.get, array.array("Q", mark.addresses))) == list(
            array.array("Q", mark.versions)
        ):
            return []
        return [g for g in gradients if known.get(local(g).data_ptr(), -1) != g._version]  # noqa: SLF001

    def clear(self) -> None:
        """Forget all gradients, because a backward pass begins or the step is over."""
        self._versions.clear()


@dataclass
class Hold:
    """What decides whether a step may be applied."""

    agent: "HaltAgent | None" = None
    """The rank's part of a halt; None if steps are never held."""
    peers: ShardPeers | None = None
    """The ranks with which to agree that all shards are finite; None if there are none."""
    known_finite: KnownFinite = field(default_factory=KnownFinite)
    """Gradients of this step that are known to be finite and need not be read again."""
    flags: DeviceFlags = field(default_factory=DeviceFlags)
    """Flags by which devices leave steps out of the weights by themselves."""
    left_out: LeftOut | None = None
    """The first step that a device left out, while the rank stands still because of it; the weights are those from before that step."""
    poisoned_step: int | None = None
    """The first step whose gradients were applied although they were not finite; None if no such step is known."""


@dataclass
class Undo:
    """Ways back to an earlier state."""

    rewind: "Rewind" = field(init=False)
    """The way back to the beginning of the current step."""
    snapshots: "Snapshots | None" = None
    """Copies of the training state in memory; None if the user wants none."""


@dataclass
class Context:
    """What all hooks of one rank share."""

    writer: ObservationWriter
    schedule: Schedule
    world_size: int
    guard: Guard = field(default_factory=Guard)
    patches: Patches = field(default_factory=Patches)
    phases: PhaseClock = field(default_factory=PhaseClock)
    models: Models = field(default_factory=Models)
    readings: Readings = field(default_factory=Readings)
    reading_s: float = 0.0
    """Seconds that the training thread has computed for readings."""
    gradient_answers: GradientAnswers = field(default_factory=GradientAnswers)
    """What was read of the current step's gradients."""
    log: StepLog = field(default_factory=StepLog)
    data: "DataProbe" = field(init=False)
    """The loaders of this process."""
    inputs: StepInputs = field(default_factory=StepInputs)
    hold: Hold = field(default_factory=Hold)
    undo: Undo = field(default_factory=Undo)
    state_history: StateHistory = field(default_factory=StateHistory)
    """What the training state was like until now; a halt compares what it saves with it."""
    frameworks: Frameworks = field(default_factory=Frameworks)

    def read(
        self,
        name: str,
        tensors: Sequence[Any],
        then: Callable[[Any], None],
        *,
        step: OpenStep | None = None,
        histogram: str = "off",
    ) -> Any:
        """Read these tensors and return the reading, None if they cannot be read. `then` gets the table, now or later, and `step` waits for it.

        Nothing is raised, neither here nor when the answer comes. A failure is counted and printed once, and the step is reported without it.
        """
        if is_capturing():
            return None
        owed, started = OwedAnswer(self.guard, step, then), clock.thread_s()
        try:
            reading = self.readings.read(name, tensors, owed, histogram=histogram)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            reading = None
            self.guard.count(f"reading {name.rstrip(string.digits)}", error)
        if reading is None:
            owed.settle()
        self.reading_s += clock.thread_s() - started
        return reading

    def enter(self, phase: Phase) -> Phase:
        """Begin a phase and show it to the sidecar; return the phase to go back to."""
        log = self.log
        self.writer.page.beat(log.step, phase, log.now.passes.num_done, clock.wall_ns())
        return self.phases.enter(phase)


def in_phase(context: Context, phase: Phase, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that this phase is shown while it runs."""
    interrupted: list[Phase] = []
    begin = context.guard.wrap(lambda: interrupted.append(context.enter(phase)))
    end = context.guard.wrap(lambda: context.enter(interrupted.pop()) if interrupted else None)

    @functools.wraps(original)
    def within(*args: Any, **kwargs: Any) -> Any:
        begin()
        try:
            return original(*args, **kwargs)
        finally:
            end()

    return within
