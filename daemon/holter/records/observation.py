"""What travels from ranks and sidecars to the coordinator, and what the coordinator adds to the journal about itself."""

from typing import Literal

import msgspec

from holter.records.halting import HaltAnswered, HaltAsked, Halting, Ordered, SaveFinished, Snapped
from holter.records.rank import (
    Attached,
    Census,
    Feed,
    FirstStep,
    Groups,
    Inspection,
    Logged,
    OnDevice,
    Origin,
    PackedTable,
    ScriptWarning,
    Skipped,
    StepDone,
    Swapped,
    Table,
    Vitals,
)
from holter.records.watching import Device, Exam, Exited, Farewell, LastCalls, Overdue, Traffic


class SightLost(msgspec.Struct, frozen=True, tag="sight_lost", kw_only=True):
    """holter cannot see something. Never to be taken for health."""

    what: str
    dropped: int


class Unavailable(msgspec.Struct, frozen=True, tag="unavailable", kw_only=True):
    """A table was asked for and is not available; the coordinator writes this into its own journal."""

    tensor_class: str


class Judged(msgspec.Struct, frozen=True, tag="judged", kw_only=True):
    """The coordinator judged all it had received; in its own journal, so that a replay judges at the same moments."""

    is_final: bool = False
    is_news: bool = True
    """Incidents were opened or better explained. A coordinator that is started again judges at these moments only."""
    closed: tuple[str, ...] = ()
    """Incidents that were over by then: what is found later is a new one, also for a coordinator that was started since."""


class Unexamined(msgspec.Struct, frozen=True, tag="unexamined", kw_only=True):
    """A rank was to be examined and its sidecar did not answer."""

    asked_ns: int


class Link(msgspec.Struct, frozen=True, tag="link", kw_only=True):
    """The line to a rank's sidecar changed its state."""

    state: Literal["connected", "closed", "silent"]
    """`closed`: by the other side, whose process ended. `silent`: nothing comes any more, and nobody closed it."""


Rare = Vitals | Inspection | Feed | Skipped | Swapped | ScriptWarning | Device
"""Records that a window keeps unchanged, up to a limit of each kind."""
Own = Unavailable | Judged | Unexamined | Link | HaltAsked | HaltAnswered | Ordered
"""What the coordinator records about itself."""
Watched = Overdue | Exam | Traffic | LastCalls
"""What a sidecar reports of its rank's progress and collectives."""
Body = (
    Attached
    | FirstStep
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
    | SaveFinished
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
