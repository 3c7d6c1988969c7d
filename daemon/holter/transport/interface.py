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
"""Called by a sidecar's carrier with every message of the coordinator; a returned message is sent back (a Fetched for a
Fetch)."""


class Carrier(Protocol):
    """Carries a speech over one transport. It reconnects by itself and never raises."""

    is_connected: bool
    heard_s: float
    """When the coordinator last gave a sign of life, by the clock for durations; 0: never."""
    refusal: str
    """Why the coordinator last refused this connection; empty if it did not."""
    reconnects: int
    garbage: int
    """Number of the coordinator's messages that could not be read."""
    clock: ClockOffset
    """The estimated offset of the coordinator's clock."""

    def start(self) -> None:
        """Begin to connect in the background, in a running event loop; from now on the speech reports its news here."""

    async def stop(self) -> None:
        """Give up at once without a goodbye, because another carrier continues with the speech."""

    async def close(self, deadline_s: float) -> bool:
        """Send what is left and a Goodbye, then answer until the coordinator hangs up; False if that was not done in time."""


CarrierMaker = Callable[[str, str, Speech, OnMessage, UplinkSettings], Carrier]
"""Called with (address, token, speech, on_message, settings)."""


class Receiver(Protocol):
    """What a Listener passes its sidecars' messages to: the coordinator's intake."""

    @property
    def run_id(self) -> str:
        """Name of the run, for those who connect."""

    @property
    def run_dir(self) -> Path:
        """Directory of the run, for those who connect."""

    def refusal(self, hello: Hello) -> str | None:
        """Return why this sidecar is refused; None if it is not."""

    def connect(self, hello: Hello, now_ns: int) -> int:
        """Note that a sidecar is connected; return the number of its connection."""

    def disconnect(self, rank: int, connection: int, now_ns: int, *, is_closed: bool) -> None:
        """Note that a connection ended; `is_closed`: by the other side, otherwise it was given up."""

    def hear(self, rank: int, report: Report, now_ns: int) -> bool:
        """Take in a report; return whether something in it is urgent."""

    def hear_host(self, ranks: Collection[int], report: HostReport, now_ns: int) -> bool:
        """Take in a report of the agent that speaks for these ranks; return whether something in it is urgent."""

    def has_room(self, rank: int, num_bytes: int, now_ns: int) -> bool:
        """Whether a message of this size from a sidecar may be taken in."""

    def hear_sign(self, rank: int, now_ns: int) -> None:
        """Note that a sidecar sent something else."""

    def hear_table(self, key: "TableKey", answer: Observation | None, now_ns: int) -> None:
        """Take in the answer to a Fetch; None: the table is not available."""

    def goodbye(self, rank: int) -> None:
        """Note that a sidecar has sent everything."""

    @property
    def taken(self) -> int | None:
        """Position up to which the network's stream was read before this coordinator began; None if it starts anew."""

    def took(self, sequence: int, num_lost: int = 0) -> None:
        """Note the position up to which the stream was read, and how many messages were lost before they could be."""

    async def begin_at(self, sequence: int) -> None:
        """Note that this coordinator starts anew at this position; return once a successor would know it."""

    def caught_up(self) -> None:
        """Note that everything that was sent before this coordinator began has been read."""


class Listener(Protocol):
    """The coordinator's end: one connection per rank, protected by the token; a rank's newest connection wins."""

    refused: int
    """Number of connections that were refused."""

    def mount(self, app: "web.Application") -> None:
        """Listen once the coordinator's web server starts: on a route of it, or elsewhere, started in `app.on_startup`."""

    async def fetch(self, keys: Sequence["TableKey"], deadline_s: float) -> None:
        """Ask for tables and pass the answers to the Receiver; no answer in time counts as not available."""

    async def examine(self, keys: Sequence["ExamKey"]) -> None:
        """Ask for examinations; the answers come later, as observations."""

    async def order(self, order: Order, ranks: Sequence[int]) -> None:
        """Give an order to these ranks' sidecars; if one does not arrive, whoever gave it repeats it."""

    async def notify(self, rank: int, notice: Notice) -> bool:
        """Send a notice to one rank's sidecar; False if that was not possible."""

    async def hang_up(self) -> None:
        """Close every connection, because the coordinator ends."""


class Right(Protocol):
    """The right to give orders, where several coordinators of one run may want to."""

    token: int
    """Number that grows with every holder; orders carry it."""

    def standing(self) -> Literal["valid", "suspended", "lost"]:
        """Return `valid`: orders may be given now; `suspended`: nobody knows; `lost`: another coordinator gives them."""

    def sign(self, card: bytes = b"") -> None:
        """Confirm that the coordinator still judges; `card` is what is shown of its run."""


ListenerMaker = Callable[[Receiver, str, Callable[[], None], Callable[[int], Awaitable[None]]], Listener]
"""Called with (receiver, token, on_urgent, hold). `on_urgent` is called when something urgent arrived; `hold(rank)`
returns when the rank's sidecar, which has said Goodbye, may be released."""


def refusal(hello: Opening, receiver: Receiver) -> str | None:
    """Return why a sidecar or an agent is refused for its opening message, whatever the transport; None if it is not."""
    if hello.protocol != PROTOCOL:
        return f"protocol {PROTOCOL} is spoken here, {hello.protocol} there"
    # A job that was only told the coordinator's address does not know the run's name; the token says that it belongs.
    if hello.run_id not in ("", receiver.run_id):
        return f"this is run {receiver.run_id}, not {hello.run_id}"
    return receiver.refusal(hello) if isinstance(hello, Hello) else None
