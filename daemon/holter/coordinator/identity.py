"""Which run is watched: its settings, its identity (run.json), and how to reach its coordinator (coordinator.json)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from holter.clock import rfc3339
from holter.records import Action, Attached, Diagnosis


class EarlierRuns(Protocol):
    """What the memory holds of earlier runs."""

    def recall(self, diagnosis: Diagnosis, identity: "RunIdentity") -> Diagnosis:
        """Add what is known from earlier runs to a diagnosis; uses memory only, no disk."""

    def remember(self, diagnosis: Diagnosis, identity: "RunIdentity") -> None:
        """Write a diagnosis to the memory; called where the disk may take its time."""


@dataclass(frozen=True)
class RunSettings:
    """Which run is watched, and where it is recorded."""

    run_dir: Path
    run_id: str
    address: str
    """`http://host:port`."""
    world_size: int = 0
    """Number of ranks; 0: as the first sidecar says."""
    action: Action = "halt"
    """The most that may be done about a diagnosis."""
    save_deadline_s: float = 300.0
    """Seconds that a save may take in a halt."""
    journal_bytes: int = 64 * 2**20
    """Total size of the journal; more for thousands of ranks, so that an examination of each fits."""
    goes_on: bool = False
    """Whether the job is still in the life that a former coordinator watched, however long ago that one last wrote."""
    earlier: EarlierRuns | None = None
    public_url: str = ""
    """Address by which people reach the coordinator; empty: `address`."""

    @property
    def link(self) -> str:
        """Address that links in messages, metrics and dashboards lead to."""
        return self.public_url.rstrip("/") or self.address


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `run.json`. It is public: fields are added, never changed."""

    schema: int = 1
    run_id: str
    command: list[str] = []
    framework: str = ""
    hosts: list[str] = []
    world_size: int = 0
    ranks: list[int] = []
    """Ranks that attached."""
    versions: dict[str, str] = {}
    environment: dict[str, str] = {}
    """Variables in rank 0's environment that libraries read."""
    code: dict[str, str] = {}
    """Digest of each source file beside the script."""
    started_at: str
    ended_at: str | None = None
    steps: int | None = None
    """Completed steps when it ended; None if it has not."""
    coordinator: str
    """Address of the coordinator: `http://host:port`."""


ACCESS = "coordinator.json"


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `coordinator.json`: how to reach the coordinator that watches a run now; readable by its owner alone."""

    address: str
    token: str
    """Token for reporting."""
    halt_token: str = ""
    read_token: str = ""
    pid: int
    clock_base_ns: int = 0
    clock_boot: str = ""
    """The run's clock, and the boot of the host for which that number is valid."""


class Introductions:
    """What the ranks said of themselves when they attached.

    Adding is cheap; a record is made only when it is written.
    """

    def __init__(self, run_id: str, world_size: int, started_ns: int, address: str) -> None:
        self._base = RunIdentity(run_id=run_id, started_at=rfc3339(started_ns), coordinator=address)
        self._world_size = world_size
        self._hosts: set[str] = set()
        self._ranks: set[int] = set()
        self._speaker: tuple[int, Attached] | None = None
        """The lowest rank, whose command and versions stand for the run."""

    @property
    def started_at(self) -> str:
        """When the run started, in RFC 3339."""
        return self._base.started_at

    def add(self, rank: int, attached: Attached) -> bool:
        """Add a rank that attached; return whether it or its host is new."""
        is_new = rank not in self._ranks or attached.host not in self._hosts
        self._ranks.add(rank)
        self._hosts.add(attached.host)
        self._world_size = max(self._world_size, attached.world_size)
        if self._speaker is None or rank <= self._speaker[0]:
            self._speaker = (rank, attached)
        return is_new

    def record(self, ended_ns: int | None = None, steps: int | None = None) -> RunIdentity:
        """Return what is known of the run."""
        spoken = self._speaker[1] if self._speaker else None
        return msgspec.structs.replace(
            self._base,
            command=spoken.command if spoken else [],
            framework=spoken.framework if spoken else "",
            versions=spoken.versions if spoken else {},
            environment=spoken.environment if spoken else {},
            code=spoken.code if spoken else {},
            hosts=sorted(self._hosts),
            world_size=self._world_size,
            ranks=sorted(self._ranks),
            ended_at=None if ended_ns is None else rfc3339(ended_ns),
            steps=steps,
        )
