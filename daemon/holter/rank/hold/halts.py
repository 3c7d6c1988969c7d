"""How the rank's halt agent meets the rest of the rank: what the hooks ask of it, and what it acts with.

Before a step is applied, the main thread may have to stand still until it is decided what becomes of the run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from holter.halting import rank_protocol as table
from holter.halting.rank_protocol import Rank
from holter.rank.hold.commit_register import CommitRegister
from holter.rank.hold.leaving import Leaving
from holter.records import Order

HoldReason = Literal["nonfinite", "peer", "agreed"]
"""What the optimizer is about to apply is not finite here; on another rank's shard; or the ranks agreed to stop before this step."""


class Halts(Protocol):
    """What the hooks call; `HaltAgent` implements it."""

    def is_due(self, step: int) -> bool:
        """Whether the ranks agreed to stop before this step is applied; two attribute reads in a healthy run.

        Rounds that a loss scaler has skipped since the step before count as steps.
        """

    def hold(self, step: int, why: HoldReason, num_skipped: int = 0) -> None:
        """Stand still, in the main thread, until it is decided: returns to go on training, raises SystemExit(93) after the save."""

    def is_wanted(self) -> bool:
        """Whether a non-finite gradient is to be held at all: the action is halt, and somebody is there to decide."""

    def linger(self, why: str) -> None:
        """An exception has left the script: wait for a bounded time to be told whether to save first; returns to let the process end."""


class Position(NamedTuple):
    """Where the main thread is."""

    step: int
    """Completed optimizer steps."""
    is_torn: bool
    """Inside an optimizer's step, or between two of one round: weights are partly new."""
    poisoned_step: int | None = None
    """The first that was applied although it was not finite."""


class SaveActions(Protocol):
    """What the agent cannot do itself: it knows no torch and no framework."""

    def save(self, order: Order, *, is_main_thread: bool) -> None:
        """Write and prove this rank's part; whatever it raises says what is not saved."""

    def position(self) -> Position:
        """Where the main thread is now."""


class Signals(Protocol):
    """How the process dies of a signal; `rank/csrc/termination.c`."""

    def grant(self, seconds: float, /) -> None:
        """Live so long, though a SIGTERM came; 0: as long as it takes."""

    def die(self, number: int, /) -> None:
        """End the process by this signal, now."""


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What the agent is told once."""

    rank: int
    world_size: int
    run_dir: str = ""
    """Empty: not known yet."""
    is_halting: bool = True
    """The user's action is halt: what is not finite is held, and a process that is about to end asks first."""
    halt_signals: frozenset[int] = frozenset()
    """That ask for a halt at an agreed step."""
    neighbours: frozenset[int] = frozenset()
    """Ranks that the same launcher started."""


@dataclass(kw_only=True)
class AgentParts:
    """What the agent acts with."""

    actions: SaveActions
    register: Callable[[], CommitRegister]
    """Made when the first hold needs it. Raises anything."""
    leaving: Leaving
    log: Callable[[str], None] = lambda _: None
    """One sentence in the job's own log."""
    signals: Signals | None = None
    signal_fd: int = -1
    """Where the numbers of signals arrive."""
    patience_s: Callable[[Rank], float | None] = table.patience_s
