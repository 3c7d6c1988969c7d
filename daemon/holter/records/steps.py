"""What a rank reports of each step, and the tables behind it."""

from typing import Literal

import msgspec

from holter.records.vocabulary import View, Where


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
    is_from_clip: bool = False
    """Of a reduced gradient: this rank's shards were finite before the script clipped by the norm of all, which was not."""


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
    view: View = "local"
    """Whose gradients the norm is of."""
    numbers: dict[str, float] = {}
    """Other figures of this step, few and small; `NUMBERS` names those that detectors read."""


NUMBERS = {
    "clip.norm": "total norm that a clip call returned, before clipping",
    "clip.limit": "its limit",
    "clip.is_sharded": "1 if what was clipped is this rank's shard and the norm is the shard's own",
    "loss_scale": "the scaler's factor",
    "loss.is_divided": "1 if the loss that backward got is a quotient or product with a constant, as an accumulating loop makes it; else 0",
    "sum.<class>": "sum over all elements of a class of tensors that must agree: a projection, so that its spread tells the ranks' distance",
    "norm.<class>": "L2 norm of the same",
    "batch.<leaf>.min": "of a tensor in the batch; also .max, .mean, .absmax; integers and floats alike",
    "batch.<leaf>.is_constant": "1 if all its elements are equal",
    "batch.num_samples": "first dimension of the batch, summed over micro-steps",
    "log.<name>": "what the script logged",
    "ema.distance": "relative distance of an averaged copy from the live weights, on a sample",
    "ema.moved": "1 if the averaged copy changed since it was last logged",
    "rewards.num_groups": "of a [groups, samples] tensor of rewards or advantages: groups",
    "rewards.num_flat_groups": "groups without any spread",
    "ratio.first_deviation": "largest distance of importance ratios from 1 on the first micro-step after an update",
}
"""Names in `StepDone.numbers` and `Logged.values`, with their meaning."""


class Table(msgspec.Struct, frozen=True, tag="table", kw_only=True):
    """Fingerprints behind a root: a tensor each, in census order. Kept by the sidecar, sent on request."""

    tensor_class: str
    root: int
    names: list[str]
    fingerprints: list[int]
    norms: list[float]
    """L2 norms beside the fingerprints, to tell which side is implausible; empty where they were not taken."""
    sums: list[float] = []
    """Sums of all elements: their differences between ranks estimate how far apart they are."""
    marks: list[int] = []
    """`Mark`s of each tensor, or-ed."""


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
    names: list[str] = []
    """What the arrays run over where that is not the census: names of hyper-parameters."""
    sums: bytes = b""
    """float64, little-endian; empty where they were not taken."""
    marks: bytes = b""
    """uint8, `Mark`s."""


class Logged(msgspec.Struct, frozen=True, tag="logged", kw_only=True):
    """Values that only the script knows, from `watch.log` or a framework's own log."""

    values: dict[str, float]


class Origin(msgspec.Struct, frozen=True, tag="origin", kw_only=True):
    """Where a NaN began: the first module that made one out of finite inputs, found by replaying the step's batch."""

    module: str
    """Empty when the replay made no NaN: then it came from outside the model."""
    module_class: str
    is_input_finite: bool
    input_absmax: float
    replayed: bool
    reason: str
    """Why there was no replay, or what it showed."""
    dtype: str = ""
    """Of the output."""
    dtype_max: float = 0.0
    """The largest number of that dtype."""
    output_nans: int = 0
    output_infs: int = 0
    output_absmax: float = 0.0
    """Of what is finite in the output."""
    weight_absmax: float = 0.0
