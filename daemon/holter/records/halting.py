"""The messages of a halt: what the coordinator orders, what a rank answers, and which saves were finished."""

from typing import Literal

import msgspec

Verdict = Literal["healthy", "suspect", "poisoned", "incomplete", "unknown"]
"""What is known of a checkpoint. `healthy`: it was examined and nothing speaks against it. `suspect`: an incident or
its own values speak against it. `poisoned`: it holds bad numbers. `incomplete`: parts of it are missing. `unknown`:
nobody examined it."""

EXIT_CODE = 93
"""Exit code of a rank that was halted, and of the launcher that started it."""

OrderKind = Literal["prepare", "commit", "rescue", "abort", "leave"]
"""The kinds of order:
`prepare`: stop before step `step` is applied and wait there.
`commit`: all ranks stand at `step`; each rank's main thread rewinds and saves, and may use collectives.
`rescue`: main threads are blocked; a side thread of each of `savers` saves without any collective, for those in `lost`
too.
`abort`: continue as if no order had been given.
`leave`: everything that can be saved has been saved; end with exit code 93."""

RankState = Literal[
    "willing", "unwilling", "held", "dying", "terminated", "asking", "saving", "saved", "failed", "released"
]
"""The states of a rank in a halt:
`willing`, `unwilling`: the rank can stop at the step of a prepare, or the order came too late for that.
`held`: the main thread waits before the optimizer's step, none of which has been applied; with several optimizers, one
may have stepped (`is_torn`).
`dying`: an exception ended the script; the main thread waits to hear whether it should save first.
`terminated`: a signal asked the process to end, and it waits in the same way.
`asking`: a signal arrived that the user mapped to a halt (`halt_signals`); the rank keeps training meanwhile.
`released`: the rank trains on, after an abort or because no order came."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator tells a rank to do. An order that arrives twice is carried out once."""

    halt: int
    """Number of the halt in this run, from 1."""
    kind: OrderKind
    step: int = 0
    """Completed optimizer steps of the state to keep, counted since this process attached, as all steps are."""
    base_step: int = 0
    """Steps that the run had completed before this process attached; the checkpoint is labelled with the sum of
    both."""
    snapshot: int = -1
    """Completed steps of the snapshot to keep instead of the live state; -1: keep the live state."""
    directory: str = ""
    """Absolute path of the checkpoint's directory; holds `state/`, `parts/` and `ranks/`."""
    savers: tuple[int, ...] = ()
    """Ranks that save; the first one also writes what all ranks share."""
    lost: tuple[int, ...] = ()
    """Ranks that cannot save: stopped, dead, or stuck while holding the interpreter lock."""
    deadline_s: float = 0.0
    """Seconds that a save may take."""
    reason: str = ""
    is_requested: bool = False
    """Whether somebody asked for this halt; if so it is obeyed even where the job's own action is not to halt."""


class Halting(msgspec.Struct, frozen=True, tag="halting", kw_only=True):
    """A rank reports its state in a halt. The observation's step is the number of completed optimizer steps."""

    state: RankState
    halt: int = 0
    """Number of the halt; 0 if the rank holds on its own, before the coordinator has given the halt a number."""
    why: str = ""
    is_torn: bool = False
    """Whether the main thread is inside an optimizer's step, or between two steps of one round, so that the weights are
    partly new."""
    poisoned_step: int | None = None
    """The first step that was applied although it was not finite, because a device answered too late or nobody held the
    step; None if there is none."""


class SaveFinished(msgspec.Struct, frozen=True, tag="kept", kw_only=True):
    """The script or its framework finished a save of its own; the observation's step is the steps it holds. Tagged `kept`."""

    path: str
    framework: str
    """What wrote it: accelerate, hf_trainer, deepspeed, dcp or torch."""
    seconds: float


class Snapped(msgspec.Struct, frozen=True, tag="snapped", kw_only=True):
    """A rank has a complete copy of its training state in memory; the observation's step is the completed steps in it."""

    num_bytes: int
    seconds: float
    """Seconds from the start of the step's first forward pass until the copy was complete."""


class HaltAsked(msgspec.Struct, frozen=True, tag="halt_asked", kw_only=True):
    """An operator or a scheduler asked for a halt; kept in the coordinator's own journal."""

    by: str
    reason: str = ""


class HaltAnswered(msgspec.Struct, frozen=True, tag="halt_answered", kw_only=True):
    """Whoever asked for a halt was told that none will happen; kept in the coordinator's own journal."""

    text: str


class Ordered(msgspec.Struct, frozen=True, tag="ordered", kw_only=True):
    """An order that the coordinator gave, and why; journalled so that a restarted coordinator continues where it was."""

    order: Order
    cause: str = ""
    ranks: tuple[int, ...] = ()
    incident: str | None = None
