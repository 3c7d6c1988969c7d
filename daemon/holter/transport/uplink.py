"""A sidecar's uplink: carries its rank's records to the host's agent if there is one, else to the coordinator itself.

    agent's socket there ──▶ to the agent ──lost, or it has lost the coordinator──▶ to the coordinator itself
                                  ▲_____________ socket there again, looked at now and then ____│

The speech outlives the carriers, so that a change loses nothing but what lay in a broken connection's buffers.
"""

import asyncio
import contextlib
import logging
from dataclasses import replace
from pathlib import Path

from holter import clock
from holter.records import Observation
from holter.transport import wire
from holter.transport.choice import UNIX, transport_of
from holter.transport.clock_offset import ClockOffset
from holter.transport.interface import Carrier, OnMessage
from holter.transport.limits import UplinkSettings
from holter.transport.speech import RankSpeech

AGENT_FIRST_S = 5.0
"""Seconds that an agent may take to come up before its sidecars do without it."""
AGENT_LOST_S = 3.0
"""Seconds that an agent may be without the coordinator before its sidecars do without it."""
RETURN_S = 30.0
"""Seconds between two looks for a new agent; a sidecar goes back to an agent at most this often."""
LOOK_S = 0.5

logger = logging.getLogger(__name__)


class RankUplink:
    """Sends a sidecar's records; `start` it in a running event loop, `close` it at the end."""

    def __init__(
        self,
        address: str,
        token: str,
        hello: wire.Hello,
        on_message: OnMessage,
        settings: UplinkSettings | None = None,
    ) -> None:
        settings = settings or UplinkSettings()
        agent = settings.agent
        self._speech = RankSpeech(hello, settings.outbox_limit)
        self._to = (address, token, on_message, settings)
        self._agent = agent
        self._carrier = self._carrier_to(f"{UNIX}{agent}" if agent else address)
        self._is_by_agent = self._speech.is_kept = bool(agent)
        self._start_agent = settings.start_agent
        self._since_s = clock.monotonic_s()
        self._served_s = 0.0
        """When the agent was last connected to the coordinator; 0: not yet."""
        self._heard_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False

    def start(self) -> None:
        """Begin to connect in the background."""
        self._since_s = clock.monotonic_s()
        self._carrier.start()
        if self._agent:
            self._task = asyncio.create_task(self._choose_the_way(), name="way")

    def send(self, observation: Observation, *, urgent: bool = False) -> None:
        """Queue one record; an urgent one makes everything queued be sent at once."""
        self._speech.send(observation, urgent=urgent)

    def beat(self, heartbeat: wire.Heartbeat) -> None:
        """Set where the rank is now."""
        self._speech.beat(heartbeat)

    async def close(self, deadline_s: float) -> bool:
        """Send what is left and a Goodbye; directly to the coordinator if the agent has gone. False if that failed."""
        self._is_closing = True
        until_s = clock.monotonic_s() + deadline_s
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=deadline_s)
        first_s = min(deadline_s, AGENT_LOST_S) if self._is_by_agent and not self.is_connected else deadline_s
        if await self._carrier.close(first_s):
            return True
        left_s = until_s - clock.monotonic_s()
        if not self._is_by_agent or left_s <= 0:
            return False
        await self._go(is_by_agent=False)
        return await self._carrier.close(left_s)

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator hears us now."""
        return self._carrier.is_connected

    @property
    def is_by_agent(self) -> bool:
        """Whether we report to the agent of this host."""
        return self._is_by_agent

    @property
    def heard_s(self) -> float:
        """When the coordinator last gave a sign of life, by the clock for durations."""
        return max(self._heard_s, self._carrier.heard_s)

    @property
    def dropped(self) -> int:
        """Number of records for which there was no room here."""
        return self._speech.outbox.dropped

    @property
    def dropped_before(self) -> int:
        """Number of records lost between rank and sidecar; the owner keeps it up to date, and reports carry the sum."""
        return self._speech.dropped_before

    @dropped_before.setter
    def dropped_before(self, number: int) -> None:
        self._speech.dropped_before = number

    @property
    def clock(self) -> ClockOffset:
        """The estimated offset of the coordinator's clock."""
        return self._carrier.clock

    @property
    def refusal(self) -> str:
        """Why we were last refused; empty if we were not."""
        return self._carrier.refusal

    @property
    def reconnects(self) -> int:
        """How often the current way was lost."""
        return self._carrier.reconnects

    @property
    def garbage(self) -> int:
        """Number of the coordinator's messages that could not be read."""
        return self._carrier.garbage

    def _carrier_to(self, address: str) -> Carrier:
        _, token, on_message, settings = self._to
        if address.startswith(UNIX):
            # On the same host nothing is gained by reporting less often: the agent does that for all of its ranks.
            usual = UplinkSettings()
            quick = (usual.report_interval_s, usual.keepalive_s)
            settings = replace(settings, report_interval_s=quick[0], keepalive_s=quick[1])
        return transport_of(address).carrier(address, token, self._speech, on_message, settings)

    async def _go(self, *, is_by_agent: bool) -> None:
        former = self._carrier
        self._heard_s = max(self._heard_s, former.heard_s)
        await former.stop()
        self._is_by_agent, self._since_s = is_by_agent, clock.monotonic_s()
        self._speech.is_kept = is_by_agent
        self._served_s = 0.0
        self._carrier = self._carrier_to(f"{UNIX}{self._agent}" if is_by_agent else self._to[0])
        self._carrier.start()

    async def _choose_the_way(self) -> None:
        await asyncio.to_thread(self._start_agent)
        while not self._is_closing:
            await asyncio.sleep(LOOK_S)
            now_s = clock.monotonic_s()
            if self._is_by_agent:
                if self._carrier.is_connected:
                    self._served_s = now_s
                patience_s = AGENT_LOST_S if self._served_s else AGENT_FIRST_S
                if now_s - max(self._served_s, self._since_s) > patience_s:
                    logger.warning(
                        "the agent at %s does not serve; the coordinator itself is told from now on", self._agent
                    )
                    await self._go(is_by_agent=False)
            elif now_s - self._since_s > RETURN_S:
                self._since_s = now_s
                await asyncio.to_thread(self._start_agent)
                if await _is_serving(self._agent):
                    logger.warning("there is an agent at %s again", self._agent)
                    await self._go(is_by_agent=True)


async def _is_serving(path: str) -> bool:
    """Whether a process accepts connections at this socket."""
    if not await asyncio.to_thread(Path(path).is_socket):
        return False
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_unix_connection(path)
        writer.close()
        return True
    return False
