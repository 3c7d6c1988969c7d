"""What the analysis of all ranks' recorders says. `matching.analyse` makes these."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["missing", "extra", "order", "shape", "dtype"]
"""How a rank's calls differ from its group's: it left some out, made more, made others, or the same with other sizes or dtypes."""


@dataclass(frozen=True)
class Deviation:
    """Ranks of one group that did not call the same."""

    kind: Kind
    ranks: tuple[int, ...]
    """Who deviated; all of them if that cannot be told."""
    others: tuple[int, ...]
    """Who called what was to be called; empty if that cannot be told."""
    group: str
    description: str
    sequence: int
    operation: str
    """Of the call that is missing, too many, or other than the rest of the group has it."""
    expected: str
    """Signature of what was to be called there."""
    seen: str
    """Signature of what was called instead, perhaps in another group. If nobody can tell who is right, one side's and the other's."""
    is_clear: bool
    """False: both sides are as likely (two ranks and no history), and `ranks` holds all of them."""
    why: str
    """Why these ranks and not the others."""
    alternative: Kind | None = None
    """Another kind that fits too: a rank that waits in its first different call has either left one out or will make it afterwards."""


@dataclass(frozen=True)
class Wait:
    """A call that some ranks are in and others have not come to."""

    group: str
    description: str
    sequence: int
    operation: str
    signature: str
    entered: tuple[int, ...]
    absent: tuple[int, ...]
    """Ranks known not to have entered it; if there are none, ranks whose copies are too old to tell."""
    is_stopped: bool = False
    """The absent ranks did enter it and never came out, while others completed it and wait in later calls."""


@dataclass(frozen=True)
class Analysis:
    """All ranks' recorders side by side, at one moment. In a healthy job, too, ranks wait for each other."""

    matched: Mapping[str, int]
    """Group -> the last sequence number that all its ranks entered alike; -1: none."""
    waits: tuple[Wait, ...]
    deviations: tuple[Deviation, ...]
    culprits: tuple[int, ...]
    """Ranks that others wait for, directly or through others, and that wait for nobody themselves; and ranks that deviated."""
    victims: tuple[int, ...]
    """Ranks that wait and are no culprits."""
    blocking: Wait | None
    """The wait that names the culprits' absence."""
    unknown: tuple[int, ...]
    """Ranks of some group of which there is no flight at all."""
    outdated: tuple[int, ...] = ()
    """Ranks that others wait for and whose copy is from before that: they may have entered since."""
