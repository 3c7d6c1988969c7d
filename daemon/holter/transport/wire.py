"""Messages between a sidecar and the coordinator, as msgpack, one a frame; a host agent between them speaks to both.

    sidecar -> coordinator or agent   Hello, Report, Fetched, ClockAsked, Goodbye
    coordinator or agent -> sidecar   Welcome, Fetch, Examine, ClockTold, Notice, Halt; an agent also Relayed
    agent -> coordinator              AgentHello, HostReport, ClockAsked, Goodbye
    coordinator -> agent              Welcome, ToRanks, Released, ClockTold

The tag of a message is its name in lower case; unknown fields are ignored, so that a newer side can talk to an older one.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from holter.records import ExamDepth, Observation, Order, Phase, Severity

PROTOCOL = 1

MAX_FRAME_BYTES = 8 * 2**20
"""The largest frame either side takes."""
MAX_NAME = 1024
"""Characters of a host, an address, a key: what is shown everywhere and kept for every rank."""
MAX_WORLD_SIZE = 2**20
REFUSED = 4000
"""Code with which the coordinator ends the connection of a sidecar that it turns away, with the reason; a WebSocket's close code."""
REPLACED = 4001
"""Code for a connection whose rank has opened a newer one."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first message of a connection; the token travels in the HTTP header, not here."""

    protocol: int = PROTOCOL
    run_id: Annotated[str, Meta(max_length=MAX_NAME)]
    rank: int
    world_size: Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)]
    host: Annotated[str, Meta(max_length=MAX_NAME)]
    rank_pid: int
    sidecar_pid: int
    metrics_address: Annotated[str, Meta(max_length=MAX_NAME)]
    """`host:port` of the sidecar's own /metrics, behind `https://` if that is how it serves; empty if it has none."""
    key: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """A secret of this sidecar's process: while it is on the line, nobody else speaks for its rank."""
    boot_id: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """Equal where the coordinator's is: both read the same clock."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
    """Where the rank's main thread was last seen."""

    step: int
    phase: Phase
    micro_step: int
    at_ns: int


class Report(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """What happened since the last report; at most a few a second unless urgent."""

    heartbeat: Heartbeat | None
    observations: list[Observation]
    dropped: int
    """Observations lost so far between rank and coordinator, all causes."""


class Fetched(msgspec.Struct, frozen=True, kw_only=True, tag="fetched"):
    """The answer to a Fetch; no observation: the table is no longer available."""

    request: int
    observation: Observation | None


class ClockAsked(msgspec.Struct, frozen=True, kw_only=True, tag="clockasked"):
    """Asks what time it is on the coordinator's clock."""

    sent_ns: int
    """By the sidecar's clock."""


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag="goodbye"):
    """The rank has ended and everything was said."""


class AgentHello(msgspec.Struct, frozen=True, kw_only=True, tag="agenthello"):
    """The first message of a host agent's connection; its sidecars' own Hellos follow in reports."""

    protocol: int = PROTOCOL
    run_id: Annotated[str, Meta(max_length=MAX_NAME)]
    host: Annotated[str, Meta(max_length=MAX_NAME)]
    agent_pid: int
    boot_id: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    members: list[Hello] = []
    """Who speaks through it, for a coordinator that reads what was said before it began."""


class HostReport(msgspec.Struct, frozen=True, kw_only=True, tag="hostreport"):
    """What happened on a host since the last report. Its parts count in this order."""

    joined: list[Hello] = []
    """Sidecars that came, or all of them at the start of a connection."""
    heartbeats: list[tuple[int, Heartbeat]] = []
    """By rank, of those that moved."""
    observations: list[Observation] = []
    """Of any rank of the host; `StepsDone` speaks for several at once."""
    fetched: list[Fetched] = []
    """Tables that were asked for."""
    dropped: list[tuple[int, int]] = []
    """(rank, observations lost so far), of those where it changed."""
    quiet: list[int] = []
    """Ranks whose sidecars are connected and say nothing: this report is no sign of theirs."""
    goodbyes: list[int] = []
    """Ranks that have ended, and everything was said."""
    left: list[tuple[int, bool]] = []
    """(rank, was the line closed by the sidecar's side)"""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The coordinator's answer to Hello."""

    run_id: str
    run_dir: str
    boot_id: str = ""
    """Of the coordinator's clock; a coordinator that has none here does not know the question for the clock."""


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Send the table of this class at this step."""

    request: int
    tensor_class: str
    step: int


class Examine(msgspec.Struct, frozen=True, kw_only=True, tag="examine"):
    """Look at the rank from outside and report an Exam with this `asked_ns`, whatever can be had."""

    asked_ns: int
    depth: ExamDepth


class ClockTold(msgspec.Struct, frozen=True, kw_only=True, tag="clocktold"):
    """The answer to ClockAsked."""

    sent_ns: int
    """`sent_ns` of the question."""
    received_ns: int
    """By the coordinator's clock."""
    replied_ns: int
    error_ns: int = 0
    """How far off that may be: an agent answers from what it knows of the coordinator's clock."""


class Notice(msgspec.Struct, frozen=True, kw_only=True, tag="notice"):
    """A sentence for the person at the job's terminal and for its log."""

    severity: Severity
    text: str
    kind: Literal["incident", "message", "verdict", "closing"] = "incident"
    """`verdict`: what a launcher shall show of a rank that fails; `closing`: the last line of the run."""


class Halt(msgspec.Struct, frozen=True, kw_only=True, tag="halt"):
    """An order for the rank; its answers come as observations (`Halting`)."""

    order: Order


Passed = Fetch | Examine | Notice | Halt
"""What the coordinator tells single ranks."""


class ToRanks(msgspec.Struct, frozen=True, kw_only=True, tag="toranks"):
    """To an agent: pass this on to the sidecars of these ranks."""

    ranks: list[int]
    message: Passed


class Released(msgspec.Struct, frozen=True, kw_only=True, tag="released"):
    """To an agent: end the line of this rank's sidecar, which is turned away or has said Goodbye."""

    rank: int
    code: int
    """With which its connection is closed."""
    reason: str


class Relayed(msgspec.Struct, frozen=True, kw_only=True, tag="relayed"):
    """From an agent: whether it has a line to the coordinator, and how long ago that was heard. Sent now and then, and when it changes."""

    is_connected: bool
    ago_s: float
    passed: int = 0
    """Records of this sidecar's connection that have left the host: should the agent die, those after them are said again."""


Upward = Hello | AgentHello | Report | HostReport | Fetched | ClockAsked | Goodbye
Downward = Welcome | Fetch | Examine | ClockTold | Notice | Halt | ToRanks | Released | Relayed
Opening = Hello | AgentHello
"""How a connection may begin."""

_ENCODER = msgspec.msgpack.Encoder()
_UPWARD: msgspec.msgpack.Decoder[Upward] = msgspec.msgpack.Decoder(Upward)
_DOWNWARD: msgspec.msgpack.Decoder[Downward] = msgspec.msgpack.Decoder(Downward)


def encode(message: Upward | Downward) -> bytes:
    """One frame."""
    return _ENCODER.encode(message)


def decode_upward(frame: bytes) -> Upward:
    """What a sidecar said; raises msgspec.DecodeError or ValidationError on anything else."""
    return _UPWARD.decode(frame)


def decode_downward(frame: bytes) -> Downward:
    """What the coordinator said; raises msgspec.DecodeError or ValidationError on anything else."""
    return _DOWNWARD.decode(frame)
