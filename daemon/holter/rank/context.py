"""What the hooks of one rank share."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holter.rank.framework import Frameworks
from holter.rank.guard import Guard
from holter.rank.hold.halts import Halts
from holter.rank.hold.known_finite import KnownFinite
from holter.rank.hold.peers import ShardPeers
from holter.rank.hooks.patches import Patches
from holter.rank.models import Models
from holter.rank.publish.budget import Schedule
from holter.rank.publish.observations import ObservationWriter
from holter.rank.publish.step_log import PhaseClock, StepLog
from holter.rank.readings.batches import Inputs
from holter.rank.readings.fused_pass import Readings
from holter.records import Phase

if TYPE_CHECKING:
    from holter.rank.hooks.data import DataProbe
    from holter.rank.undo.rewind import Rewind
    from holter.rank.undo.snapshots import Snapshots


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


@dataclass
class Hold:
    """What decides whether a step may be applied."""

    agent: Halts | None = None
    """The rank's part of a halt; None: steps are never held."""
    peers: ShardPeers | None = None
    """The ranks with which to agree that all shards are finite; None: there are none."""
    known_finite: KnownFinite = field(default_factory=KnownFinite)
    """Gradients of this step that are known to be finite and need not be read again."""
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
