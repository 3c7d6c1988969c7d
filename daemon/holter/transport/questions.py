"""Matches the answers to requests for tables with their questions."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING

from holter.records import Observation
from holter.transport import wire

if TYPE_CHECKING:
    # A sidecar starts without the detectors.
    from holter.faults import TableKey

logger = logging.getLogger(__name__)


class Questions:
    """The open questions."""

    def __init__(self) -> None:
        self.num_asked = 0
        """Number of the last question; further numbers continue from here."""
        self._open: dict[int, tuple[int, asyncio.Future[Observation | None]]] = {}
        """Number -> (rank that was asked, its answer)."""

    async def ask(
        self, key: "TableKey", deadline_s: float, tell: Callable[[wire.Fetch], Awaitable[bool]]
    ) -> Observation | None:
        """Ask for a table and return the answer; None if it does not come in time.

        `tell` sends the question and returns whether it could.
        """
        tensor_class, step, rank = key
        self.num_asked += 1
        number = self.num_asked
        answer: asyncio.Future[Observation | None] = asyncio.get_running_loop().create_future()
        self._open[number] = (rank, answer)
        try:
            async with asyncio.timeout(deadline_s):
                if await tell(wire.Fetch(request=number, tensor_class=tensor_class, step=step)):
                    return await answer
        except TimeoutError:
            logger.info("rank %d did not send its %s of step %d within %.0f s", rank, tensor_class, step, deadline_s)
        finally:
            del self._open[number]
        return None

    def answer(self, ranks: Collection[int], fetched: wire.Fetched) -> None:
        """Take in an answer that came from one of these ranks."""
        asked, answer = self._open.get(fetched.request, (None, None))
        if asked in ranks and answer is not None and not answer.done():
            answer.set_result(fetched.observation)
