"""Messages between sidecars and the coordinator, as msgpack, one per frame; a host's agent in between speaks to both.

    sidecar -> coordinator or agent   Hello, Report, Fetched, ClockAsked, Goodbye
    coordinator or agent -> sidecar   Welcome, Fetch, Examine, ClockTold, Notice, Halt; an agent also Relayed
    agent -> coordinator              AgentHello, HostReport, ClockAsked, Goodbye
    coordinator -> agent              Welcome, ToRanks, Released, ClockTold

The tag of a message is its name in lower case; unknown fields are ignored, so that a newer side can talk to an older one.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from holter.files import encoded
from holter.records import ExamDepth, Observation, Order, Phase, Severity

PROTOCOL = 1

MAX_FRAME_BYTES = 8 * 2**20
"""Largest frame in bytes that either side takes."""
MAX_NAME = 1024
"""Largest number of characters of a host, an address or a key, because these are shown everywhere and kept for every
rank."""
MAX_WORLD_SIZE = 2**20
REFUSED = 4000
"""Code (a WebSocket's close code) for ending the connection of a sidecar that is refused; the reason is sent along."""
REPLACED = 4001
"""Code for ending a connection whose rank has opened a newer one."""


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
    """`host:port` of the sidecar's own /metrics, with `https://` in front if it serves with TLS; empty if it has
    none."""
    key: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """A secret of this sidecar's process: while it is connected, nobody else can speak for its rank."""
    boot_id: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """Id of the host's clock; if it equals the coordinator's, both read the same clock."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
    """Where the rank's main thread was last seen."""

    step: int
    phase: Phase
    micro_step: int
    at_ns: int


class Report(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """What happened since the last report; sent a few times a second at most unless urgent."""

    heartbeat: Heartbeat | None
    observations: list[Observation]
    dropped: int
    """Number of observations lost so far between rank and coordinator, for any reason."""


class Fetched(msgspec.Struct, frozen=True, kw_only=True, tag="fetched"):
    """The answer to a Fetch; without an observation the table is no longer available."""

    request: int
    observation: Observation | None


class ClockAsked(msgspec.Struct, frozen=True, kw_only=True, tag="clockasked"):
    """Asks for the time on the coordinator's clock."""

    sent_ns: int
    """When it was sent, by the sidecar's clock."""


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag="goodbye"):
    """The rank has ended and everything was sent."""


class AgentHello(msgspec.Struct, frozen=True, kw_only=True, tag="agenthello"):
    """The first message of a host agent's connection; its sidecars' own Hellos follow in reports."""

    protocol: int = PROTOCOL
    run_id: Annotated[str, Meta(max_length=MAX_NAME)]
    host: Annotated[str, Meta(max_length=MAX_NAME)]
    agent_pid: int
    boot_id: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    members: list[Hello] = []
    """The sidecars that speak through it, for a coordinator that reads what was sent before it began."""


class HostReport(msgspec.Struct, frozen=True, kw_only=True, tag="hostreport"):
    """What happened on a host since the last report. Its parts take effect in this order."""

    joined: list[Hello] = []
    """Sidecars that came, or all of them at the start of a connection."""
    heartbeats: list[tuple[int, Heartbeat]] = []
    """Heartbeats by rank, of those that moved."""
    observations: list[Observation] = []
    """Observations of any rank of the host; `StepsDone` holds those of several."""
    fetched: list[Fetched] = []
    """Tables that were requested."""
    dropped: list[tuple[int, int]] = []
    """(rank, observations lost so far), for ranks where it changed."""
    quiet: list[int] = []
    """Ranks whose sidecars are connected but silent: this report is no sign of life of theirs."""
    goodbyes: list[int] = []
    """Ranks that have ended and sent everything."""
    left: list[tuple[int, bool]] = []
    """(rank, whether the sidecar's side closed the connection) of those that left."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The coordinator's answer to Hello."""

    run_id: str
    run_dir: str
    boot_id: str = ""
    """Id of the coordinator's clock; a coordinator that sends none does not know the question for the clock."""


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Asks for the table of this class at this step."""

    request: int
    tensor_class: str
    step: int


class Examine(msgspec.Struct, frozen=True, kw_only=True, tag="examine"):
    """Asks for an examination of the rank from outside, reported as an Exam with this `asked_ns`, as far as possible."""

    asked_ns: int
    depth: ExamDepth


class ClockTold(msgspec.Struct, frozen=True, kw_only=True, tag="clocktold"):
    """The answer to ClockAsked."""

    sent_ns: int
    """`sent_ns` of the question."""
    received_ns: int
    """When the question arrived, by the coordinator's clock."""
    replied_ns: int
    error_ns: int = 0
    """How far off the times may be, in nanoseconds: an agent answers from its own estimate of the coordinator's
    clock."""


class Notice(msgspec.Struct, frozen=True, kw_only=True, tag="notice"):
    """A sentence for the person at the job's terminal and for its log."""

    severity: Severity
    text: str
    kind: Literal["incident", "message", "verdict", "closing"] = "incident"
    """`verdict`: what a launcher shall show for a failing rank; `closing`: the last line of the run."""


class Halt(msgspec.Struct, frozen=True, kw_only=True, tag="halt"):
    """An order for the rank; its answers come as observations (`Halting`)."""

    order: Order


Passed = Fetch | Examine | Notice | Halt
"""What the coordinator sends to single ranks."""


class ToRanks(msgspec.Struct, frozen=True, kw_only=True, tag="toranks"):
    """Asks an agent to pass this message on to the sidecars of these ranks."""

    ranks: list[int]
    message: Passed


class Released(msgspec.Struct, frozen=True, kw_only=True, tag="released"):
    """Asks an agent to end the connection of this rank's sidecar, which is refused or has said Goodbye."""

    rank: int
    code: int
    """Code with which its connection is closed."""
    reason: str


class Relayed(msgspec.Struct, frozen=True, kw_only=True, tag="relayed"):
    """An agent tells a sidecar whether it is connected to the coordinator.

    Sent now and then, and when that changes. `ago_s`: seconds since the coordinator was heard.
    """

    is_connected: bool
    ago_s: float
    passed: int = 0
    """Number of records of this sidecar's connection that have left the host; if the agent dies, later ones are sent
    again."""


Upward = Hello | AgentHello | Report | HostReport | Fetched | ClockAsked | Goodbye
Downward = Welcome | Fetch | Examine | ClockTold | Notice | Halt | ToRanks | Released | Relayed
Opening = Hello | AgentHello
"""The possible first messages of a connection."""

_ENCODER = msgspec.msgpack.Encoder()
_UPWARD: msgspec.msgpack.Decoder[Upward] = msgspec.msgpack.Decoder(Upward)
_DOWNWARD: msgspec.msgpack.Decoder[Downward] = msgspec.msgpack.Decoder(Downward)


def encode(message: Upward | Downward) -> bytes:
    """Encode a message as one frame."""
    return encoded(message, _ENCODER.encode)


def decode_upward(frame: bytes) -> Upward:
    """Decode a sidecar's message; raises msgspec.DecodeError or ValidationError on anything else."""
    return _UPWARD.decode(frame)


def decode_downward(frame: bytes) -> Downward:
    """Decode a coordinator's message; raises msgspec.DecodeError or ValidationError on anything else."""
    return _DOWNWARD.decode(frame)
