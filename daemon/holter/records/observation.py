"""What travels from ranks and sidecars to the coordinator, and what that adds of its own doings to the journal."""

from typing import Literal

import msgspec

from holter.records.halting import HaltAnswered, HaltAsked, Halting, Kept, Ordered, Snapped
from holter.records.model import Attached, Begun, Census, Groups, OnDevice
from holter.records.steps import Logged, Origin, PackedTable, StepDone, Table
from holter.records.vitals import Feed, Inspection, Skipped, Swapped, Vitals, Warned
from holter.records.watching import Device, Exam, Exited, Farewell, LastCalls, Overdue, Traffic


class SightLost(msgspec.Struct, frozen=True, tag="sight_lost", kw_only=True):
    """holter itself is blind somewhere: never to be taken for health."""

    what: str
    dropped: int


class Unavailable(msgspec.Struct, frozen=True, tag="unavailable", kw_only=True):
    """A table was asked for and cannot be had; written by the coordinator into its own journal."""

    tensor_class: str


class Judged(msgspec.Struct, frozen=True, tag="judged", kw_only=True):
    """The coordinator looked at all it had heard; in its own journal, so that a replay looks at the same moments."""

    is_final: bool = False
    is_news: bool = True
    """Incidents were made or better understood. A coordinator that is started again looks at these moments only."""
    closed: tuple[str, ...] = ()
    """Incidents that had passed: what is found later is another one, also for a coordinator that was not there to see it pass."""


class Unexamined(msgspec.Struct, frozen=True, tag="unexamined", kw_only=True):
    """A rank was to be examined and its sidecar did not answer."""

    asked_ns: int


class Link(msgspec.Struct, frozen=True, tag="link", kw_only=True):
    """The line to a rank's sidecar changed its state."""

    state: Literal["connected", "closed", "silent"]
    """`closed` by the other side: its process ended. `silent`: nothing comes any more, and nobody closed it."""


Rare = Vitals | Inspection | Feed | Skipped | Swapped | Warned | Device
"""What a window keeps as it was said, bounded in number."""
Own = Unavailable | Judged | Unexamined | Link | HaltAsked | HaltAnswered | Ordered
"""What only the coordinator itself says, of its own doings."""
Watched = Overdue | Exam | Traffic | LastCalls
"""What a sidecar says of its rank's progress and collectives."""
Body = (
    Attached
    | Begun
    | Census
    | StepDone
    | Table
    | PackedTable
    | Logged
    | Origin
    | Farewell
    | Exited
    | OnDevice
    | Groups
    | SightLost
    | Halting
    | Kept
    | Snapped
    | Watched
    | Rare
    | Own
)


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank, or the sidecar that watches it, measured."""

    rank: int
    step: int
    at_ns: int
    """Wall clock of the host that observed, nanoseconds since the epoch."""
    body: Body
