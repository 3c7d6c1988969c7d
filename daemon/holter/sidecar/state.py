"""What the sidecar knows of its rank right now, for the terminal's line and for its own /metrics and /healthz."""

import logging
import math
from collections.abc import Callable

from aiohttp import web

from holter.exporters.snapshot import RankSnapshot, StepHistogram, add_nonfinite
from holter.page import PageHeartbeat
from holter.records import Device, Observation, OnDevice, Phase, StepDone, Where

logger = logging.getLogger(__name__)


class RankState:
    """The last of everything; counters since the start."""

    def __init__(self, rank: int, hostname: str) -> None:
        self.step = 0
        self.loss: float | None = None
        self.seconds = 0.0
        self._rank, self._hostname = rank, hostname
        self._gpu_uuid = ""
        self._phase: Phase | None = None
        self._last_progress_s: float | None = None
        self._norm: float | None = None
        self._learning_rate: float | None = None
        self._overhead: float | None = None
        self._nonfinite: dict[Where, int] = {}
        self._steps = StepHistogram()

    def learn(self, observation: Observation) -> None:
        """Take in one step, or which device it computes on."""
        done = observation.body
        if isinstance(done, OnDevice):
            self._gpu_uuid = done.uuid
        if not isinstance(done, StepDone):
            return
        self.step = observation.step + 1
        self.seconds = done.seconds
        self.loss = done.loss if done.loss is not None else self.loss
        self._norm = done.gradient_norm if done.gradient_norm is not None else self._norm
        self._learning_rate = done.learning_rate if done.learning_rate is not None else self._learning_rate
        self._overhead = done.overhead_ratio
        self._steps = self._steps.add(done.seconds)
        self._nonfinite = dict(add_nonfinite(self._nonfinite, done))

    def learn_heartbeat(self, heartbeat: PageHeartbeat) -> None:
        """Take in where the main thread is."""
        self._phase = Phase(heartbeat.phase)
        self._last_progress_s = heartbeat.at_ns / 1e9

    def snapshot(
        self, dropped: int, device: Device | None = None, *, is_coordinator_there: bool | None = None
    ) -> RankSnapshot:
        """For a scrape."""
        return RankSnapshot(
            rank=self._rank,
            hostname=self._hostname,
            gpu_uuid=self._gpu_uuid,
            step=self.step,
            phase=self._phase,
            last_progress_s=self._last_progress_s,
            loss=self.loss,
            gradient_norm=self._norm,
            overhead_ratio=self._overhead,
            dropped=dropped,
            nonfinite=self._nonfinite,
            steps=self._steps,
            is_sidecar_up=True,
            device=device,
            is_coordinator_there=is_coordinator_there,
        )

    def statistics(self) -> dict[str, float]:
        """The rank's last report of a whole step; empty before the first."""
        if not self.step:
            return {}
        said = {
            "step": self.step - 1,
            "loss": self.loss,
            "gradient_norm": self._norm,
            "seconds": self.seconds,
            "learning_rate": self._learning_rate,
        }
        return {name: float(value) for name, value in said.items() if value is not None}

    def line(self) -> str:
        """For the terminal."""
        parts = [f" holter  step {self.step}"]
        if self._phase is not None:
            parts.append(self._phase.name.lower())
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}" if math.isfinite(self.loss) else "loss is not finite")
        if self.seconds:
            parts.append(f"{self.seconds * 1e3:.0f} ms a step" if self.seconds < 1 else f"{self.seconds:.1f} s a step")
        if self._overhead is not None:
            parts.append(f"overhead {self._overhead:.1%}")
        return " · ".join(parts)


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
