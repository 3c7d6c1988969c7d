"""run.json, what this run is, and coordinator.json, how to reach who watches it."""

import msgspec

from holter.clock import rfc3339
from holter.records import Attached


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
    started_at: str
    ended_at: str | None = None
    coordinator: str
    """`http://host:port`"""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """`coordinator.json`: readable by its owner alone."""

    address: str
    token: str
    pid: int


def with_rank(identity: RunIdentity, rank: int, attached: Attached) -> RunIdentity:
    """The identity once this rank has attached; rank 0's command and versions speak for the run."""
    speaks = rank == 0 or not identity.command
    return msgspec.structs.replace(
        identity,
        command=attached.command if speaks else identity.command,
        framework=attached.framework if speaks else identity.framework,
        versions=identity.versions | attached.versions if speaks else attached.versions | identity.versions,
        hosts=sorted({*identity.hosts, attached.host}),
        world_size=max(identity.world_size, attached.world_size),
        ranks=sorted({*identity.ranks, rank}),
    )


def ended(identity: RunIdentity, now_ns: int) -> RunIdentity:
    """The identity of a run that is over."""
    return msgspec.structs.replace(identity, ended_at=rfc3339(now_ns))


def as_json(record: msgspec.Struct) -> bytes:
    """For a file that people open."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
