"""What is shown of a run among others: a coordinator writes it beside its lease, `holter runs` and `holter hub` read it."""

import msgspec

MAX_INCIDENTS = 20
"""The newest of a run that are told."""


class CardIncident(msgspec.Struct, frozen=True, kw_only=True):
    """One incident in a line."""

    id: str
    severity: str
    cause: str
    title: str
    ranks: str
    """For people."""
    step: int
    is_open: bool


class RunCard(msgspec.Struct, frozen=True, kw_only=True):
    """One run; fields are added, never changed."""

    run_id: str
    run_dir: str
    page: str
    """Where its coordinator serves."""
    host: str
    """Of the coordinator."""
    state: str
    """running, halting, halted, ended."""
    started_at: str
    updated_at: str
    world_size: int
    ranks: int
    """That came."""
    connected: int
    steps: int
    incidents: list[CardIncident] = []
    num_incidents: int = 0
    num_open: int = 0
    is_critical: bool = False
    """One that is open is critical."""
    blind: int = 0
    """How much holter cannot see there."""
    dropped: int = 0
    """Records that were lost between ranks and coordinator."""
    metrics: str = ""
    """What the coordinator's own /metrics say of job and incidents, in the classic text; counters that are 0 are left out."""
