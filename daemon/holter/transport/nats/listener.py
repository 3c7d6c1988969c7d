"""The coordinator's end: reads the run's stream from its position on, hears who is there, and tells sidecars what its token gives it the right to.

    stream ──▶ Tail ──▶ Greeting: connect, Welcome      alive ──▶ hear      clock ──▶ ClockTold
                    ──▶ Report, Goodbye: hear

NATS tells nobody that a client has gone. A rank that is quiet is asked: if its sidecar was connected to our own server and that says that nobody
listens there, its line was closed; otherwise it falls silent.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from holter import clock
from holter.files import UNREADABLE
from holter.records import Observation, Order
from holter.transport import wire
from holter.transport.access import is_same
from holter.transport.interface import Receiver, Right, refusal
from holter.transport.nats import frames
from holter.transport.nats.frames import Again, Beacon, Greeting, LetGo, Probe, Said, Told, TurnedAway
from holter.transport.nats.line import INBOX, NatsPlace, OpenLine, failures, line_to
from holter.transport.nats.subjects import ALL, Subjects
from holter.transport.nats.tail import Tail, make_stream
from holter.transport.tls import SCHEME

if TYPE_CHECKING:
    from aiohttp import web
    from nats.aio.msg import Msg

    from holter.faults import ExamKey, TableKey

BEACON_S = 1.0
QUIET_S = 2.0
"""A rank that has not been heard for so long is asked whether it is there."""
PROBE_S = 0.8
MAX_PROBES = 256
"""At once: of a whole network that is gone not everybody is asked."""
GONE_AFTER = 2
"""So often nobody listened."""
PAUSE_S = 0.3
MAX_EARLY = 1000
"""Messages of a rank that has not introduced itself."""
MAX_EARLY_IN_ALL = 50_000
LAST_WORD_S = 1.0

logger = logging.getLogger(__name__)


@dataclass
class Caller:
    """A rank's sidecar."""

    who: bytes
    connection: int
    server: str
    heard_s: float
    num_unheard: int = 0
    is_gone: bool = False


@dataclass
class Early:
    """What was said by ranks that have not introduced themselves to us."""

    messages: dict[int, list[tuple[Said, int]]] = field(default_factory=dict)
    num: int = 0
    num_lost: int = 0

    def keep(self, rank: int, said: Said, num_bytes: int) -> None:
        """Until it does."""
        kept = self.messages.setdefault(rank, [])
        if len(kept) >= MAX_EARLY or self.num >= MAX_EARLY_IN_ALL:
            self.num_lost += 1
            return
        kept.append((said, num_bytes))
        self.num += 1

    def take(self, rank: int) -> list[tuple[Said, int]]:
        """It has."""
        kept = self.messages.pop(rank, [])
        self.num -= len(kept)
        return kept


class NatsListener:
    """Who is there, and what was asked of whom."""

    def __init__(  # noqa: PLR0913 - a listener's four, and by what right it speaks
        self,
        receiver: Receiver,
        token: str,
        on_urgent: Callable[[], None],
        hold: Callable[[int], Awaitable[None]],
        *,
        place: NatsPlace,
        right: Right,
    ) -> None:
        self.refused = 0
        self.num_withheld = 0
        """Words that were not said because another coordinator may give the orders."""
        self._receiver, self._token, self._on_urgent, self._hold = receiver, token, on_urgent, hold
        self._place, self._right = place, right
        self._subjects = Subjects(receiver.run_id)
        self._tail = Tail(self._subjects, self._on_said)
        self._callers: dict[int, Caller] = {}
        self._early = Early()
        self._asked_s: dict[int, float] = {}
        self._line: OpenLine | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._has_begun = False

    def mount(self, app: "web.Application") -> None:
        """Connect once the coordinator's web server starts."""
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._stop)

    async def fetch(self, keys: Sequence["TableKey"], deadline_s: float) -> None:
        """Ask for tables and hand the answers to the receiver; whoever does not answer in time does not have it."""
        answers = await asyncio.gather(*(self._ask(key, deadline_s) for key in keys))
        for key, answer in zip(keys, answers, strict=True):
            self._receiver.hear_table(key, answer, clock.wall_ns())

    async def examine(self, keys: Sequence["ExamKey"]) -> None:
        """Ask for examinations; the answers come as observations, whenever they come."""
        for key in keys:
            await self._tell(str(key.rank), wire.Examine(asked_ns=key.asked_ns, depth=key.depth))

    async def order(self, order: Order, ranks: Sequence[int]) -> None:
        """Tell these ranks' sidecars; whoever cannot be told is told again by who repeats it."""
        for rank in ranks:
            await self._tell(str(rank), wire.Halt(order=order))

    async def notify(self, rank: int, notice: wire.Notice) -> bool:
        """Tell one rank's sidecar; False when it could not be told."""
        caller = self._callers.get(rank)
        return caller is not None and not caller.is_gone and await self._tell(str(rank), notice)

    async def hang_up(self) -> None:
        """Let everybody go: the coordinator ends."""
        await self._tell(ALL, LetGo())
        if self._line is not None:
            with contextlib.suppress(*failures()):
                await self._line.client.flush(timeout=LAST_WORD_S)  # type: ignore[arg-type]

    async def _start(self, _app: "web.Application") -> None:
        self._keep(self._run())

    async def _stop(self, _app: "web.Application") -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _keep(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        said = ""
        while True:
            why = "the line is lost"
            try:
                async with line_to(self._place, "coordinator") as line:
                    await self._serve(line)
            except failures() as error:
                why = f"{type(error).__name__}: {error}"
            except Exception as error:
                logger.exception("the listener failed in a way nobody thought of")
                why = f"{type(error).__name__}: {error}"
            finally:
                self._line = None
            if why != said:
                logger.warning("the line to NATS ended: %s; another one is opened", why)
            said = why
            await asyncio.sleep(PAUSE_S)

    async def _serve(self, line: OpenLine) -> None:
        await self._find_position(line)
        self._line = line
        await line.client.subscribe(self._subjects.alive("*"), cb=self._on_alive)
        await line.client.subscribe(self._subjects.clock, cb=self._on_clock)
        tasks = [
            asyncio.create_task(work) for work in (self._tail.run(line), self._shine(), self._probe(line), line.lost())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _find_position(self, line: OpenLine) -> None:
        """Where a former coordinator of this life stopped; a new life begins at the end."""
        last = await make_stream(line, self._subjects)
        if not self._has_begun:
            taken = self._receiver.taken
            if taken is not None and taken <= last:
                self._tail.position = taken
                await self._hear_hellos(line)
            else:
                self._tail.position = last
                self._receiver.took(last)
            self._has_begun = True
        elif self._tail.position > last:
            logger.warning("the stream %s was made anew: what was in it is lost", self._subjects.stream)
            self._tail.position = 0

    async def _hear_hellos(self, line: OpenLine) -> None:
        """The last one of each rank: of those that will not come again, too."""
        from nats.js import api  # noqa: PLC0415 - an extra

        sub = await line.client.subscribe(inbox := line.client.new_inbox())
        about = api.ConsumerConfig(
            deliver_subject=inbox,
            deliver_policy=api.DeliverPolicy.LAST_PER_SUBJECT,
            filter_subject=self._subjects.hello("*"),
            ack_policy=api.AckPolicy.NONE,
            mem_storage=True,
            num_replicas=1,
            inactive_threshold=10.0,
        )
        made = await line.js.add_consumer(self._subjects.stream, about)
        with contextlib.suppress(*failures()):
            for _ in range(made.num_pending or 0):
                message = await sub.next_msg(timeout=LAST_WORD_S)
                await self._on_said(message)
        await sub.unsubscribe()

    async def _shine(self) -> None:
        """Say who the coordinator is."""
        while True:
            await self._tell(ALL, Beacon())
            self._look_at_position()
            await asyncio.sleep(BEACON_S)

    def _look_at_position(self) -> None:
        self._receiver.took(self._tail.position, self._tail.num_lost + self._early.num_lost)
        if self._tail.has_caught_up:
            self._receiver.caught_up()

    async def _probe(self, line: OpenLine) -> None:
        while True:
            await asyncio.sleep(BEACON_S)
            now_s = clock.monotonic_s()
            quiet = [rank for rank, one in self._callers.items() if not one.is_gone and now_s - one.heard_s > QUIET_S]
            await asyncio.gather(*(self._probe_one(line, rank) for rank in quiet[:MAX_PROBES]))

    async def _probe_one(self, line: OpenLine, rank: int) -> None:
        from nats.errors import NoRespondersError  # noqa: PLC0415 - an extra

        caller = self._callers[rank]
        try:
            await line.client.request(self._subjects.told(str(rank)), self._frame(Probe()), timeout=PROBE_S)
        except NoRespondersError:
            ours = str(line.client._server_info.get("server_id", ""))  # noqa: SLF001 - nothing public tells it
            caller.num_unheard += caller.server == ours
        except failures():
            return
        else:
            self._hear_of(caller)
            self._receiver.hear_sign(rank, clock.wall_ns())
        if caller.num_unheard >= GONE_AFTER and not caller.is_gone:
            caller.is_gone = True
            self._receiver.disconnect(rank, caller.connection, clock.wall_ns(), is_closed=True)
            self._on_urgent()

    def _hear_of(self, caller: Caller) -> None:
        caller.heard_s, caller.num_unheard = clock.monotonic_s(), 0

    async def _on_said(self, message: "Msg") -> None:
        """From the stream."""
        rank = rank_of(message.subject)
        try:
            said = frames.decode_said(message.data)
        except UNREADABLE:
            said = None
        if rank is None or said is None:
            self.refused += 1
            return
        if isinstance(said.message, Greeting):
            await self._greet(rank, said.who, said.message)
        else:
            await self._take(rank, said, len(message.data))

    async def _greet(self, rank: int, who: bytes, greeting: Greeting) -> None:
        known, reason = self._callers.get(rank), self._why_not(rank, greeting)
        if reason is not None and (known is None or known.who != who):
            self.refused += 1
            logger.warning("turned a sidecar of rank %d away: %s", rank, reason)
            await self._tell(str(rank), TurnedAway(reason=reason))
            return
        is_known = known is not None and known.who == who and not known.is_gone
        if known is None or not is_known:
            hello = greeting.hello
            assert isinstance(hello, wire.Hello)
            hello = msgspec.structs.replace(hello, metrics_address=reachable(hello.metrics_address, hello.host))
            connection = self._receiver.connect(hello, clock.wall_ns())
            self._callers[rank] = Caller(who, connection, greeting.server, clock.monotonic_s())
        else:
            known.server = greeting.server
            self._hear_of(known)
            self._receiver.hear_sign(rank, clock.wall_ns())
        if not (is_known and greeting.is_repeated):
            about = wire.Welcome(
                run_id=self._receiver.run_id, run_dir=str(self._receiver.run_dir), boot_id=clock.clock_id()
            )
            await self._tell(str(rank), about)
        for said, num_bytes in self._early.take(rank):
            await self._take(rank, said, num_bytes)

    def _why_not(self, rank: int, greeting: Greeting) -> str | None:
        if not is_same(greeting.token, self._token):
            return "wrong token"
        if not isinstance(greeting.hello, wire.Hello) or greeting.hello.rank != rank:
            return f"somebody else speaks as rank {rank}"
        return refusal(greeting.hello, self._receiver)

    async def _take(self, rank: int, said: Said, num_bytes: int) -> None:
        caller = self._callers.get(rank)
        if caller is None:
            self._early.keep(rank, said, num_bytes)
            await self._ask_again(rank)
            return
        if caller.who != said.who:
            self.refused += 1
            await self._ask_again(rank)
            return
        self._hear_of(caller)
        if caller.is_gone:
            await self._ask_again(rank)
        now_ns = clock.wall_ns()
        if not self._receiver.has_room(rank, num_bytes, now_ns):
            return
        match said.message:
            case wire.Report():
                if self._receiver.hear(rank, said.message, now_ns):
                    self._on_urgent()
            case wire.Goodbye():
                self._receiver.goodbye(rank)
                self._on_urgent()
                self._keep(self._release(rank, caller))
            case _:
                self._receiver.hear_sign(rank, now_ns)

    async def _ask_again(self, rank: int) -> None:
        now_s = clock.monotonic_s()
        if now_s - self._asked_s.get(rank, 0.0) > BEACON_S:
            self._asked_s[rank] = now_s
            await self._tell(str(rank), Again())

    async def _release(self, rank: int, caller: Caller) -> None:
        await self._hold(rank)
        await self._tell(str(rank), LetGo())
        if not caller.is_gone:
            caller.is_gone = True
            self._receiver.disconnect(rank, caller.connection, clock.wall_ns(), is_closed=True)
            self._on_urgent()

    async def _on_alive(self, message: "Msg") -> None:
        rank = rank_of(message.subject)
        with contextlib.suppress(*UNREADABLE):
            said = frames.decode_said(message.data)
            if rank is not None and isinstance(said.message, wire.Report) and not said.message.observations:
                if rank in self._callers:
                    await self._take(rank, said, len(message.data))
                else:
                    await self._ask_again(rank)

    async def _on_clock(self, message: "Msg") -> None:
        received_ns = clock.wall_ns()
        with contextlib.suppress(*failures(*UNREADABLE)):
            asked = frames.decode_said(message.data).message
            # An answer goes to an inbox, and nowhere else where our permissions reach.
            if isinstance(asked, wire.ClockAsked) and message.reply.startswith(INBOX):
                told = wire.ClockTold(sent_ns=asked.sent_ns, received_ns=received_ns, replied_ns=clock.wall_ns())
                await message.respond(self._frame(told))

    async def _ask(self, key: "TableKey", deadline_s: float) -> Observation | None:
        tensor_class, step, rank = key
        if self._line is None or rank not in self._callers:
            return None
        asked = self._frame(wire.Fetch(request=0, tensor_class=tensor_class, step=step))
        try:
            answer = await self._line.client.request(self._subjects.told(str(rank)), asked, timeout=deadline_s)
            said = frames.decode_said(answer.data)
        except failures(*UNREADABLE):
            logger.info("rank %d did not send its %s of step %d within %.0f s", rank, tensor_class, step, deadline_s)
            return None
        is_own = said.who == self._callers[rank].who and isinstance(said.message, wire.Fetched)
        return said.message.observation if is_own and isinstance(said.message, wire.Fetched) else None

    async def _tell(self, who: str, message: Any) -> bool:
        """False when there is no line, or no right to speak."""
        if self._line is None:
            return False
        if self._right.standing() != "valid":
            self.num_withheld += 1
            return False
        with contextlib.suppress(*failures()):
            await self._line.client.publish(self._subjects.told(who), self._frame(message))
            return True
        return False

    def _frame(self, message: Any) -> bytes:
        return frames.encode(Told(self._right.token, message))


def rank_of(subject: str) -> int | None:
    """Who said it, as the server lets nobody else say it."""
    word = subject.rpartition(".")[2]
    return int(word) if word.isascii() and word.isdigit() and len(word) < 8 else None  # noqa: PLR2004


def reachable(address: str, host: str) -> str:
    """Where a sidecar serves its metrics: on the host that it names, which nobody can check here, unless it listens on loopback alone."""
    scheme = SCHEME if address.startswith(SCHEME) else ""
    named, _, port = address.removeprefix(scheme).rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16 and host):
        return ""
    return f"{scheme}{named if named.startswith('127.') else host}:{int(port)}"
