"""Read all runs of a server, without making a consumer or publishing anything."""

import asyncio
from dataclasses import dataclass

import msgspec

from holter import clock
from holter.files import UNREADABLE
from holter.transport.nats.lease import Lease
from holter.transport.nats.line import OpenLine
from holter.transport.nats.subjects import BUCKET, BUCKET_STREAM, name_of

AT_ONCE = 32
"""Number of keys that are requested together."""
SILENT_S = 6.0
"""Seconds without a renewal of a run's lease after which it counts as having no coordinator."""


@dataclass(frozen=True)
class KnownRun:
    """One run in the bucket."""

    run_id: str
    revision: int
    lease: Lease | None
    """The run's lease; None if it cannot be read."""
    changed_s: float
    """When the lease was last seen to change, by the reader's clock for durations."""
    has_changed: bool = False
    """Whether it was ever seen to change; a single look cannot tell whether anybody renews it."""

    def state(self, now_s: float) -> str:
        """Return live, silent, ended or unreadable; unknown if it has not been watched for long enough."""
        if self.lease is None:
            return "unreadable"
        if self.lease.state == "ended":
            return "ended"
        if now_s - self.changed_s > SILENT_S:
            return "silent"
        return "live" if self.has_changed else "unknown"


class FleetReader:
    """Looks at the bucket again and again; `runs` is what it knows."""

    def __init__(self) -> None:
        self.runs: dict[str, KnownRun] = {}
        self.read_s: float | None = None
        """When the whole bucket was last read, by the clock for durations; None: not yet."""

    async def read(self, line: OpenLine) -> None:
        """Read the bucket once. Raises what nats-py does; a server without the bucket has no runs."""
        from nats.js.errors import NotFoundError  # noqa: PLC0415 - an extra

        try:
            about = await line.js.stream_info(BUCKET_STREAM, subjects_filter=f"$KV.{BUCKET}.>")
        except NotFoundError:
            self.runs, self.read_s = {}, clock.monotonic_s()
            return
        subjects = sorted((about.state.subjects or {}).keys())
        found: dict[str, KnownRun] = {}
        for start in range(0, len(subjects), AT_ONCE):
            part = subjects[start : start + AT_ONCE]
            for known in await asyncio.gather(*(self._one(line, subject) for subject in part)):
                if known is not None:
                    found[known.run_id] = known
        self.runs, self.read_s = found, clock.monotonic_s()

    async def _one(self, line: OpenLine, subject: str) -> KnownRun | None:
        from nats.js.errors import NotFoundError  # noqa: PLC0415 - an extra

        try:
            kept = await line.js.get_msg(BUCKET_STREAM, subject=subject)
        except NotFoundError:
            return None
        try:
            lease = msgspec.json.decode(kept.data, type=Lease)
        except UNREADABLE:
            lease = None
        run_id, now_s = name_of(subject.removeprefix(f"$KV.{BUCKET}.")), clock.monotonic_s()
        before = self.runs.get(run_id)
        if before is None:
            return KnownRun(run_id, kept.seq, lease, now_s)
        if before.revision == kept.seq:
            return KnownRun(run_id, kept.seq, lease, before.changed_s, before.has_changed)
        return KnownRun(run_id, kept.seq, lease, now_s, has_changed=True)
