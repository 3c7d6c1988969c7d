"""Which run is watched: its settings; run.json, what it is; coordinator.json, how to reach who watches it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from holter.clock import rfc3339
from holter.records import Action, Attached, Diagnosis


class EarlierRuns(Protocol):
    """What earlier runs left in the memory."""

    def recall(self, diagnosis: Diagnosis, identity: "RunIdentity") -> Diagnosis:
        """The same diagnosis with what is known of it; from memory alone, no disk."""

    def remember(self, diagnosis: Diagnosis, identity: "RunIdentity") -> None:
        """Write it down; called where the disk may take its time."""


@dataclass(frozen=True)
class RunSettings:
    """Which run is watched, and where it is written down."""

    run_dir: Path
    run_id: str
    address: str
    """`http://host:port`"""
    world_size: int = 0
    """0: what the first sidecar says."""
    action: Action = "halt"
    """The most that may be done about a diagnosis."""
    save_deadline_s: float = 300.0
    """How long a save may take in a halt."""
    journal_bytes: int = 64 * 2**20
    """Size of the journal in all; more for thousands of ranks, so that it holds a look at each of them."""
    goes_on: bool = False
    """The job is in the life that a former coordinator watched, however long ago that wrote its last word."""
    earlier: EarlierRuns | None = None
    public_url: str = ""
    """What people reach the coordinator by; empty: `address`."""

    @property
    def link(self) -> str:
        """Where links of messages, metrics and dashboards lead."""
        return self.public_url.rstrip("/") or self.address


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: public; fields are added, never changed."""

    schema: int = 1
    run_id: str
    command: list[str] = []
    framework: str = ""
    hosts: list[str] = []
    world_size: int = 0
    ranks: list[int] = []
    """Those that attached."""
    versions: dict[str, str] = {}
    environment: dict[str, str] = {}
    """What libraries read of rank 0's environment."""
    code: dict[str, str] = {}
    """Files beside the script -> digest of their content."""
    started_at: str
    ended_at: str | None = None
    steps: int | None = None
    """Completed when it ended; None: it has not."""
    coordinator: str
    """`http://host:port`"""


ACCESS = "coordinator.json"


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """`coordinator.json`: how to reach the coordinator that watches a run now; readable by its owner alone."""

    address: str
    token: str
    """To report."""
    halt_token: str = ""
    read_token: str = ""
    pid: int
    clock_base_ns: int = 0
    clock_boot: str = ""
    """The run's clock, and the boot of the host for which that number holds."""


class Introductions:
    """What the ranks said of themselves when they attached; cheap to add to, made into a record when it is written."""

    def __init__(self, run_id: str, world_size: int, started_ns: int, address: str) -> None:
        self._base = RunIdentity(run_id=run_id, started_at=rfc3339(started_ns), coordinator=address)
        self._world_size = world_size
        self._hosts: set[str] = set()
        self._ranks: set[int] = set()
        self._speaker: tuple[int, Attached] | None = None
        """The lowest rank's command and versions speak for the run."""

    @property
    def started_at(self) -> str:
        """RFC 3339."""
        return self._base.started_at

    def add(self, rank: int, attached: Attached) -> bool:
        """A rank attached; False if that was known."""
        is_new = rank not in self._ranks or attached.host not in self._hosts
        self._ranks.add(rank)
        self._hosts.add(attached.host)
        self._world_size = max(self._world_size, attached.world_size)
        if self._speaker is None or rank <= self._speaker[0]:
            self._speaker = (rank, attached)
        return is_new

    def record(self, ended_ns: int | None = None, steps: int | None = None) -> RunIdentity:
        """The run as far as it is known."""
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
