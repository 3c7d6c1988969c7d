"""What the hooks of one rank share: the writer of observations, the step under way, what decides whether it is applied, and ways back."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from holter import clock
from holter.page import PageWriter
from holter.rank.framework import Frameworks
from holter.rank.guard import Guard, Patches
from holter.rank.hold.peers import ShardPeers
from holter.rank.models import Models
from holter.rank.publish.budget import Schedule
from holter.rank.publish.step_log import PhaseClock, StepLog
from holter.rank.readings.batches import Inputs
from holter.rank.readings.fused_pass import Readings
from holter.records import Body, Observation, Phase

if TYPE_CHECKING:
    from holter.rank.hold.device_flags import LeftOut
    from holter.rank.hold.halt_agent import HaltAgent
    from holter.rank.hooks.data import DataProbe
    from holter.rank.undo.rewind import Rewind
    from holter.rank.undo.snapshots import Snapshots


class ObservationWriter:
    """Encodes the observations of one rank and writes them to the shared page, in microseconds, waiting for nobody."""

    def __init__(self, page: PageWriter, rank: int) -> None:
        self.page = page
        self.rank = rank
        self._encoder = msgspec.msgpack.Encoder()

    def say(self, step: int, body: Body) -> bool:
        """Write one observation; False: the ring was full, the page counted it."""
        observation = Observation(rank=self.rank, step=step, at_ns=clock.wall_ns(), body=body)
        return self.page.write(self._encoder.encode(observation))

    def beat(self, step: int, phase: Phase, micro_step: int) -> None:
        """Show the sidecar where the main thread is now."""
        self.page.beat(step, phase, micro_step, clock.wall_ns())


@dataclass
class StepInputs:
    """Training calls of a model in the step under way, with what they were given."""

    last: Inputs | None = None
    suspect: Inputs | None = None
    """The call after which the first non-finite value of this step was seen."""

    def suspect_last(self) -> None:
        """Something is not finite: of several micro-batches, this one is to be questioned."""
        if self.suspect is None:
            self.suspect = self.last

    def clear(self) -> None:
        """The step is done."""
        self.last = self.suspect = None


class KnownFinite:
    """Gradients that somebody has read already and found finite: the guard need not read them again.

        clip_grad_norm_ returned a finite norm      of all that it was given, as they are after it
        a fused pass of ours over the same memory   of what it read

    It holds until the next backward pass, as long as the gradient is not written to: torch counts that, in place and by a new backward pass alike.
    """

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}

    def note(self, parameters: Iterable[Any], gradients: Iterable[Any] = ()) -> None:
        """The gradients of these, as they are now, are finite; and these, wherever they lie."""
        self._versions.update((id(p), g._version) for p in parameters if (g := p.grad) is not None)  # noqa: SLF001
        self._versions.update((id(g), g._version) for g in gradients)  # noqa: SLF001

    def covers(self, parameter: Any, gradient: Any) -> bool:
        """Whether this gradient is known to be finite."""
        return bool(self._versions.get(id(parameter)) == gradient._version)  # noqa: SLF001

    def clear(self) -> None:
        """A backward pass begins, or the step is over."""
        self._versions.clear()


@dataclass
class Hold:
    """What decides whether a step may be applied."""

    agent: "HaltAgent | None" = None
    """The rank's part of a halt; None: steps are never held."""
    peers: ShardPeers | None = None
    """The ranks with which to agree that all shards are finite; None: there are none."""
    known_finite: KnownFinite = field(default_factory=KnownFinite)
    """Gradients of this step that are known to be finite and need not be read again."""
    left_out: "LeftOut | None" = None
    """The first step that a device left out, while the rank stands for it; the weights are those from before it."""
    poisoned_step: int | None = None
    """The first step whose gradients were applied although they were not finite; None: none that is known of."""


@dataclass
class Undo:
    """Ways back to an earlier state."""

    rewind: "Rewind" = field(init=False)
    """How the step under way began."""
    snapshots: "Snapshots | None" = None
    """Copies of the training state in memory; None: the user wants none."""


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
    log: StepLog = field(default_factory=StepLog)
    data: "DataProbe" = field(init=False)
    """The loaders of this process."""
    inputs: StepInputs = field(default_factory=StepInputs)
    hold: Hold = field(default_factory=Hold)
    undo: Undo = field(default_factory=Undo)
    frameworks: Frameworks = field(default_factory=Frameworks)

    def enter(self, phase: Phase) -> Phase:
        """Begin a phase and let the sidecar see it; returns the phase to go back to."""
        interrupted = self.phases.enter(phase)
        self.writer.beat(self.log.step, phase, self.log.micro_step)
        return interrupted


def in_phase(context: Context, phase: Phase, original: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, with the phase shown while it runs."""
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
