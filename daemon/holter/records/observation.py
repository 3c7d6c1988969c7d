"""Observations made from outside the rank, the coordinator's notes on itself, and the record that carries them all.

A sidecar observes its rank's progress, process, collectives, device and end. What a rank reports of itself is in
`rank`, what it reports in a halt in `halting`.
"""

import enum
from typing import Literal

import msgspec

from holter.records.halting import HaltAnswered, HaltAsked, Halting, Ordered, SaveFinished, Snapped
from holter.records.joined import StepsDone
from holter.records.rank import (
    Attached,
    Census,
    Feed,
    FirstStep,
    GradientScales,
    Group,
    Groups,
    Hoard,
    Inspection,
    Labels,
    Loaded,
    Logged,
    Modes,
    OnDevice,
    Origin,
    Overlap,
    PackedTable,
    Preparing,
    Rollout,
    Routing,
    ScriptWarning,
    Skipped,
    StageTimes,
    StepDone,
    Swapped,
    Table,
    Vitals,
)

ExamDepth = Literal["quick", "native"]
"""`quick`: the state of the process, the Flight Recorder and Python stacks. `native`: stacks through native code as
well, which takes a second more."""


class Phase(enum.IntEnum):
    """What a rank's main thread is doing, as far as its hooks tell."""

    ATTACH = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    CHECKPOINT = 5
    EVALUATION = 6
    OTHER = 7
    """The script's own code, between two hooks."""


LEFT = "destroy_process_group()"
"""Text of the farewell of a rank that has left its process group in order and still runs."""


class Farewell(msgspec.Struct, frozen=True, tag="farewell", kw_only=True):
    """The reason that a rank gives for its end, if its interpreter ends in a way that it can see."""

    kind: Literal["end", "exception", "interrupt", "exit"]
    """`exit` means `os._exit`, which skips everything that Python does at an end."""
    text: str
    """Exception type and message, `os._exit(3)` or `sys.exit(3)`; empty for an ordinary end; LEFT if the rank has left
    its process group but still runs."""
    where: str
    """File, line and function of the innermost frame, in whichever package it is."""
    own: list[str] = []
    """Frames of the user's script, innermost first: `/home/me/train.py:41 in main: loss = criterion(x, y)`."""


class Exited(msgspec.Struct, frozen=True, tag="exited", kw_only=True):
    """A rank's process ended, as its sidecar saw it."""

    pid: int
    exit_code: int | None
    """None if another process collected the exit code before the sidecar could read it."""
    signal: int | None
    out_of_memory: bool
    last_step: int
    last_phase: Phase
    farewell: Farewell | None


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One collective, or one message between two ranks, as recorded by PyTorch's Flight Recorder."""

    group: str
    """Name of the process group, the same on all its ranks."""
    sequence: int
    """Number of the collective within its group, or of the message if `is_p2p`; matching calls on two ranks have the
    same number."""
    operation: str
    """Name without the backend: `all_reduce`, `barrier`, `send`."""
    sizes: tuple[tuple[int, ...], ...]
    """Shape of each input."""
    dtypes: tuple[str, ...]
    created_ns: int
    """When the rank entered the call, by its host's wall clock."""
    is_retired: bool
    """Whether the recorder has marked the call as over."""
    state: Literal["scheduled", "started", "completed"] = "scheduled"
    """Progress of the call; on gloo it stays `scheduled`."""
    is_p2p: bool = False
    started_ns: int = 0
    """When the device started it, in nanoseconds; 0 if unknown, as on gloo."""
    completed_ns: int = 0
    output_sizes: tuple[tuple[int, ...], ...] = ()
    output_dtypes: tuple[str, ...] = ()
    record: int = 0
    """Number of the call among all calls of this rank."""
    lines: tuple[str, ...] = ()
    """Lines of the user's script that led to the call, innermost first: `/home/me/train.py:41 in main`; empty if they
    were not requested."""


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one rank's Flight Recorder."""

    groups: list[Group]
    calls: list[Call]
    """Calls, oldest first; only the newest if there are too many."""
    taken_ns: int
    """When the recorder was copied, in nanoseconds since the epoch."""


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a rank's process, as the kernel reports it."""

    state: Literal["running", "sleeping", "uninterruptible", "stopped", "traced", "frozen", "zombie", "gone", "unknown"]
    """State of the main thread."""
    cpu_s: float
    """Processor time of all threads since the process started, in seconds."""
    cpu_share: float
    """Share of one core used during the last second or so; NaN if not known."""
    wait_channel: str = ""
    """Name of the kernel function in which the main thread sleeps."""
    stopped_s: float = 0.0
    """Seconds for which it has been stopped, traced, frozen or uninterruptible without a break."""
    pressure: dict[str, float] = {}
    """Pressure on the host: share of the last ten seconds (0 to 1) in which some task waited for `cpu`, `memory` or
    `io`."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One frame of a stack."""

    function: str
    file: str
    line: int
    is_native: bool = False


class ThreadStack(msgspec.Struct, frozen=True, array_like=True):
    """The stack of one thread of a rank."""

    name: str
    is_main: bool
    owns_lock: bool
    """Whether the thread holds the interpreter lock."""
    is_active: bool
    """Whether the thread runs on a processor instead of waiting."""
    frames: list[Frame]
    """Frames, innermost first."""
    work: str = ""
    """What a pipeline stage was computing: `forward pass of micro-batch 2`; empty if it is none."""


class Exam(msgspec.Struct, frozen=True, tag="exam", kw_only=True):
    """A sidecar's examination of its rank from outside, made on request or because the rank is dying."""

    reason: Literal["asked", "death", "last_breath"]
    asked_ns: int = 0
    """`asked_ns` of the request that this answers; 0 if nobody asked."""
    depth: ExamDepth = "quick"
    phase: Phase = Phase.OTHER
    micro_step: int = 0
    waited_s: float = 0.0
    """Seconds since the rank last made progress."""
    process: ProcessState | None = None
    stacks: list[ThreadStack] = []
    stack_error: str = ""
    is_lock_free: bool | None = None
    """Whether the interpreter answered within a second, so that its lock is free; None if it could not be asked."""
    flight: Flight | None = None
    flight_error: str = ""
    statistics: dict[str, float] = {}
    """The last figures that the rank reported: step, loss, gradient_norm, seconds, learning_rate."""


class LastCalls(msgspec.Struct, frozen=True, tag="last_calls", kw_only=True):
    """The Flight Recorder's content, left by a rank that is about to end. The sidecar turns it into an Exam and sends that."""

    dump: bytes
    """The recorder's own JSON of its newest calls."""
    is_orderly: bool = False
    """Whether the rank ends in the ordinary way; then this is only the last of its regular copies."""


class Overdue(msgspec.Struct, frozen=True, tag="overdue", kw_only=True):
    """A rank has not moved for longer than usual.

    Its sidecar sends this when a tier begins, and again when the rank moves on.
    """

    tier: Literal["suspect", "overdue", "moved"]
    phase: Phase
    micro_step: int
    waited_s: float
    deadline_s: float
    """Seconds of standstill after which this tier begins in this phase."""
    because: str
    """How the deadline was derived, for people: `longest of 43 in forward was 0.06 s`."""
    num_steps: int | None = None
    """Optimizer steps that the sidecar has seen; None if not known."""
    has_evaluated: bool = False
    """Whether a whole evaluation was seen, so that its usual duration is known."""


class StepCalls(msgspec.Struct, frozen=True, array_like=True):
    """When one rank entered the collectives of one step."""

    step: int
    data_s: float
    """Seconds that the rank spent in its data loader in this step."""
    calls: list[tuple[str, int, int]]
    """(group, sequence, microseconds since the record's `base_ns`) of selected collectives; the selection is the same
    on all ranks."""
    lasts: dict[str, int] = {}
    """Last sequence number that was entered in this step, for each group in `calls`."""


class CallBlock(msgspec.Struct, frozen=True, array_like=True):
    """Digest of a run of collectives of one group: ranks that made the same calls have the same digest."""

    group: str
    block: int
    """Number of the block; it starts at sequence number block * flight.BLOCK_CALLS."""
    digest: int


class Traffic(msgspec.Struct, frozen=True, tag="traffic", kw_only=True):
    """What is new in a rank's Flight Recorder since the last report, small enough to be sent every few seconds."""

    base_ns: int
    steps: list[StepCalls]
    blocks: list[CallBlock] = []
    clock_offset_ns: int = 0
    """Nanoseconds to add to the host's clock to get the coordinator's."""
    clock_error_ns: int = 0
    """Uncertainty of the offset, plus or minus, in nanoseconds."""
    pressure: float = 0.0
    """Share of the last ten seconds (0 to 1) in which some task of this host waited for a processor."""


class Device(msgspec.Struct, frozen=True, tag="device", kw_only=True):
    """Readings of an accelerator, sent when one of them changed. A reading that its driver does not offer is None."""

    uuid: str
    throttled_by: list[str]
    """Reasons for a reduced clock: `thermal`, `power`, `hardware`; empty if the clock is not reduced."""
    clock_mhz: float | None = None
    clock_limit_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    memory_used_bytes: int | None = None
    """Memory used by all processes on the device."""
    memory_total_bytes: int | None = None
    name: str = ""
    """Name of the model."""
    index: int | None = None
    """Number that the driver gives to the device on its host."""
    address: str = ""
    """Address on the bus, as the kernel writes it: `0000:3b:00.0`."""
    parent: str = ""
    """For a part of a device (MIG): the UUID of the whole device, whose temperature and errors are given here."""
    is_assumed: bool = False
    """Whether the device is a guess from the local rank, because the rank did not say which one it uses."""
    states: list[str] = []
    """What is wrong with the device now: `lost`, `reset_required`, `row_remap_pending`, `row_remap_failed`,
    `page_retirement_pending`."""
    counters: dict[str, int] = {}
    """Errors counted by the driver, since it was loaded or over the device's life: `ecc_uncorrected`,
    `pcie_replays`."""
    grown: dict[str, int] = {}
    """Growth of each counter since this run's sidecar first read it; counters that have not grown are left out."""
    recent: dict[str, int] = {}
    """Growth of each counter within the last ten minutes."""
    throttled_s: dict[str, float] = {}
    """Seconds for which each reason in `throttled_by` has held without a break."""
    age_s: float = 0.0
    """Seconds between the reading and its sending; for the last reading before the rank ended."""


class DeviceEvent(msgspec.Struct, frozen=True, tag="device_event", kw_only=True):
    """A fault reported by a device's driver or by the kernel of its host."""

    uuid: str
    """UUID of the device; empty if the fault is the host's own."""
    kind: Literal["xid", "memory", "machine"]
    """`xid`: an Xid of NVIDIA's driver. `memory`: uncorrectable memory error of the host or of another maker's device.
    `machine`: a machine check."""
    source: Literal["driver", "kernel"]
    xid: int = 0
    text: str = ""
    """The kernel's own log line."""
    is_assumed: bool = False
    """Whether the device is a guess from the local rank, as in `Device`."""


Watched = Overdue | Exam | Traffic | LastCalls
"""What a sidecar reports about its rank's progress and collectives."""


class SightLost(msgspec.Struct, frozen=True, tag="sight_lost", kw_only=True):
    """Something that holter cannot observe at present. It must never be read as health."""

    what: str
    dropped: int


class Unavailable(msgspec.Struct, frozen=True, tag="unavailable", kw_only=True):
    """A requested table is not available; the coordinator writes this into its own journal."""

    tensor_class: str


class Judged(msgspec.Struct, frozen=True, tag="judged", kw_only=True):
    """The coordinator judged everything it had received.

    Kept in its own journal, so that a replay judges at the same moments.
    """

    is_final: bool = False
    is_news: bool = True
    """Whether incidents were opened or better explained. A restarted coordinator judges again at these moments only."""
    closed: tuple[str, ...] = ()
    """Incidents that were over by then; what is found later is a new incident, for a restarted coordinator too."""


class Unexamined(msgspec.Struct, frozen=True, tag="unexamined", kw_only=True):
    """A rank was to be examined, but its sidecar did not answer."""

    asked_ns: int


class Seated(msgspec.Struct, frozen=True, tag="seated", kw_only=True):
    """A sidecar has taken the place of this rank; journalled so that a restarted coordinator keeps the place for it."""

    digest: bytes
    """Digest of the sidecar's key."""


class Link(msgspec.Struct, frozen=True, tag="link", kw_only=True):
    """The connection to a rank's sidecar changed its state."""

    state: Literal["connected", "closed", "silent"]
    """`closed`: the other side closed it because its process ended. `silent`: nothing arrives any more, but nobody
    closed it."""


Rare = (
    Vitals
    | Inspection
    | Feed
    | Skipped
    | StageTimes
    | Swapped
    | Modes
    | Hoard
    | Overlap
    | Labels
    | Loaded
    | Rollout
    | Routing
    | GradientScales
    | ScriptWarning
    | Device
    | DeviceEvent
)
"""Records that a window keeps as they are, up to a limit for each kind."""


class Consumed(msgspec.Struct, frozen=True, tag="consumed", kw_only=True):
    """Position up to which the coordinator has read the broker's stream; journalled so that its successor continues there."""

    sequence: int


Own = Unavailable | Judged | Unexamined | Link | HaltAsked | HaltAnswered | Ordered | Seated | Consumed
"""What the coordinator records about itself."""
Body = (
    Attached
    | FirstStep
    | Census
    | StepDone
    | StepsDone
    | Table
    | PackedTable
    | Logged
    | Origin
    | Farewell
    | Exited
    | OnDevice
    | Preparing
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
    """One record of what a rank, or the sidecar that watches it, measured."""

    rank: int
    step: int
    at_ns: int
    """When it was observed, by the wall clock of the observing host, in nanoseconds since the epoch."""
    body: Body
