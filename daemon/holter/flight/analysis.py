"""The result of analysing all ranks' Flight Recorders, as returned by `matching.analyse`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["missing", "extra", "order", "shape", "dtype"]
"""How a rank's calls differ from its group's: it left some out, made additional ones, made other ones, or made the same
with other sizes or dtypes."""


@dataclass(frozen=True)
class Deviation:
    """Ranks of one group that did not make the same calls as the others."""

    kind: Kind
    ranks: tuple[int, ...]
    """The ranks that deviated; all ranks of the group if nobody can tell which."""
    others: tuple[int, ...]
    """The ranks that made the expected call; empty if nobody can tell which."""
    group: str
    description: str
    sequence: int
    operation: str
    """Operation of the call that is missing, additional, or different from the rest of the group's."""
    expected: str
    """Signature of the call that was expected."""
    seen: str
    """Signature of the call that was made instead, perhaps in another group. If nobody can tell which side is right,
    `expected` and `seen` hold one side's call each."""
    is_clear: bool
    """False if both sides are equally likely (two ranks and no history); then `ranks` holds all of them."""
    why: str
    """Why these ranks deviated and not the others, in words."""
    alternative: Kind | None = None
    """Another kind that fits as well: a rank that waits in its first different call has either left one out or will
    make it later."""


@dataclass(frozen=True)
class Wait:
    """A call that some ranks have entered and others have not reached."""

    group: str
    description: str
    sequence: int
    operation: str
    signature: str
    entered: tuple[int, ...]
    absent: tuple[int, ...]
    """Ranks known not to have entered it; if there are none, ranks whose copy is too old to tell."""
    is_stopped: bool = False
    """Whether the absent ranks did enter it but never came out, while others completed it and wait in later calls."""


@dataclass(frozen=True)
class Analysis:
    """A comparison of all ranks' Flight Recorders at one moment. In a healthy job, too, ranks wait for each other."""

    matched: Mapping[str, int]
    """For each group, the last sequence number that all its ranks entered with the same call; -1 if there is none."""
    waits: tuple[Wait, ...]
    deviations: tuple[Deviation, ...]
    culprits: tuple[int, ...]
    """Ranks that others wait for, directly or indirectly, and that wait for nobody themselves; and ranks that
    deviated."""
    victims: tuple[int, ...]
    """Ranks that wait and are no culprits."""
    blocking: Wait | None
    """The wait that names the culprits as absent; None if there is none."""
    unknown: tuple[int, ...]
    """Ranks of some group whose Flight Recorder was not received at all."""
    outdated: tuple[int, ...] = ()
    """Ranks that others wait for, but whose copy is older than the wait, so that they may have entered since."""
