"""A halt as it travels: what the coordinator orders, what a rank answers, and which saves were finished."""

from typing import Literal

import msgspec

Verdict = Literal["healthy", "suspect", "poisoned", "incomplete", "unknown"]
"""Of a checkpoint: it was looked at and nothing speaks against it; an incident or its own values do; its numbers are bad; parts of it are
missing; it was not looked at."""

EXIT_CODE = 93
"""Of a rank that was halted, and of whoever started it."""

OrderKind = Literal["prepare", "commit", "rescue", "abort", "leave"]
"""`prepare`: stop before step `step` is applied and wait there.
`commit`: all stand at `step`; each rank's main thread rewinds and saves, collectives are allowed.
`rescue`: main threads are blocked; a thread of each of `savers` saves without any collective, for those in `lost` too.
`abort`: go on as if nothing had been said.
`leave`: all that can be saved is saved; end with exit code 93."""

RankState = Literal[
    "willing", "unwilling", "held", "dying", "terminated", "asking", "saving", "saved", "failed", "released"
]
"""`willing`, `unwilling`: answers to a prepare, in time or too late.
`held`: the main thread stands before the optimizer's step, nothing of it applied; of several optimizers, one may have been (`is_torn`).
`dying`: an exception ended the script; the main thread waits to be told whether to save first.
`terminated`: a signal asked the process to end, and it waits in the same way.
`asking`: a signal came that the user mapped to a halt (`halt_signals`); the rank trains on meanwhile.
`released`: it goes on training, after an abort or because no order came."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator wants of a rank. An order that comes twice is carried out once."""

    halt: int
    """Number of the halt in this run, from 1."""
    kind: OrderKind
    step: int = 0
    """Completed optimizer steps of the state that is to be kept, counted since this process attached, as all steps are."""
    base_step: int = 0
    """Steps that the run had completed before this process attached: the checkpoint is labelled with the sum."""
    snapshot: int = -1
    """Keep the snapshot of this many completed steps instead of the live state; -1: the live state."""
    directory: str = ""
    """Where the checkpoint is written, absolute: `state/`, `parts/` and `ranks/` in it."""
    savers: tuple[int, ...] = ()
    """Ranks that save; the first writes what all ranks share."""
    lost: tuple[int, ...] = ()
    """Ranks that cannot save: stopped, dead, or holding the interpreter lock."""
    deadline_s: float = 0.0
    """How long a save may take."""
    reason: str = ""
    is_requested: bool = False
    """Somebody asked for this halt: it is obeyed whatever the job's own action is."""


class Halting(msgspec.Struct, frozen=True, tag="halting", kw_only=True):
    """Where a rank is in a halt. The observation's step is the number of completed optimizer steps."""

    state: RankState
    halt: int = 0
    """0: the rank holds on its own, before the coordinator has given the halt a number."""
    why: str = ""
    is_torn: bool = False
    """The main thread is inside an optimizer's step, or between two steps of one round: the weights are partly new."""
    poisoned_step: int | None = None
    """The first step that was applied although it was not finite, because a device answered too late or nobody held it; None if there is none."""


class SaveFinished(msgspec.Struct, frozen=True, tag="kept", kw_only=True):
    """The script, or its framework, finished a save of its own; the observation's step is the completed steps in it. Journals call it `kept`."""

    path: str
    framework: str
    """accelerate, hf_trainer, deepspeed, dcp, torch."""
    seconds: float


class Snapped(msgspec.Struct, frozen=True, tag="snapped", kw_only=True):
    """A rank has a whole copy of its training state in memory; the observation's step is the completed steps in it."""

    num_bytes: int
    seconds: float
    """From the beginning of the step's first forward pass until it was copied."""


class HaltAsked(msgspec.Struct, frozen=True, tag="halt_asked", kw_only=True):
    """An operator or a scheduler asked for a halt; in the coordinator's own journal."""

    by: str
    reason: str = ""


class HaltAnswered(msgspec.Struct, frozen=True, tag="halt_answered", kw_only=True):
    """Whoever asked for a halt was told that there will be none; in the coordinator's own journal."""

    text: str


class Ordered(msgspec.Struct, frozen=True, tag="ordered", kw_only=True):
    """What the coordinator ordered, and for what; in its own journal, so that one that is started again goes on where it was."""

    order: Order
    cause: str = ""
    ranks: tuple[int, ...] = ()
    incident: str | None = None
