"""Observations: what a sidecar sees of its rank from outside, what the coordinator notes of itself, and the record that carries all of it.

From outside: progress, process, collectives, device, its end. What a rank says of itself is in `rank`, its part of a halt in `halting`.
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
"""`quick`: the process, the recorder, Python stacks. `native`: stacks through native code as well, a second more."""


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
    """Between two hooks: the script's own code."""


LEFT = "destroy_process_group()"
"""Of a rank that has left its process group in order, and still runs."""


class Farewell(msgspec.Struct, frozen=True, tag="farewell", kw_only=True):
    """What a rank says when its interpreter ends and knows why."""

    kind: Literal["end", "exception", "interrupt", "exit"]
    """`exit`: by `os._exit`, past everything that Python does at an end."""
    text: str
    """Exception type and message; `os._exit(3)`; `sys.exit(3)`; empty for an ordinary end; LEFT, before any of them."""
    where: str
    """File, line and function of the innermost frame, whoever's code it is."""
    own: list[str] = []
    """Frames of the script's own code, the innermost first: `/home/me/train.py:41 in main: loss = criterion(x, y)`."""


class Exited(msgspec.Struct, frozen=True, tag="exited", kw_only=True):
    """A rank's process ended, as its sidecar saw it."""

    pid: int
    exit_code: int | None
    """None where the parent reaped it before anyone could look."""
    signal: int | None
    out_of_memory: bool
    last_step: int
    last_phase: Phase
    farewell: Farewell | None


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One collective, or one message between two ranks, as PyTorch's Flight Recorder has it."""

    group: str
    """Name of the process group: the same on all its ranks."""
    sequence: int
    """Counts the collectives of a group, or its messages if `is_p2p`: matching calls of two ranks have the same number."""
    operation: str
    """`all_reduce`, `barrier`, `send`: without the backend's name."""
    sizes: tuple[tuple[int, ...], ...]
    """Sizes of the inputs."""
    dtypes: tuple[str, ...]
    created_ns: int
    """Wall clock of the rank's host when the rank entered it."""
    is_retired: bool
    """The recorder has let go of it: it is over."""
    state: Literal["scheduled", "started", "completed"] = "scheduled"
    """Stays `scheduled` on gloo."""
    is_p2p: bool = False
    started_ns: int = 0
    """0: unknown, as on gloo."""
    completed_ns: int = 0
    output_sizes: tuple[tuple[int, ...], ...] = ()
    output_dtypes: tuple[str, ...] = ()
    record: int = 0
    """Counts all calls of the rank."""
    lines: tuple[str, ...] = ()
    """The script's own lines that made it, innermost first: `/home/me/train.py:41 in main`; empty: not asked for."""


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's Flight Recorder."""

    groups: list[Group]
    calls: list[Call]
    """Oldest first; the newest of them where they are too many."""
    taken_ns: int
    """When it was copied."""


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's process, as the kernel shows it."""

    state: Literal["running", "sleeping", "uninterruptible", "stopped", "traced", "frozen", "zombie", "gone", "unknown"]
    """Of the main thread."""
    cpu_s: float
    """Processor time of all threads since the start."""
    cpu_share: float
    """Of one core, over the last second or so; NaN: not known."""
    wait_channel: str = ""
    """Where in the kernel the main thread sleeps."""
    stopped_s: float = 0.0
    """For how long it has been stopped, traced, frozen or uninterruptible without a break."""
    pressure: dict[str, float] = {}
    """Of the host: share of the last ten seconds in which some task waited for `cpu`, `memory` or `io`, 0 to 1."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One line of a stack."""

    function: str
    file: str
    line: int
    is_native: bool = False


class ThreadStack(msgspec.Struct, frozen=True, array_like=True):
    """One thread of a rank."""

    name: str
    is_main: bool
    owns_lock: bool
    """The interpreter lock."""
    is_active: bool
    """On a processor, not waiting."""
    frames: list[Frame]
    """Innermost first."""
    work: str = ""
    """Of a pipeline's stage: `forward pass of micro-batch 2`."""


class Exam(msgspec.Struct, frozen=True, tag="exam", kw_only=True):
    """A sidecar's examination of its rank from outside, on request or because the rank is dying."""

    reason: Literal["asked", "death", "last_breath"]
    asked_ns: int = 0
    """What the request said; 0: nobody asked."""
    depth: ExamDepth = "quick"
    phase: Phase = Phase.OTHER
    micro_step: int = 0
    waited_s: float = 0.0
    """Since the rank last moved on."""
    process: ProcessState | None = None
    stacks: list[ThreadStack] = []
    stack_error: str = ""
    is_lock_free: bool | None = None
    """Whether the interpreter answered a question within a second; None if it could not be asked."""
    flight: Flight | None = None
    flight_error: str = ""
    statistics: dict[str, float] = {}
    """The rank's last report of itself: step, loss, gradient_norm, seconds, learning_rate."""


class LastCalls(msgspec.Struct, frozen=True, tag="last_calls", kw_only=True):
    """The recorder's content that a rank leaves when it knows that it is about to end; the sidecar makes an Exam of it and sends that."""

    dump: bytes
    """The recorder's own JSON, of its newest calls."""
    is_orderly: bool = False
    """An ordinary end: it is the last copy, one like those before it."""


class Overdue(msgspec.Struct, frozen=True, tag="overdue", kw_only=True):
    """A rank has not moved for longer than usual; its sidecar sends this when a tier begins, and when the rank moves again."""

    tier: Literal["suspect", "overdue", "moved"]
    phase: Phase
    micro_step: int
    waited_s: float
    deadline_s: float
    """After which this tier begins, in this phase."""
    because: str
    """Where the deadline comes from: `longest of 43 in forward was 0.06 s`."""
    num_steps: int | None = None
    """Optimizer steps that its sidecar has seen; None if not known."""
    has_evaluated: bool = False
    """A whole evaluation was seen, so it is known how long one takes."""


class StepCalls(msgspec.Struct, frozen=True, array_like=True):
    """When one rank entered the collectives of one step."""

    step: int
    data_s: float
    """What the rank spent in its data loader in this step."""
    calls: list[tuple[str, int, int]]
    """(group, sequence, microseconds since the record's `base_ns`); a choice, the same on all ranks."""
    lasts: dict[str, int] = {}
    """Group -> the last number that was entered in this step; of the groups of `calls`."""


class CallBlock(msgspec.Struct, frozen=True, array_like=True):
    """A run of collectives of one group, as one number: ranks whose calls agree have the same."""

    group: str
    block: int
    """Sequence numbers from block * flight.BLOCK_CALLS on."""
    digest: int


class Traffic(msgspec.Struct, frozen=True, tag="traffic", kw_only=True):
    """What is new in a rank's recorder, small enough to be sent every few seconds."""

    base_ns: int
    steps: list[StepCalls]
    blocks: list[CallBlock] = []
    clock_offset_ns: int = 0
    """Add this to the host's clock to get the coordinator's."""
    clock_error_ns: int = 0
    """The offset is known to plus or minus this."""
    pressure: float = 0.0
    """Share of the last ten seconds in which some task of this host waited for a processor, 0 to 1."""


class Device(msgspec.Struct, frozen=True, tag="device", kw_only=True):
    """An accelerator's readings; sent when something about them changed. What is None was not told by its driver."""

    uuid: str
    throttled_by: list[str]
    """`thermal`, `power`, `hardware`; empty if the clock is not held down."""
    clock_mhz: float | None = None
    clock_limit_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    memory_used_bytes: int | None = None
    """By every process that uses it."""
    memory_total_bytes: int | None = None
    name: str = ""
    """Of the model."""
    index: int | None = None
    """As its driver counts the devices of the host."""
    address: str = ""
    """On the bus, as the kernel writes it: `0000:3b:00.0`."""
    parent: str = ""
    """Of a part of a device (MIG): the UUID of the whole one, whose heat and errors these are."""
    is_assumed: bool = False
    """The rank did not say which device it uses: this is the one that its local rank would have."""
    states: list[str] = []
    """What is wrong with it now: `lost`, `reset_required`, `row_remap_pending`, `row_remap_failed`, `page_retirement_pending`."""
    counters: dict[str, int] = {}
    """Errors as its driver counts them, since it was loaded or in the device's life: `ecc_uncorrected`, `pcie_replays`."""
    grown: dict[str, int] = {}
    """By how much they have grown since this run's sidecar first read them; without what has not."""
    recent: dict[str, int] = {}
    """The same within the last ten minutes."""
    throttled_s: dict[str, float] = {}
    """For how long each reason of `throttled_by` has held without a break."""
    age_s: float = 0.0
    """How old the reading was when it was sent: the last one before the rank ended."""


class DeviceEvent(msgspec.Struct, frozen=True, tag="device_event", kw_only=True):
    """A device's driver, or the kernel of its host, reported a fault."""

    uuid: str
    """Empty: it is the host's own."""
    kind: Literal["xid", "memory", "machine"]
    """An Xid of NVIDIA's driver; memory of the host, or of another maker's device, that cannot be corrected; a machine check."""
    source: Literal["driver", "kernel"]
    xid: int = 0
    text: str = ""
    """The kernel's own line."""
    is_assumed: bool = False
    """As of `Device`."""


Watched = Overdue | Exam | Traffic | LastCalls
"""What a sidecar reports of its rank's progress and collectives."""


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


class Seated(msgspec.Struct, frozen=True, tag="seated", kw_only=True):
    """A sidecar speaks for this rank; in the coordinator's own journal, so that one that is started again keeps its place for it."""

    digest: bytes
    """Of the sidecar's key."""


class Link(msgspec.Struct, frozen=True, tag="link", kw_only=True):
    """The line to a rank's sidecar changed its state."""

    state: Literal["connected", "closed", "silent"]
    """`closed`: by the other side, whose process ended. `silent`: nothing comes any more, and nobody closed it."""


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
"""Records that a window keeps unchanged, up to a limit of each kind."""


class Consumed(msgspec.Struct, frozen=True, tag="consumed", kw_only=True):
    """How far the coordinator has read what the network keeps; in its own journal, so that its successor goes on there."""

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
    """What one rank, or the sidecar that watches it, measured."""

    rank: int
    step: int
    at_ns: int
    """Wall clock of the host that observed, nanoseconds since the epoch."""
    body: Body
