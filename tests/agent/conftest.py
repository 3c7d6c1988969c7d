"""Agents in this process, between simulated ranks and a coordinator, over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.coordinator.conftest import RUN_ID, TOKEN, Running, SimulatedRank, eventually, run_coordinator

from holter.agent.service import HostAgent, HostAgentSettings
from holter.transport.limits import UplinkSettings

__all__ = ["run_coordinator"]


@dataclass
class RunningAgent:
    """An agent that serves."""

    agent: HostAgent
    path: Path
    task: asyncio.Task[str]

    def rank(self, running: Running, rank: int, **options: Any) -> SimulatedRank:
        """A rank whose sidecar speaks through it."""
        return running.rank(rank, settings=UplinkSettings(agent=str(self.path)), **options)

    async def kill(self) -> None:
        """As by SIGKILL: sockets close, nothing is said."""
        self.agent._carrier._speech.on_news = lambda _: None  # type: ignore[attr-defined]
        await self.agent._carrier.stop()
        for route in list(self.agent._listener._routes.values()):
            assert route.socket._req is not None
            if route.socket._req.transport is not None:
                route.socket._req.transport.abort()
        self.path.unlink(missing_ok=True)
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=5.0)


StartAgent = Callable[..., Awaitable[RunningAgent]]


@pytest.fixture
async def start_agent(tmp_path: Path) -> AsyncIterator[StartAgent]:
    """Start agents; whatever still runs at the end is stopped."""
    started: list[RunningAgent] = []

    async def start(running: Running, name: str = "one", **options: Any) -> RunningAgent:
        path = tmp_path / "agents" / f"{name}.sock"
        settings = HostAgentSettings(path, f"127.0.0.1:{running.port}", TOKEN, RUN_ID, **options)
        agent = HostAgent(settings)
        made = RunningAgent(agent, path, asyncio.create_task(agent.run()))
        started.append(made)
        await eventually(lambda: path.is_socket() or made.task.done())
        return made

    yield start
    for made in started:
        made.agent.stop()
        await asyncio.wait({made.task}, timeout=10.0)
