"""The coordinator's end: it reads the run's stream from its position on, notes who is there, and sends its orders.

    stream ──▶ Tail ──▶ Greeting: connect, Welcome            alive ──▶ hear      clock ──▶ ClockTold
                    ──▶ Report, HostReport, Goodbye: hear

NATS tells nobody that a client has gone. A quiet one is asked: if it was connected to our own server, and that says
that nobody listens there, its connection was closed; otherwise it counts as silent.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from holter import clock
from holter.files import UNREADABLE
from holter.records import Observation, Order
from holter.transport import wire
from holter.transport.access import is_same
from holter.transport.host_line import HostLine
from holter.transport.interface import Receiver, Right, refusal
from holter.transport.nats import frames
from holter.transport.nats.callers import Caller, Callers, Early
from holter.transport.nats.frames import Again, Beacon, Greeting, LetGo, Probe, Said, Told, TurnedAway
from holter.transport.nats.line import INBOX, NatsPlace, OpenLine, failures, line_to
from holter.transport.nats.subjects import ALL, HOST, Subjects, host_name
from holter.transport.nats.tail import LAST_WORD_S, Tail, last_hellos, make_stream
from holter.transport.questions import Questions
from holter.transport.tls import SCHEME

if TYPE_CHECKING:
    from aiohttp import web
    from nats.aio.msg import Msg

    from holter.faults import ExamKey, TableKey

BEACON_S = 1.0
QUIET_S = 2.0
"""Seconds of silence after which a sidecar is asked whether it is there."""
PROBE_S = 0.8
MAX_PROBES = 256
"""Largest number of simultaneous probes: if a whole network is gone, not everybody is asked."""
GONE_AFTER = 2
"""Number of probes without a listener after which a sidecar counts as gone."""
PAUSE_S = 0.3
QUESTIONS_OF_ONE = 2**32
"""Range of question numbers that each holder of the lease has for itself."""
OK = 1000
"""Code for closing the connection of a sidecar that has said Goodbye."""

logger = logging.getLogger(__name__)


class NatsListener:
    """Keeps track of who is connected, and of what was asked of whom."""

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
        """Number of messages withheld because another coordinator may give the orders."""
        self._receiver, self._token, self._on_urgent, self._hold = receiver, token, on_urgent, hold
        self._place, self._right = place, right
        self._subjects = Subjects(receiver.run_id)
        self._tail = Tail(self._subjects, self._on_said)
        self._callers = Callers()
        self._early = Early()
        self._questions = Questions()
        self._asked_s: dict[str, float] = {}
        self._line: OpenLine | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._has_begun = False

    def mount(self, app: "web.Application") -> None:
        """Connect once the coordinator's web server starts."""
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._stop)

    async def fetch(self, keys: Sequence["TableKey"], deadline_s: float) -> None:
        """Ask for tables and pass the answers to the receiver; no answer in time counts as not available."""
        answers = await asyncio.gather(*(self._ask(key, deadline_s) for key in keys))
        for key, answer in zip(keys, answers, strict=True):
            self._receiver.hear_table(key, answer, clock.wall_ns())

    async def examine(self, keys: Sequence["ExamKey"]) -> None:
        """Ask for examinations; the answers come later, as observations."""
        for key in keys:
            await self._tell_ranks(wire.Examine(asked_ns=key.asked_ns, depth=key.depth), [key.rank])

    async def order(self, order: Order, ranks: Sequence[int]) -> None:
        """Give an order to these ranks' sidecars; whoever repeats it tells those that could not be reached."""
        await self._tell_ranks(wire.Halt(order=order), ranks)

    async def notify(self, rank: int, notice: wire.Notice) -> bool:
        """Send a notice to one rank's sidecar; False if that was not possible."""
        return self._callers.reached(rank) is not None and await self._tell_ranks(notice, [rank])

    async def hang_up(self) -> None:
        """Release everybody, because the coordinator ends."""
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
        """Continue where a former coordinator of this life stopped; a new life begins at the end of the stream."""
        last = await make_stream(line, self._subjects)
        if not self._has_begun:
            taken = self._receiver.taken
            if taken is not None and taken <= last:
                self._tail.position = taken
                await self._hear_hellos(line)
            else:
                self._tail.position = last
                # Nobody is welcomed before this, and sidecars send nothing before their Welcome: so a successor reads
                # all that is sent to us, however short our life is.
                await self._receiver.begin_at(last)
            self._has_begun = True
        elif self._tail.position > last:
            logger.warning("the stream %s was made anew: what was in it is lost", self._subjects.stream)
            self._tail.position = 0

    async def _hear_hellos(self, line: OpenLine) -> None:
        """Read the last Greeting of each rank, including ranks that will not come again."""
        async for message in last_hellos(line, self._subjects):
            await self._on_said(message)

    async def _shine(self) -> None:
        """Announce the coordinator once a second."""
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
            quiet = list(self._callers.quiet(now_s - QUIET_S))
            await asyncio.gather(*(self._probe_one(line, name) for name in quiet[:MAX_PROBES]))

    async def _probe_one(self, line: OpenLine, name: str) -> None:
        from nats.errors import NoRespondersError  # noqa: PLC0415 - an extra

        caller = self._callers.by_name[name]
        try:
            await line.client.request(self._subjects.told(name), self._frame(Probe()), timeout=PROBE_S)
        except NoRespondersError:
            ours = str(line.client._server_info.get("server_id", ""))  # noqa: SLF001 - nothing public tells it
            caller.num_unheard += caller.server == ours
        except failures():
            return
        else:
            self._hear_of(caller)
            if caller.host is None:
                self._receiver.hear_sign(int(name), clock.wall_ns())
        if caller.num_unheard >= GONE_AFTER:
            self._end(name, caller)

    def _end(self, name: str, caller: Caller) -> None:
        """Note that nobody speaks by this name any more."""
        if caller.is_gone:
            return
        caller.is_gone = True
        if caller.host is None:
            self._receiver.disconnect(int(name), caller.connection, clock.wall_ns(), is_closed=True)
        else:
            caller.host.end(clock.wall_ns(), is_closed=True)
        self._on_urgent()

    def _hear_of(self, caller: Caller) -> None:
        caller.heard_s, caller.num_unheard = clock.monotonic_s(), 0

    async def _on_said(self, message: "Msg") -> None:
        """Take in a message from the stream."""
        name = speaker_of(message.subject)
        try:
            said = frames.decode_said(message.data)
        except UNREADABLE:
            said = None
        if name is None or said is None:
            self.refused += 1
            return
        if isinstance(said.message, Greeting):
            await self._greet(name, said.who, said.message)
        else:
            await self._take(name, said, len(message.data))

    async def _greet(self, name: str, who: bytes, greeting: Greeting) -> None:
        known, reason = self._callers.by_name.get(name), self._why_not(name, greeting)
        if reason is not None and (known is None or known.who != who):
            self.refused += 1
            logger.warning("turned %s away: %s", name, reason)
            await self._tell(name, TurnedAway(reason=reason))
            return
        is_known = known is not None and known.who == who and not known.is_gone
        if known is None or not is_known:
            self._let_in(name, known, Caller(who, greeting.server, clock.monotonic_s()), greeting.hello)
        else:
            known.server = greeting.server
            self._hear_of(known)
            if known.host is None:
                self._receiver.hear_sign(int(name), clock.wall_ns())
        if not (is_known and greeting.is_repeated):
            about = wire.Welcome(
                run_id=self._receiver.run_id, run_dir=str(self._receiver.run_dir), boot_id=clock.clock_id()
            )
            await self._tell(name, about)
        for said, num_bytes in self._early.take(name):
            await self._take(name, said, num_bytes)

    def _let_in(self, name: str, former: Caller | None, caller: Caller, hello: wire.Opening) -> None:
        """Take in a new sender, perhaps in place of another one."""
        now_ns = clock.wall_ns()
        if isinstance(hello, wire.Hello):
            hello = msgspec.structs.replace(hello, metrics_address=reachable(hello.metrics_address, hello.host))
            self._callers.by_name[name] = caller
            caller.connection = self._receiver.connect(hello, now_ns)
            self._callers.route(hello.rank, name)
            return
        if former is not None:
            self._end(name, former)
        caller.host = HostLine(self._receiver, partial(reachable, host=hello.host))
        self._callers.by_name[name] = caller
        # Its reports in the stream since then do not repeat who is there.
        came, _ = caller.host.join(hello.members, now_ns)
        for rank in came:
            self._callers.route(rank, name)

    def _why_not(self, name: str, greeting: Greeting) -> str | None:
        if not is_same(greeting.token, self._token):
            return "wrong token"
        hello = greeting.hello
        if name != (str(hello.rank) if isinstance(hello, wire.Hello) else host_name(hello.host)):
            return "it speaks by somebody else's name"
        return refusal(hello, self._receiver)

    async def _take(self, name: str, said: Said, num_bytes: int) -> None:
        caller = self._callers.by_name.get(name)
        if caller is None:
            self._early.keep(name, said, num_bytes)
            await self._ask_again(name)
            return
        if caller.who != said.who:
            self.refused += 1
            await self._ask_again(name)
            return
        self._hear_of(caller)
        if caller.is_gone:
            await self._ask_again(name)
        if caller.host is not None:
            await self._take_host(name, caller, caller.host, said, num_bytes)
        else:
            self._take_rank(int(name), caller, said, num_bytes)

    def _take_rank(self, rank: int, caller: Caller, said: Said, num_bytes: int) -> None:
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

    async def _take_host(self, name: str, caller: Caller, line: HostLine, said: Said, num_bytes: int) -> None:
        match said.message:
            case wire.HostReport() as report:
                await self._hear_host(name, line, report, num_bytes)
            case wire.Goodbye():
                await self._tell(name, LetGo())
                self._end(name, caller)
            case _:
                pass

    async def _hear_host(self, name: str, line: HostLine, report: wire.HostReport, num_bytes: int) -> None:
        heard = line.take(report, num_bytes, self._questions, clock.wall_ns())
        for rank in heard.came:
            self._callers.route(rank, name)
        for rank in heard.goodbyes:
            if self._callers.routes.get(rank) == name:
                self._keep(self._release_at_host(rank, name))
        for rank in heard.left:
            self._callers.drop_route(rank, name)
        if heard.is_urgent:
            self._on_urgent()
        self.refused += len(heard.refused)
        for word in heard.refused:
            await self._tell(name, word)

    async def _ask_again(self, name: str) -> None:
        now_s = clock.monotonic_s()
        if now_s - self._asked_s.get(name, 0.0) > BEACON_S:
            self._asked_s[name] = now_s
            await self._tell(name, Again())

    async def _release(self, rank: int, caller: Caller) -> None:
        await self._hold(rank)
        await self._tell(str(rank), LetGo())
        self._end(str(rank), caller)

    async def _release_at_host(self, rank: int, name: str) -> None:
        await self._hold(rank)
        await self._tell(name, wire.Released(rank=rank, code=OK, reason=""))

    async def _on_alive(self, message: "Msg") -> None:
        name = speaker_of(message.subject)
        with contextlib.suppress(*UNREADABLE):
            said = frames.decode_said(message.data)
            if (
                name is not None
                and isinstance(said.message, wire.Report | wire.HostReport)
                and not said.message.observations
            ):
                if name in self._callers.by_name:
                    await self._take(name, said, len(message.data))
                else:
                    await self._ask_again(name)

    async def _on_clock(self, message: "Msg") -> None:
        received_ns = clock.wall_ns()
        with contextlib.suppress(*failures(*UNREADABLE)):
            asked = frames.decode_said(message.data).message
            # An answer goes to an inbox, and to nothing else that our permissions would allow.
            if isinstance(asked, wire.ClockAsked) and message.reply.startswith(INBOX):
                told = wire.ClockTold(sent_ns=asked.sent_ns, received_ns=received_ns, replied_ns=clock.wall_ns())
                await message.respond(self._frame(told))

    async def _ask(self, key: "TableKey", deadline_s: float) -> Observation | None:
        tensor_class, step, rank = key
        reached = self._callers.reached(rank)
        if self._line is None or reached is None:
            return None
        name, caller = reached
        if caller.host is not None:
            # An answer to a former coordinator must not be taken for one to us.
            self._questions.num_asked = max(self._questions.num_asked, self._right.token * QUESTIONS_OF_ONE)
            return await self._questions.ask(key, deadline_s, lambda fetch: self._tell_ranks(fetch, [rank]))
        asked = self._frame(wire.Fetch(request=0, tensor_class=tensor_class, step=step))
        try:
            answer = await self._line.client.request(self._subjects.told(name), asked, timeout=deadline_s)
            said = frames.decode_said(answer.data)
        except failures(*UNREADABLE):
            logger.info("rank %d did not send its %s of step %d within %.0f s", rank, tensor_class, step, deadline_s)
            return None
        is_own = said.who == caller.who and isinstance(said.message, wire.Fetched)
        return said.message.observation if is_own and isinstance(said.message, wire.Fetched) else None

    async def _tell_ranks(self, message: wire.Passed, ranks: Sequence[int]) -> bool:
        """Send to these ranks' sidecars, with one message for all ranks of an agent; False if nobody could be told."""
        straight, by_agent = self._callers.apart(ranks)
        told = [await self._tell(name, message) for name in straight]
        told += [await self._tell(name, wire.ToRanks(ranks=those, message=message)) for name, those in by_agent.items()]
        return any(told)

    async def _tell(self, who: str, message: Any) -> bool:
        """Send a message; False if there is no connection, or no right to send."""
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


def speaker_of(subject: str) -> str | None:
    """Return the sender's name: a rank's number, or a host's name for its agent.

    The server's permissions prevent others from using it.
    """
    word = subject.rpartition(".")[2]
    is_rank = word.isascii() and word.isdigit() and len(word) < 8  # noqa: PLR2004
    return word if (is_rank and str(int(word)) == word) or word.startswith(HOST) else None


def reachable(address: str, host: str) -> str:
    """Return the address at which a sidecar serves its metrics.

    The host is the one that it names, which cannot be checked here, unless the sidecar listens on loopback alone.
    """
    scheme = SCHEME if address.startswith(SCHEME) else ""
    named, _, port = address.removeprefix(scheme).rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16 and host):
        return ""
    return f"{scheme}{named if named.startswith('127.') else host}:{int(port)}"
