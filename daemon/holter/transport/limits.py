"""Limits and deadlines of the sidecar's end of the connection, and the waits between attempts."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from holter import clock
from holter.transport.tls import NO_TLS, TlsFiles

REPORTS_PER_S = 16_000
"""Largest number of reports per second from all ranks together; each costs the coordinator about thirteen
microseconds."""
MAX_INTERVAL_S = 2.0


@dataclass(frozen=True)
class UplinkSettings:
    """Limits and deadlines of a Carrier."""

    outbox_limit: int = 20_000
    """Number of records kept while the coordinator is away."""
    report_interval_s: float = 0.25
    """Shortest time between two reports, unless one is urgent."""
    keepalive_s: float = 1.0
    """Seconds without a report after which an empty one is sent, so that a quiet connection differs from a dead one."""
    clock_first_s: float = 0.5
    """Seconds between the first questions for the coordinator's clock."""
    clock_interval_s: float = 5.0
    """Seconds between all later ones."""
    batch_limit: int = 256
    """Largest number of records in one report."""
    connect_timeout_s: float = 5.0
    """Seconds allowed for the connection, and again for the coordinator's Welcome."""
    send_timeout_s: float = 10.0
    """Seconds for one frame to leave; a stopped coordinator fills the socket's buffer."""
    ping_interval_s: float = 10.0
    """Seconds between pings; half of it without an answer means that the connection is lost."""
    close_timeout_s: float = 2.0
    """Seconds for the coordinator to answer the end of a connection."""
    garbage_limit: int = 16
    """Number of unreadable frames after which the connection is given up."""
    steady_after_s: float = 5.0
    """Seconds after which a connection counts as steady, so that the next wait is the shortest again."""
    replaced_pause_s: float = 60.0
    """Seconds before trying again if another process speaks for this rank: the newest wins, and two must not
    alternate."""
    closing_pause_s: float = 0.2
    """Longest wait between attempts while closing, because the deadline is near."""
    wall_ns: Callable[[], int] = clock.wall_ns
    """Clock of this host."""
    tls: TlsFiles = NO_TLS
    """Which certificates to trust, if the coordinator's address asks for TLS."""
    credentials: str = ""
    """File of credentials, if the network needs some."""
    agent: str = ""
    """Path of the socket of this host's agent, through which a sidecar speaks; empty if there is none."""
    start_agent: Callable[[], object] = lambda: None
    """Starts the agent if there is none; called now and then. It may take its time, and never raises."""


def settings_for(world_size: int, tls: TlsFiles = NO_TLS, agent: str = "", credentials: str = "") -> UplinkSettings:
    """Return settings for a job of this size: ranks of a very large job report less often; urgent records are still sent at once."""
    usual = UplinkSettings(tls=tls, agent=agent, credentials=credentials)
    each_s = min(world_size / REPORTS_PER_S, MAX_INTERVAL_S)
    return replace(
        usual, report_interval_s=max(usual.report_interval_s, each_s), keepalive_s=max(usual.keepalive_s, each_s)
    )


@dataclass
class Backoff:
    """Waits between attempts that double up to a cap, with jitter so that 16,000 sidecars do not return at once."""

    first_s: float = 0.1
    """Shortest wait before jitter, in seconds."""
    cap_s: float = 5.0
    """Longest wait in seconds."""
    attempts: int = 0
    """Number of consecutive failures; reset by a connection that lasted."""

    def next_s(self) -> float:
        """Return the seconds to wait now: between half of the doubled wait and all of it."""
        # Beyond 2**32 the cap has long won.
        wait_s = min(self.cap_s, self.first_s * 2.0 ** min(self.attempts, 32))
        self.attempts += 1
        return wait_s * random.uniform(0.5, 1.0)  # noqa: S311 - jitter is no secret
