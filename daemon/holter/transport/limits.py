"""Limits and deadlines of the sidecar's end of the stream, and how long it waits before it tries again."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from holter import clock
from holter.transport.tls import NO_TLS, TlsFiles

REPORTS_PER_S = 16_000
"""Of all ranks together: each costs the coordinator some thirteen microseconds."""
MAX_INTERVAL_S = 2.0


@dataclass(frozen=True)
class UplinkSettings:
    """Limits and deadlines of a Carrier."""

    outbox_limit: int = 20_000
    """Records kept while the coordinator is away."""
    report_interval_s: float = 0.25
    """The shortest time between two reports, unless one is urgent."""
    keepalive_s: float = 1.0
    """After so long without a report an empty one is sent: the coordinator tells a silent line from a quiet one."""
    clock_first_s: float = 0.5
    """Between the first questions for the coordinator's clock."""
    clock_interval_s: float = 5.0
    """Between all later ones."""
    batch_limit: int = 256
    """The most records in one report."""
    connect_timeout_s: float = 5.0
    """For the connection, and again for the coordinator's Welcome."""
    send_timeout_s: float = 10.0
    """For one frame to leave: a stopped coordinator fills the socket's buffer."""
    ping_interval_s: float = 10.0
    """Half of it without an answer is taken for a lost connection."""
    close_timeout_s: float = 2.0
    """For the coordinator to answer the end of a connection."""
    garbage_limit: int = 16
    """Frames that cannot be read before the connection is given up."""
    steady_after_s: float = 5.0
    """A connection that lasted so long begins again with the shortest wait."""
    replaced_pause_s: float = 60.0
    """Before trying again when another process speaks for this rank: the newest wins, and two must not take turns."""
    closing_pause_s: float = 0.2
    """The longest wait between attempts once it is closing: the deadline is near."""
    wall_ns: Callable[[], int] = clock.wall_ns
    """The clock of this host."""
    tls: TlsFiles = NO_TLS
    """Whom to believe, where the coordinator's address asks for TLS."""
    credentials: str = ""
    """File of credentials, where the network wants some."""
    agent: str = ""
    """Path of the socket of this host's agent, through which a sidecar speaks; empty: there is none."""
    start_agent: Callable[[], object] = lambda: None
    """Starts the agent if there is none; called now and then while there is none. It may take its time, and raises nothing."""


def settings_for(world_size: int, tls: TlsFiles = NO_TLS, agent: str = "", credentials: str = "") -> UplinkSettings:
    """Ranks of a very large job report less often; what is urgent is said at once all the same."""
    usual = UplinkSettings(tls=tls, agent=agent, credentials=credentials)
    each_s = min(world_size / REPORTS_PER_S, MAX_INTERVAL_S)
    return replace(
        usual, report_interval_s=max(usual.report_interval_s, each_s), keepalive_s=max(usual.keepalive_s, each_s)
    )


@dataclass
class Backoff:
    """How long to wait before the next attempt: doubling, capped, with jitter so that 16,000 sidecars do not come back at once."""

    first_s: float = 0.1
    """The shortest wait, before jitter."""
    cap_s: float = 5.0
    """The longest wait."""
    attempts: int = 0
    """Failures in a row; 0 again after a connection that lasted."""

    def next_s(self) -> float:
        """Seconds to wait now: between half and all of the doubled wait."""
        # Beyond 2**32 the cap has long won.
        wait_s = min(self.cap_s, self.first_s * 2.0 ** min(self.attempts, 32))
        self.attempts += 1
        return wait_s * random.uniform(0.5, 1.0)  # noqa: S311 - jitter is no secret
