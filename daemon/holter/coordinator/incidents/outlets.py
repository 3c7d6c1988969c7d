"""What others are told without asking: incidents at a webhook, scrape targets in a file."""

from dataclasses import dataclass
from pathlib import Path

from holter import clock
from holter.coordinator.http.targets import TargetsFile
from holter.coordinator.incidents.webhook_sender import WebhookSender, WebhookSettings
from holter.coordinator.run import Run
from holter.exporters.alerts import RUNBOOKS
from holter.exporters.webhook import Pager


@dataclass(frozen=True)
class OutletSettings:
    """Whom to tell; by default nobody."""

    webhook: WebhookSettings | None = None
    targets_dir: Path | None = None
    """Where Prometheus looks for files with targets."""
    runbooks: str = RUNBOOKS
    """Where `grafana/runbooks` is served: messages lead there."""
    deadline_s: float = 5.0
    """At the end, for what is still to be told."""


class Outlets:
    """Told often, they say only what is new."""

    def __init__(self, run: Run, settings: OutletSettings) -> None:
        self._run, self._deadline_s = run, settings.deadline_s
        self._pager = Pager(run.settings.address, settings.runbooks)
        self._courier = WebhookSender(settings.webhook, run.deliveries) if settings.webhook is not None else None
        self._targets: TargetsFile | None = None
        if settings.targets_dir is not None:
            about = run.settings
            self._targets = TargetsFile(settings.targets_dir, about.run_id, about.address, run.disk)

    def start(self) -> None:
        """In a running event loop."""
        if self._courier is not None:
            self._pager.remember(self._run.left_open)
            self._courier.start()
        self.write_targets()

    def tell(self, *, is_final: bool = False) -> None:
        """Of incidents that opened, changed or closed; returns at once. At the end no better diagnosis is waited for."""
        if self._courier is not None:
            incidents = self._run.incidents
            standing = incidents.standing() if is_final else incidents.settled()
            for message in self._pager.look(standing, clock.rfc3339(clock.wall_ns())):
                self._courier.send(message)

    def write_targets(self) -> None:
        """If ranks came or went."""
        if self._targets is not None:
            self._targets.write(self._run.roster)

    async def close(self) -> None:
        """The run has ended: its targets are no more; what is still to be told is told, in the time that is left."""
        if self._targets is not None:
            self._targets.remove()
        self.tell(is_final=True)
        if self._courier is not None:
            await self._courier.close(self._deadline_s)
