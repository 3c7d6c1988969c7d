"""What a rank's desk for halts is given: what it is told once, and what it acts with. It knows no torch and no framework itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from holter.halting import rank_protocol as table
from holter.halting.rank_protocol import Rank
from holter.rank.hold.commit_register import CommitRegister
from holter.rank.hold.leaving import Leaving
from holter.records import Order


class Position(NamedTuple):
    """Where the main thread is."""

    step: int
    """Completed optimizer steps."""
    is_torn: bool
    """Inside an optimizer's step, or between two of one round: weights are partly new."""
    poisoned_step: int | None = None
    """The first that was applied although it was not finite."""


class SaveActions(Protocol):
    """What the desk cannot do itself: it knows no torch."""

    def save(self, order: Order, *, is_main_thread: bool) -> None:
        """Write and prove this rank's part; whatever it raises says what is not saved."""

    def position(self) -> Position:
        """Where the main thread is now."""


class Signals(Protocol):
    """How the process dies of a signal; `probes/csrc/termination.c`."""

    def grant(self, seconds: float, /) -> None:
        """Live so long, though a SIGTERM came; 0: as long as it takes."""

    def die(self, number: int, /) -> None:
        """Of this signal, now."""


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What a desk is told once."""

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
    """What a desk acts with."""

    hands: SaveActions
    cell: Callable[[], CommitRegister]
    """Made when the first hold needs it. Raises anything."""
    leaving: Leaving
    log: Callable[[str], None] = lambda _: None
    """One sentence in the job's own log."""
    signals: Signals | None = None
    signal_fd: int = -1
    """Where the numbers of signals arrive."""
    patience_s: Callable[[Rank], float | None] = table.patience_s
