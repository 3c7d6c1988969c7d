"""The sidecar's own /metrics and /healthz: one rank, the last state, rendered on request."""

import logging
from collections.abc import Callable

from aiohttp import web

logger = logging.getLogger(__name__)


class MetricsServer:
    """Serves on its port, or on a free one if that is taken."""

    def __init__(
        self, host: str, port: int, scrape: Callable[[str], tuple[bytes, str]], health: Callable[[], dict[str, object]]
    ) -> None:
        self._host, self._port = host, port
        self._scrape, self._health = scrape, health
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """`host:port`; empty when no port can be had, which is no reason to stop watching."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthz)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        for port in (self._port, 0):
            try:
                await web.TCPSite(self._runner, self._host, port).start()
            except OSError as error:
                logger.warning("cannot serve metrics on port %d: %s", port, error)
                continue
            return f"{self._host}:{self._runner.addresses[0][1]}"
        return ""

    async def stop(self) -> None:
        """Close the port."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._scrape(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response(self._health())
