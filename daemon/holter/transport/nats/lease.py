"""Decides who may give orders, if several coordinators of a run want to. Pure: times are arguments, by the clock for durations.

    nobody ──take──▶ held ──renewed every 0.4 s──▶ held ...
                      │ not renewed for LEASE_S, as seen by one who looked all the time
                      ▼
                    taken by another, with the next token

The holder trusts its lease for less time than others wait, counted from the moment at which it asked for the last
renewal that was granted. A server that does not answer makes the holder pause, not lose: nobody else can take the lease
meanwhile. For one who waits, time in which it could not look does not count.
"""

from dataclasses import dataclass, replace
from typing import Literal

import msgspec

LEASE_S = 1.6
"""Seconds without a renewal after which a lease may be taken."""
TRUST_S = 1.3
"""Seconds after a renewal in which its holder gives orders."""
RENEW_S = 0.4
LOOK_S = 0.2
"""Seconds between two looks by one who waits."""
SIGN_S = 15.0
"""Seconds without judging after which a coordinator's lease is not renewed."""

State = Literal["held", "released", "ended"]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of the lease, and of the run."""

    token: int
    """Number that grows with every holder."""
    holder: str
    """Name of the holder, which nobody else has."""
    state: State = "held"
    """`released`: anyone may take it at once; `ended`: the run is over."""
    card: msgspec.Raw = msgspec.Raw(b"null")
    """What is shown of the run."""


@dataclass(frozen=True)
class Sighting:
    """What a waiting coordinator has seen of the lease."""

    revision: int = 0
    """Newest revision that was seen; 0 if there is none."""
    lease: Lease | None = None
    looked_s: float | None = None
    """When it last looked; None: not yet."""
    unchanged_s: float = 0.0
    """Seconds for which it has seen this revision, looking all the time."""
    has_waited: bool = False
    """Whether it has seen a lease that was held."""


Decision = Literal["take", "wait", "over"]


def look(before: Sighting, revision: int, lease: Lease | None, now_s: float) -> Sighting:
    """Return what is known after one more look."""
    seen = replace(before, revision=revision, lease=lease, looked_s=now_s)
    if lease is None or revision != before.revision:
        return replace(
            seen, unchanged_s=0.0, has_waited=before.has_waited or (lease is not None and lease.state == "held")
        )
    since_s = now_s - before.looked_s if before.looked_s is not None else 0.0
    # A pause of our own must not count as the holder's silence.
    return replace(seen, unchanged_s=before.unchanged_s + min(max(0.0, since_s), 2 * LOOK_S))


def decide(seen: Sighting, me: str) -> tuple[Decision, str]:
    """Return what a waiting coordinator does, and why."""
    if seen.lease is None:
        return ("wait", "nobody has looked yet") if seen.looked_s is None else ("take", "nobody holds it")
    if seen.lease.holder == me:
        return "take", "it is ours"
    if seen.lease.state == "ended":
        return ("over", "the run has ended") if seen.has_waited else ("take", "an earlier life of the run ended")
    if seen.lease.state == "released":
        return "take", "it was given up"
    if seen.unchanged_s >= LEASE_S:
        return "take", f"{seen.lease.holder} has not renewed it for {seen.unchanged_s:.1f} s"
    return "wait", f"{seen.lease.holder} holds it"


def next_token(seen: Sighting) -> int:
    """Return the token for taking the lease, above every former one.

    This also holds if the stored lease cannot be read, because each token was below its own revision.
    """
    return seen.revision + 1


Standing = Literal["valid", "suspended", "lost"]


def standing(asked_s: float, now_s: float, *, is_taken: bool) -> Standing:
    """Return what the holder may assume; `asked_s`: when it asked for the last renewal that was granted."""
    if is_taken:
        return "lost"
    return "valid" if now_s - asked_s < TRUST_S else "suspended"
