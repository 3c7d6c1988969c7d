"""Rank 0's sidecar starts the coordinator and keeps it alive.

The listening socket was bound by the rank and is held here: a coordinator that dies is started again on the same address with the
same token, and its sidecars find it as if it had only been slow.
"""

import asyncio
import contextlib
import logging
import sys

MAX_RESTARTS = 3
RESTART_PAUSE_S = 0.5

logger = logging.getLogger(__name__)


class CoordinatorProcess:
    """The coordinator's process, as its starter sees it."""

    def __init__(self, *, arguments: list[str], token: str, listen_fd: int) -> None:
        self.num_restarts = 0
        self._arguments = arguments
        self._token = token
        self._listen_fd = listen_fd
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, in the background."""
        self._task = asyncio.create_task(self._keep_alive(), name="coordinator")

    async def _keep_alive(self) -> None:
        while True:
            code = await self._run_once()
            if code == 0 or self.num_restarts >= MAX_RESTARTS:
                logger.log(logging.INFO if code == 0 else logging.ERROR, "the coordinator ended with %s", code)
                return
            self.num_restarts += 1
            logger.error("the coordinator ended with %s; start %d of %d", code, self.num_restarts, MAX_RESTARTS)
            await asyncio.sleep(RESTART_PAUSE_S)

    async def _run_once(self) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "holter.cli", "coordinator", *self._arguments),
            *("--fd", str(self._listen_fd), "--token-file", "-"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(self._listen_fd,),
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(self._token.encode() + b"\n")
            await process.stdin.drain()
            process.stdin.close()
        return await process.wait()
