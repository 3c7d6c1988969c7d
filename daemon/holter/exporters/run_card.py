"""Summary of a run for lists of runs: a coordinator writes it beside its lease, `holter runs` and `holter hub` read it."""

import msgspec

MAX_INCIDENTS = 20
"""Number of newest incidents that the card lists."""


class CardIncident(msgspec.Struct, frozen=True, kw_only=True):
    """One incident in a line."""

    id: str
    severity: str
    cause: str
    title: str
    ranks: str
    """The ranks in words."""
    step: int
    is_open: bool


class RunCard(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one run. Fields are added, never changed."""

    run_id: str
    run_dir: str
    page: str
    """Address at which its coordinator serves the page."""
    host: str
    """Host of the coordinator."""
    state: str
    """One of running, halting, halted, ended."""
    started_at: str
    updated_at: str
    world_size: int
    ranks: int
    """Number of ranks that have attached."""
    connected: int
    steps: int
    incidents: list[CardIncident] = []
    num_incidents: int = 0
    num_open: int = 0
    is_critical: bool = False
    """Whether one of the open incidents is critical."""
    blind: int = 0
    """Number of things that holter cannot see in this run."""
    dropped: int = 0
    """Number of records lost between ranks and coordinator."""
    metrics: str = ""
    """The coordinator's own /metrics about job and incidents in the classic text format; counters that are 0 are left
    out."""
