"""When a coordinator has nothing left to do. Pure."""

from dataclasses import dataclass

from holter.coordinator.roster import Roster
from holter.faults.hangs.dead_rank import kind_of
from holter.faults.window import RankExit


@dataclass(frozen=True)
class Limits:
    """How long to wait for whom."""

    first_s: float = 120.0
    """For the first sidecar of all."""
    idle_s: float = 30.0
    """For a sidecar to come back, when none is connected and not every rank has ended."""
    stragglers_s: float = 5.0
    """For ranks that never came, or whose sidecar was lost, when all others have ended."""
    settle_s: float = 1.2
    """After an abnormal end, so that deaths are in order and the last judgement sees them all."""
    linger_s: float = 0.0
    """After the end of a run with an incident or a halt, so that whoever scrapes sees it."""
    hold_s: float = 5.0
    """How long a sidecar that said Goodbye is kept on the line, to be asked for tables and told the news."""

    def __post_init__(self) -> None:
        for name in ("first_s", "idle_s", "stragglers_s", "settle_s", "linger_s", "hold_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


def end_reason(roster: Roster, quiet_s: float, limits: Limits) -> str | None:
    """Why to end now, if so; `quiet_s` is the time since something last arrived or a sidecar was last connected."""
    if not roster.members:
        return f"no sidecar connected within {limits.first_s:.0f} s" if quiet_s >= limits.first_s else None
    if roster.has_everyone_ended:
        if roster.is_complete:
            return "every rank has ended" if quiet_s >= _settle_s(roster, limits) else None
        return "every rank that came has ended" if quiet_s >= limits.stragglers_s else None
    if roster.num_connected == 0 and roster.has_anyone_ended and quiet_s >= limits.stragglers_s:
        return "every rank that was still watched has ended"
    if roster.num_connected == 0 and quiet_s >= limits.idle_s:
        return f"no sidecar was connected for {limits.idle_s:.0f} s"
    return None


def _settle_s(roster: Roster, limits: Limits) -> float:
    exits = [RankExit(rank, 0, member.exited) for rank, member in roster.members.items() if member.exited is not None]
    return limits.settle_s if any(kind_of(end) != "ordinary" for end in exits) else 0.0
