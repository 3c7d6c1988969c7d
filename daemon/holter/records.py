"""The four records of the pipeline: Observation -> Finding -> Diagnosis -> Directive.

    probes      --Observation-->  detectors  --Finding-->  diagnosis  --Diagnosis-->  halting  --Directive-->  rank

Records are frozen and know nothing of clocks, sockets or torch. What a rank says (Observation) travels as msgpack and is kept in
the journal as such, so that a past run can be judged again; what is said of it (Diagnosis) is public JSON, `INTERFACE.md`.
Steps count optimizer steps from 0: step 30 is the one that runs when 30 have been completed.
"""

import enum
from typing import Any, Literal

import msgspec

Severity = Literal["critical", "warning", "info"]
Basis = Literal["observation", "documented", "inference"]
Action = Literal["observe", "notify", "halt"]

Where = Literal["input", "loss", "gradient", "reduced_gradient"]
"""In which kind of tensor a value was met. `gradient` is the rank's own, from before any reduction."""


class Phase(enum.IntEnum):
    """What a rank's main thread is doing, as far as its hooks tell."""

    ATTACH = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    CHECKPOINT = 5
    EVALUATION = 6
    OTHER = 7
    """Between two hooks: the script's own code."""


class Nonfinite(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of one rank that held NaN or Inf."""

    where: Where
    name: str
    """Parameter name, path in the batch (`batch['x'][0]`), or `loss`."""
    nans: int
    infs: int
    numel: int
    order: int = 0
    """Place in backward order for a gradient, 0 the first to be ready; else 0."""
    healthy_steps: int = 0
    """How many healthy steps had non-finite values in this same place: a mask of -inf is not a fault."""


class Attached(msgspec.Struct, frozen=True, tag="attached", kw_only=True):
    """A rank put holter on."""

    pid: int
    host: str
    world_size: int
    local_rank: int
    command: list[str]
    versions: dict[str, str]
    framework: str = "loop"


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One line of the census."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    is_buffer: bool
    optimizer: int
    """Which optimizer holds it, in order of first step; -1: none."""


class Census(msgspec.Struct, frozen=True, tag="census", kw_only=True):
    """Names, shapes, dtypes and frozenness of a model, in parts that fit the page."""

    model: int
    wrapper: str
    """Class of what the script calls: `DistributedDataParallel` says that replicas must agree."""
    is_replicated: bool
    """Known from the wrapper, never guessed."""
    optimizers: list[str]
    backward_order: list[int]
    """Indices of entries in the order their gradients became ready; empty until one backward ran."""
    part: int
    parts: int
    entries: list[TensorEntry]


class StepDone(msgspec.Struct, frozen=True, tag="step", kw_only=True):
    """One optimizer step of one rank, small enough to travel at every step."""

    seconds: float
    phase_seconds: dict[str, float]
    micro_steps: int
    loss: float | None
    """Mean of what `backward` was called on, over the micro-steps; None where it was no scalar or not yet read."""
    gradient_norm: float | None
    """Of the rank's own gradient where the framework shows it, else of the reduced one."""
    learning_rate: float | None
    batch: int
    """Fingerprint of the step's batches, 0 where none was seen."""
    roots: dict[str, int]
    """Root fingerprint of each class of tensors that was read at this step."""
    nonfinite: list[Nonfinite]
    overhead_ratio: float
    check_interval: int


class Table(msgspec.Struct, frozen=True, tag="table", kw_only=True):
    """Fingerprints behind a root: a tensor each, in census order. Kept by the sidecar, sent on request."""

    tensor_class: str
    root: int
    names: list[str]
    fingerprints: list[int]
    norms: list[float]
    """L2 norms beside the fingerprints, to tell which side is implausible; empty where they were not taken."""


class PackedTable(msgspec.Struct, frozen=True, tag="packed_table", kw_only=True):
    """A Table as the rank writes it to the page: raw arrays in census order; goes no further than the sidecar."""

    tensor_class: str
    root: int
    fingerprints: bytes
    """uint64, little-endian; 0 for a tensor that was not read."""
    norms: bytes
    """float32, little-endian; empty where they were not taken."""
    over: Literal["parameters", "buffers"] = "parameters"
    """Which entries of the census the arrays run over."""
    keys: list[str] = []
    """Of an optimizer's state: the arrays run over all entries once for each of these."""


class Logged(msgspec.Struct, frozen=True, tag="logged", kw_only=True):
    """What only the script knows, told by `watch.log` or a framework's own log."""

    values: dict[str, float]


class Origin(msgspec.Struct, frozen=True, tag="origin", kw_only=True):
    """Where a NaN was born: the first module that made one out of finite inputs, found by replaying the step's batch."""

    module: str
    """Empty when the replay made no NaN: then it came from outside the model."""
    module_class: str
    is_input_finite: bool
    input_absmax: float
    replayed: bool
    reason: str
    """Why there was no replay, or what it showed."""


class Farewell(msgspec.Struct, frozen=True, tag="farewell", kw_only=True):
    """A rank's last words: its interpreter is ending and knows why."""

    kind: Literal["end", "exception", "interrupt"]
    text: str
    """Exception type and message; empty for an ordinary end."""
    where: str
    """File, line and function of the innermost frame of the script."""


class Exited(msgspec.Struct, frozen=True, tag="exited", kw_only=True):
    """A rank's process ended, as its sidecar saw it."""

    pid: int
    exit_code: int | None
    """None where the parent reaped it before anyone could look."""
    signal: int | None
    out_of_memory: bool
    last_step: int
    last_phase: Phase
    farewell: Farewell | None


class SightLost(msgspec.Struct, frozen=True, tag="sight_lost", kw_only=True):
    """holter itself is blind somewhere: never to be taken for health."""

    what: str
    dropped: int


Body = Attached | Census | StepDone | Table | PackedTable | Logged | Origin | Farewell | Exited | SightLost


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank, or the sidecar that watches it, measured."""

    rank: int
    step: int
    at_ns: int
    """Wall clock of the host that observed, nanoseconds since the epoch."""
    body: Body


class TableRequest(msgspec.Struct, frozen=True):
    """Evidence that a finding lacks: these ranks' tables of a class at a step."""

    tensor_class: str
    step: int
    ranks: tuple[int, ...]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One proof, with its numbers."""

    kind: str
    summary: str
    values: dict[str, Any] = {}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A detector's verdict: what is wrong, where, since when, with the numbers that prove it."""

    detector: str
    severity: Severity
    first_step: int
    detected_step: int
    ranks: tuple[int, ...]
    """Culprits as far as the detector can tell; every rank that shows it where it cannot."""
    tensors: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    summary: str
    facts: dict[str, Any] = {}
    """What was seen, and what was looked for and not seen: the differential diagnosis reads these."""
    evidence: tuple[Evidence, ...] = ()
    needs: tuple[TableRequest, ...] = ()
    """Not enough evidence yet: ask for these, and judge again."""


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """The collective that a diagnosis names."""

    group: str
    sequence: int
    operation: str


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, in six parts."""

    do: str
    changes: str
    does_not_fix: str
    expect: str
    verify: str
    otherwise: str


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate root cause; the slug is from the public catalogue."""

    cause: str
    confidence: float
    basis: Basis
    ranks: tuple[int, ...]
    tensors: tuple[str, ...]
    modules: tuple[str, ...]
    collective: Collective | None = None
    mechanism: str
    evidence: tuple[Evidence, ...]
    would_refute: str
    fix: Fix


class Directive(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done about a diagnosis, and why."""

    directive: Action
    reason: str
    checkpoint: str | None = None
    exit_code: int | None = None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """An incident, explained: ranked causes, best first. Public JSON; fields are added, never changed."""

    schema: int = 1
    id: str
    run_id: str
    severity: Severity
    symptom: str
    first_step: int
    detected_step: int
    detected_after_s: float
    opened_at: str
    closed_at: str | None = None
    strikes: int = 1
    causes: tuple[Cause, ...]
    action: Directive
