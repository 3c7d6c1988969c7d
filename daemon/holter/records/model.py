"""Who a rank is and what it trains: sent at the start, and when it changes."""

import msgspec


class Attached(msgspec.Struct, frozen=True, tag="attached", kw_only=True):
    """holter was attached to a rank."""

    pid: int
    host: str
    world_size: int
    local_rank: int
    command: list[str]
    versions: dict[str, str]
    framework: str = "loop"


class FirstStep(msgspec.Struct, frozen=True, tag="begun", kw_only=True):
    """A rank makes its first optimizer step. Steps are counted from here, though the run may have completed many before. Journals call it `begun`."""

    completed: int | None
    """Optimizer steps that the run had completed before, as `source` counts them; None if nobody counts or nothing was restored."""
    source: str = ""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One line of the census."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    is_buffer: bool
    optimizer: int
    """Which optimizer holds it, in order of first step; -1: none."""
    is_replicated: bool = False
    """Must be equal on all ranks: known from DDP, from a DTensor's placements, or from a reduction that the script itself calls."""
    is_sharded: bool = False
    """This rank holds a part of it."""
    component: int = 0
    """Index into the census's components."""
    module_class: str = ""
    """Class of the module that owns it: `Embedding`, `BatchNorm2d`."""
    is_persistent: bool = True
    """False for a buffer that no state dict holds."""
    marks: int = 0
    """`Mark`s as of this census, or-ed; 0 where nobody looked."""
    pattern: str = ""
    """Of a small buffer: `geometric` or `arithmetic` where its values are such a progression, as frequencies and positions are."""
    num_distinct: int = -1
    """Of a small buffer: different values; -1: not counted."""


class Component(msgspec.Struct, frozen=True, array_like=True):
    """A model of the script: what its tensors' names begin with, and how it is run."""

    name: str
    """Prefix of its tensors' names without the last dot; empty for the model that is trained."""
    module_class: str
    wrapper: str
    is_trained: bool
    """An optimizer holds some of its parameters, or did."""
    num_replicas: int = 0
    """Ranks in the wrapper's group; 0: nothing says that it is replicated."""
    is_find_unused: bool = False
    """DDP was told to look for parameters that a step does not use."""


class Census(msgspec.Struct, frozen=True, tag="census", kw_only=True):
    """Names, shapes, dtypes and frozenness of a model, in parts that fit the page."""

    model: int
    wrapper: str
    """Class of what the script calls: `DistributedDataParallel` says that replicas must agree."""
    is_replicated: bool
    """Known from the wrapper, never guessed."""
    optimizers: list[str]
    components: list[Component] = []
    num_held: list[int] = []
    """Parameters that each optimizer holds."""
    num_foreign: list[int] = []
    """Those among them that belong to no model that is watched."""
    num_foreign_with_gradient: list[int] = []
    declared_frozen: list[str] = []
    """Patterns of names that the user's settings declare frozen."""
    backward_order: list[int]
    """Indices of entries in the order their gradients became ready; empty until one backward ran."""
    part: int
    parts: int
    entries: list[TensorEntry]


class Group(msgspec.Struct, frozen=True, array_like=True):
    """A process group, as one of its ranks knows it."""

    name: str
    description: str
    ranks: tuple[int, ...] = ()
    """Empty if another of its ranks sends them, or if every rank belongs to it."""
    last_entered: int = -1
    """Sequence number; -1: unknown."""
    last_completed: int = -1


class OnDevice(msgspec.Struct, frozen=True, tag="on_device", kw_only=True):
    """Which accelerator a rank computes on; sent once."""

    uuid: str
    """As the driver's tools write it: `GPU-8a1c...`."""


class Groups(msgspec.Struct, frozen=True, tag="groups", kw_only=True):
    """New process groups and their members; sent once, by the three lowest of their ranks."""

    groups: list[Group]
