"""The two ends of a transport, and what each side of holter hands in.

    sidecar  --send, beat-->  RankUplink, Carrier  ~~ any network ~~  Listener  --connect, hear, goodbye-->  Receiver (the coordinator's intake)
             <--on_message--                                                <--fetch, examine, order, notify--  coordinator

Both ends speak the messages of `wire`. A Listener may hear a record twice and hand it on twice: the Receiver bears that.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from holter.records import Observation, Order
from holter.transport.clock_offset import ClockOffset
from holter.transport.limits import UplinkSettings
from holter.transport.speech import Speech
from holter.transport.wire import PROTOCOL, Downward, Hello, HostReport, Notice, Opening, Report, Upward

if TYPE_CHECKING:
    from aiohttp import web

    # A sidecar starts without the detectors.
    from holter.faults import ExamKey, TableKey

OnMessage = Callable[[Downward], Upward | None]
"""Of a sidecar: gets every message of the coordinator; what it returns, if anything, is sent back (a Fetched for a Fetch)."""


class Carrier(Protocol):
    """Carries a speech over one transport. It reconnects by itself, and nothing is ever raised."""

    is_connected: bool
    heard_s: float
    """When the coordinator last gave a sign of life, on the clock of durations; 0: never."""
    refusal: str
    """Why we were last turned away; empty: we were not."""
    reconnects: int
    garbage: int
    """Messages of the coordinator that could not be read."""
    clock: ClockOffset
    """How far this host's clock is from the coordinator's."""

    def start(self) -> None:
        """Begin to connect, in the background, in a running event loop; from now on the speech tells us its news."""

    async def stop(self) -> None:
        """Give up at once, without a word: another carrier goes on with the speech."""

    async def close(self, deadline_s: float) -> bool:
        """Say what is left, then Goodbye, and answer until the coordinator hangs up; False when that could not be done in time."""


CarrierMaker = Callable[[str, str, Speech, OnMessage, UplinkSettings], Carrier]
"""(address, token, speech, on_message, settings)"""


class Receiver(Protocol):
    """What a Listener hands its sidecars' words to: the coordinator's intake."""

    @property
    def run_id(self) -> str:
        """Name of the run, for whoever connects."""

    @property
    def run_dir(self) -> Path:
        """Directory of the run, likewise."""

    def refusal(self, hello: Hello) -> str | None:
        """Why this sidecar cannot be taken in, if it cannot."""

    def connect(self, hello: Hello, now_ns: int) -> int:
        """A sidecar is connected; returns the number of its connection."""

    def disconnect(self, rank: int, connection: int, now_ns: int, *, is_closed: bool) -> None:
        """A connection ended, closed by the other side or given up."""

    def hear(self, rank: int, report: Report, now_ns: int) -> bool:
        """A report arrived; True: something in it is urgent."""

    def hear_host(self, ranks: Collection[int], report: HostReport, now_ns: int) -> bool:
        """A report of a host's agent arrived, which speaks for these ranks; True: something in it is urgent."""

    def has_room(self, rank: int, num_bytes: int, now_ns: int) -> bool:
        """Whether what a sidecar sent is to be taken in, by its size."""

    def hear_sign(self, rank: int, now_ns: int) -> None:
        """A sidecar sent something else."""

    def hear_table(self, key: "TableKey", answer: Observation | None, now_ns: int) -> None:
        """The answer to a Fetch; None: the table is not available."""

    def goodbye(self, rank: int) -> None:
        """A sidecar has said everything."""

    @property
    def taken(self) -> int | None:
        """How much of what the network itself keeps was heard before this coordinator began; None: it begins anew."""

    def took(self, sequence: int, num_lost: int = 0) -> None:
        """So much of it has been heard by now; so many messages were gone before they could be."""

    async def begin_at(self, sequence: int) -> None:
        """This coordinator begins anew, behind so much of it; returns when a successor would know."""

    def caught_up(self) -> None:
        """All that was said before this coordinator began has been heard."""


class Listener(Protocol):
    """The coordinator's end: one connection a rank, with the token, the newest wins."""

    refused: int
    """Connections that were turned away."""

    def mount(self, app: "web.Application") -> None:
        """Listen once the coordinator's web server starts: on a route of it, or elsewhere, started in `app.on_startup`."""

    async def fetch(self, keys: Sequence["TableKey"], deadline_s: float) -> None:
        """Ask for tables and hand the answers to the Receiver; whoever does not answer in time does not have it."""

    async def examine(self, keys: Sequence["ExamKey"]) -> None:
        """Ask for examinations; the answers come as observations, whenever they come."""

    async def order(self, order: Order, ranks: Sequence[int]) -> None:
        """Tell these ranks' sidecars; an order that does not arrive is repeated by whoever gave it."""

    async def notify(self, rank: int, notice: Notice) -> bool:
        """Tell one rank's sidecar; False when it could not be told."""

    async def hang_up(self) -> None:
        """Close every connection: the coordinator ends."""


class Right(Protocol):
    """To give orders, where several coordinators of one run may want to."""

    token: int
    """Grows with every holder; orders carry it."""

    def standing(self) -> Literal["valid", "suspended", "lost"]:
        """`valid`: orders may be given now. `suspended`: nobody knows. `lost`: another coordinator gives them."""

    def sign(self, card: bytes = b"") -> None:
        """The coordinator judges; this is shown of its run."""


ListenerMaker = Callable[[Receiver, str, Callable[[], None], Callable[[int], Awaitable[None]]], Listener]
"""(receiver, token, on_urgent, hold): `on_urgent` is called when something urgent was heard; `hold(rank)` ends when that rank's sidecar, which said
Goodbye, may be let go."""


def refusal(hello: Opening, receiver: Receiver) -> str | None:
    """Why a sidecar or an agent that speaks this way is turned away, whatever the transport."""
    if hello.protocol != PROTOCOL:
        return f"protocol {PROTOCOL} is spoken here, {hello.protocol} there"
    # A job that was only told the coordinator's address does not know the run's name; the token says that it belongs.
    if hello.run_id not in ("", receiver.run_id):
        return f"this is run {receiver.run_id}, not {hello.run_id}"
    return receiver.refusal(hello) if isinstance(hello, Hello) else None
