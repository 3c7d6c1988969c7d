"""What a rank reports of itself: its identity and model, each step, the tables behind it, and rare events."""

import enum
from typing import Literal

import msgspec

Where = Literal["input", "loss", "gradient", "reduced_gradient"]
"""Kind of tensor in which a value was found. `gradient` is the rank's own, before any reduction."""
View = Literal["local", "replicated", "sharded"]
"""Where a statistic was taken. `local`: on the rank's own values before any reduction. `replicated`: after reduction,
equal on all replicas. `sharded`: after reduction, cut into shards."""


class Mark(enum.IntFlag):
    """Oddities of one tensor's values, as bits."""

    CONSTANT = 1
    """The tensor has more than one element and all are equal."""
    ZERO = 2
    """All elements are zero."""
    NONFINITE = 4
    ROUNDED = 8
    """Float32 or float64, not constant, and the low mantissa bits of (nearly) all values are zero: the values passed
    through a narrower dtype."""
    HUGE = 16
    """Some magnitude exceeds 1e6, or there are as many subnormal values as only uninitialised memory holds."""


OWN = "own"
"""Axis of a tensor that no other rank holds too: it can only be compared with its own history."""
IGNORED = "ignored"
"""Axis of a plain parameter that its wrapper was told to leave alone: it is a rank's own, or a replica that nobody
reduces. `ignored:dp`: the parameter lies on a part of a mesh, along an axis that has a data-parallel name in the whole
mesh."""


def is_ignored(axis: str) -> bool:
    """Whether the tensors compared along this axis may be unreduced, because the wrapper ignores them.

    >>> is_ignored("ignored:dp_replicate"), is_ignored("dp_replicate")
    (True, False)
    """
    return axis.partition(":")[0] == IGNORED


class Named(msgspec.Struct, frozen=True, array_like=True):
    """Names of tensors or modules: all are counted, only the first few are listed."""

    count: int = 0
    names: list[str] = []


class Attached(msgspec.Struct, frozen=True, tag="attached", kw_only=True):
    """holter was attached to a rank's process."""

    pid: int
    host: str
    world_size: int
    local_rank: int
    command: list[str]
    versions: dict[str, str]
    framework: str = "loop"
    environment: dict[str, str] = {}
    """Environment variables that libraries read, without secrets. Sent by rank 0 only, as is `code`."""
    code: dict[str, str] = {}
    """Digest of each source file beside the script, the script itself first."""


class FirstStep(msgspec.Struct, frozen=True, tag="begun", kw_only=True):
    """A rank makes its first optimizer step; steps are counted from here. Tagged `begun`."""

    completed: int | None
    """Optimizer steps that the run had completed before, according to `source`; None if nobody counts or nothing was
    restored."""
    source: str = ""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor in the census."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    is_buffer: bool
    optimizer: int
    """Index of the optimizer that holds it, in order of their first steps; -1: none."""
    is_replicated: bool = False
    """Whether it must be equal on all ranks: known from DDP, from a DTensor's placements, or from a reduction that the
    script itself calls."""
    is_sharded: bool = False
    """Whether this rank holds only a part of it."""
    component: int = 0
    """Index into the census's components."""
    module_class: str = ""
    """Class of the module that owns it: `Embedding`, `BatchNorm2d`."""
    is_persistent: bool = True
    """False for a buffer that no state dict contains."""
    marks: int = 0
    """`Mark`s at the time of this census, or-ed; 0 if nobody looked."""
    pattern: str = ""
    """For a small buffer: `geometric` or `arithmetic` if its values form such a progression, as frequencies and
    positions do."""
    num_distinct: int = -1
    """For a small buffer: number of different values; -1: not counted."""
    axis: str = ""
    """Mesh axes along which other ranks hold the same bytes, joined by `+`; or `own`, `ignored`. Empty: all ranks if
    `is_replicated`, else not known."""
    placements: str = ""
    """Placement on its mesh: `replicate=R,shard=S(0)`; P is partial. Empty if it lies on no known mesh."""
    policy: str = ""
    """Dtypes that a wrapper casts it to for computing and for reducing: `bfloat16,float32`. Empty if it is not cast."""


class MeshAxis(msgspec.Struct, frozen=True, array_like=True):
    """One axis of a mesh of ranks."""

    name: str
    size: int
    stride: int
    """Difference between the rank numbers of two neighbours: a rank's place on the axis is `rank // stride % size`."""
    kind: str = ""
    """`tensor`: the ranks compute parts of one result from the same inputs. `data`: each computes from inputs of its
    own. Empty: not known."""


class Component(msgspec.Struct, frozen=True, array_like=True):
    """One model of the script: the prefix of its tensors' names, and how it is used."""

    name: str
    """Prefix of its tensors' names without the last dot; empty for the model that is trained."""
    module_class: str
    wrapper: str
    is_trained: bool
    """Whether an optimizer holds some of its parameters, or once did."""
    num_replicas: int = 0
    """Number of ranks in the wrapper's group; 0 if nothing says that the model is replicated."""
    is_find_unused: bool = False
    """Whether DDP was told to look for parameters that a step does not use (`find_unused_parameters`)."""


class Census(msgspec.Struct, frozen=True, tag="census", kw_only=True):
    """The tensors of a model with their shapes, dtypes and whether they are frozen; sent in parts that fit the shared page."""

    model: int
    wrapper: str
    """Class of the object that the script calls; `DistributedDataParallel` implies that replicas must agree."""
    is_replicated: bool
    """Whether the model is replicated: known from the wrapper, never guessed."""
    optimizers: list[str]
    components: list[Component] = []
    num_held: list[int] = []
    """Number of parameters that each optimizer holds."""
    num_foreign: list[int] = []
    """How many of them belong to no watched model."""
    num_foreign_with_gradient: list[int] = []
    declared_frozen: list[str] = []
    """Name patterns that the user's settings declare frozen."""
    backward_order: list[int]
    """Indices of the entries in the order in which their gradients became ready; empty until a backward pass has
    run."""
    part: int
    parts: int
    entries: list[TensorEntry]
    axes: list[MeshAxis] = []
    """Axes of the meshes that the parameters lie on, outermost first; the same on all ranks."""
    stages: list[int] = []
    """Numbers of the stages that this rank computes in torch's pipelines, counted from 0."""


class Group(msgspec.Struct, frozen=True, array_like=True):
    """A process group, as one of its ranks knows it."""

    name: str
    description: str
    ranks: tuple[int, ...] = ()
    """Global ranks of the members; empty if another member sends them, or if every rank belongs to the group."""
    last_entered: int = -1
    """Sequence number of the last collective that was entered; -1: unknown."""
    last_completed: int = -1


class OnDevice(msgspec.Struct, frozen=True, tag="on_device", kw_only=True):
    """Which accelerator a rank computes on; sent once."""

    uuid: str
    """UUID as the driver's tools write it: `GPU-8a1c...`."""


class Groups(msgspec.Struct, frozen=True, tag="groups", kw_only=True):
    """New process groups and their members; sent once, by the three lowest ranks of each group."""

    groups: list[Group]


class Nonfinite(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of one rank that held NaN or Inf."""

    where: Where
    name: str
    """Parameter name, path in the batch (`batch['x'][0]`), or `loss`."""
    nans: int
    infs: int
    numel: int
    order: int = 0
    """For a gradient: place in backward order, 0 is the first to become ready. Otherwise 0."""
    healthy_steps: int = 0
    """Number of healthy steps that had non-finite values in this same place, as a mask of -inf does without being a
    fault."""
    stage: int = -1
    """Number of the pipeline stage that this rank computes, from 0; -1 if it is in no known pipeline."""
    is_received: bool = False
    """For an input: whether the previous pipeline stage sent it."""
    is_from_clip: bool = False
    """For a reduced gradient: whether this rank's shards were finite until the script clipped by the norm of all ranks,
    which was not."""
    received_from: int = -1
    """For an input: the rank that sent it in this step, as a pipeline stage does; -1 if none is known."""


class StepDone(msgspec.Struct, frozen=True, tag="step", kw_only=True):
    """One optimizer step of one rank, small enough to be sent at every step."""

    seconds: float
    phase_seconds: dict[str, float]
    micro_steps: int
    loss: float | None
    """Mean over the micro-steps of what `backward` was called on; None if it was no scalar or has not been read yet."""
    gradient_norm: float | None
    """Norm of the rank's own gradient if the framework shows it, else of the reduced gradient."""
    learning_rate: float | None
    batch: int
    """Fingerprint of the step's batches; 0 if none was seen."""
    roots: dict[str, int]
    """Root fingerprint of each class of tensors that was read at this step."""
    nonfinite: list[Nonfinite]
    overhead_ratio: float
    check_interval: int
    view: View = "local"
    """Which gradients `gradient_norm` was taken of."""
    numbers: dict[str, float] = {}
    """A few other figures of this step; `NUMBERS` lists those that detectors read."""

    @property
    def num_divided(self) -> int:
        """Number by which the script divided the loss of each backward pass, as a loop that accumulates gradients does.

        The loss that the script means is larger by this factor.
        """
        return self.micro_steps if self.micro_steps > 1 and self.numbers.get("loss.is_divided") == 1.0 else 1


NUMBERS = {
    "clip.norm": "total norm that a clip call returned, before clipping",
    "clip.limit": "its limit",
    "clip.factor": "norm of this rank's own shards of the gradients as the optimizer is given them, over what the reduction left",
    "clip.given": "the former of the two",
    "clip.is_sharded": "1 if what was clipped is this rank's shard and the norm is the shard's own",
    "loss_scale": "the scaler's factor",
    "backward.after_reduction": "1 if the step's last backward pass reduced nothing: what it added, or all of the step, is the rank's own",
    "loss.is_divided": "1 if the loss that backward got is a quotient or product with a constant, as an accumulating loop makes it, or a pipeline divides the gradients itself; else 0",
    "sum.<class>": "sum over all elements of a class of tensors that must agree: a projection, so that its spread tells the ranks' distance",
    "norm.<class>": "L2 norm of the same",
    "batch.<leaf>.min": "of a tensor in the batch; also .max, .mean, .absmax; integers and floats alike",
    "batch.<leaf>.spread": "standard deviation over a sample of its elements",
    "batch.<leaf>.is_constant": "1 if all its elements are equal",
    "batch.num_samples": "first dimension of the batch, summed over micro-steps",
    "log.<name>": "what the script logged",
    "ema.distance": "relative distance of an averaged copy from the live weights, on a sample",
    "ema.moved": "1 if the averaged copy changed since it was last logged",
    "memory.host_bytes": "resident memory of the rank",
    "memory.host_left_bytes": "what host or container have left; also memory.device_left_bytes",
    "memory.device_bytes": "what tensors hold of the device; memory.device_cached_bytes with what the allocator keeps",
    "rewards.num_groups": "of a [groups, samples] tensor of rewards or advantages: groups",
    "rewards.num_flat_groups": "groups without any spread",
    "ratio.first_deviation": "largest distance of importance ratios from 1 on the first micro-step after an update",
}
"""Names in `StepDone.numbers` and `Logged.values`, with their meaning."""


class Table(msgspec.Struct, frozen=True, tag="table", kw_only=True):
    """The fingerprints behind a root, one for each tensor, in census order.

    Kept by the sidecar and sent on request.
    """

    tensor_class: str
    root: int
    names: list[str]
    fingerprints: list[int]
    norms: list[float]
    """L2 norms of the tensors, which help to tell which side is implausible; empty if they were not taken."""
    sums: list[float] = []
    """Sum of all elements of each tensor; the difference between two ranks estimates how far apart they are."""
    marks: list[int] = []
    """`Mark`s of each tensor, or-ed."""


class PackedTable(msgspec.Struct, frozen=True, tag="packed_table", kw_only=True):
    """A Table as the rank writes it to the shared page: raw arrays in census order.

    It travels no further than the sidecar.
    """

    tensor_class: str
    root: int
    fingerprints: bytes
    """uint64, little-endian; 0 for a tensor that was not read."""
    norms: bytes
    """float32, little-endian; empty if they were not taken."""
    over: Literal["parameters", "buffers"] = "parameters"
    """Which entries of the census the arrays cover."""
    keys: list[str] = []
    """Keys of an optimizer's state; the arrays hold all entries once for each key."""
    names: list[str] = []
    """Names of hyper-parameters that the arrays cover instead of the census's entries."""
    sums: bytes = b""
    """float64, little-endian; empty if they were not taken."""
    marks: bytes = b""
    """uint8, one value of `Mark`s for each entry."""


class Logged(msgspec.Struct, frozen=True, tag="logged", kw_only=True):
    """Values that only the script knows, from `watch.log` or from a framework's own log."""

    values: dict[str, float]


class Preparing(msgspec.Struct, frozen=True, tag="preparing", kw_only=True):
    """holter prepares something in a background thread, which may slow the rank down; sent at the beginning and at the end."""

    what: str
    """`kernels`: they are compiled for the rank's device."""
    is_over: bool
    seconds: float = 0.0
    num: int = 0
    """Number of things that were prepared."""


class Origin(msgspec.Struct, frozen=True, tag="origin", kw_only=True):
    """Where a NaN began: the first module that made one from finite inputs, found by replaying the step's batch."""

    module: str
    """Name of the module; empty if the replay made no NaN, so that it came from outside the model."""
    module_class: str
    is_input_finite: bool
    input_absmax: float
    replayed: bool
    reason: str
    """Why there was no replay, or what it showed."""
    dtype: str = ""
    """Dtype of the output."""
    dtype_max: float = 0.0
    """Largest finite number of that dtype."""
    output_nans: int = 0
    output_infs: int = 0
    output_absmax: float = 0.0
    """Largest magnitude among the finite values of the output."""
    weight_absmax: float = 0.0
    is_loss_alone: bool = False
    """Whether only the loss, computed by the model's outermost forward, is bad: the outputs of its modules were
    finite."""
    is_by_graph: bool = False
    """Whether it was read from the autograd graph of the loss, without a replay; then it is the module or an operation
    between it and the next one."""
    place: int = -1
    """Place of the module in the order of the forward pass, taken from the graph; -1: unknown."""
    num_models: int = 1
    """Number of models that the step called; the replay covers one of them."""
    are_outputs_finite: bool | None = None
    """Whether everything that the models of the step returned was finite, apart from a loss among it; None if nobody
    could look."""
    operation: str = ""
    """What the autograd graph of the loss shows: `log of 3 of 8 values that are zero or negative`; empty if nothing."""
    is_of_nothing: bool | None = None
    """Whether the graph shows a mean over no values, as for a batch in which no label counts; None if nobody could
    look."""
    lines: list[str] = []
    """Lines of the script that computed the loss, most likely first."""


class ModuleVitals(msgspec.Struct, frozen=True, array_like=True):
    """Figures of one group of parameters of one module after an optimizer step.

    Shares are between 0 and 1, or NaN if nobody looked.
    """

    module: str
    dtype: str
    numel: int
    weight_norm: float
    gradient_norm: float
    """Norm of the gradient as the optimizer receives it."""
    gradient_zeros: float
    gradient_subnormals: float
    gradient_absmax: float
    update_ratio: float
    """Norm of the step's change divided by the norm of the weights, on a sample of elements."""
    changed: float
    """Share of the sampled elements with a non-zero gradient that the step changed."""
    learning_rate: float
    exponents: list[int] = []
    """Histogram of the gradient's exponents: 32 buckets of 8 exponents each, smallest first; empty if it was not
    taken."""


class Vitals(msgspec.Struct, frozen=True, tag="vitals", kw_only=True):
    """The weights compared with their own history, at a step of comparison. In large jobs the ranks take turns."""

    view: View
    modules: list[ModuleVitals]
    num_trainable: int
    """Number of parameters that require gradients and that a stepping optimizer holds."""
    no_gradient: Named = Named()
    """Of these, the parameters whose gradient was None at this step and at all of the last `idle_steps`."""
    zero_gradient: Named = Named()
    """Of these, the parameters whose gradient was exactly zero for as long."""
    idle_steps: int = 0
    """For how many steps in a row the parameters in `no_gradient` and `zero_gradient` have had none."""
    unchanged: Named = Named()
    """Parameters of which no bit changed although the optimizer stepped with a non-zero gradient and learning rate."""
    without_rate: Named = Named()
    """Parameters with a non-zero gradient and a learning rate of exactly zero."""
    unheld: Named = Named()
    """Parameters of a trained model that have a gradient, but that no optimizer which ever stepped holds."""
    is_unheld_at_rest: bool | None = None
    """Whether an optimizer that never stepped holds one of the unheld parameters; None if nobody looked."""
    is_unheld_wrapped: bool = False
    """The unheld parameters are a whole model that the script wrapped (DDP), which nobody does without training it."""
    faint: Named = Named()
    """Matrices with a non-zero gradient whose norm is at most a hundred-millionth of the largest tensor's."""
    rounded: Named = Named()
    """Trained float32 tensors that have changed since the start, but whose low mantissa bits are still all zero."""
    frozen_moved_in_step: Named = Named()
    """Frozen parameters that an optimizer's step changed."""
    frozen_moved_between: Named = Named()
    """Frozen parameters that changed outside an optimizer's step and are not a copy of a live parameter."""
    frozen_scaled: Named = Named()
    """Of these, the parameters whose elements were all multiplied by the same factor."""
    frozen_still_checks: int = 0
    """Number of consecutive comparisons before this one in which no parameter of `frozen_moved_*` had moved; 0 if one
    moves all the time."""
    moved_between: Named = Named()
    """Trained parameters that changed between two steps, outside any optimizer."""
    uncleared_steps: int = 0
    """Number of consecutive checked steps in which non-zero gradients were present before the first backward pass."""
    uncleared_growth: float = 0.0
    """Norm of these left-over gradients, divided by their norm when this began."""


class Witness(msgspec.Struct, frozen=True, array_like=True):
    """What one module showed during one training forward pass."""

    module: str
    module_class: str
    num_calls: int
    output_dtype: str
    output_zeros: float
    """Share of zeros in its output; NaN if nobody looked."""
    input_zeros: float
    was_gradient_on: bool
    """Whether gradients were recorded while it ran."""
    has_gradient_path: bool
    """Whether its output requires a gradient."""
    has_parameters: bool
    is_rounded: bool | None = None
    """Whether its float32 output holds only values of a narrower dtype; None if nobody looked or there were too few
    values."""
    has_gradient: bool | None = None
    """Whether the backward pass brought a non-zero gradient to its output; None if nobody looked."""
    lost_in: str = ""
    """Name of a module that consumes this one's output and gets a gradient itself, but passes back only zeros; empty if
    none."""


class Inspection(msgspec.Struct, frozen=True, tag="inspection", kw_only=True):
    """One forward pass observed with hooks on every module; made rarely, and only to answer a question."""

    reason: Literal["first", "idle", "changed"]
    autocast_dtype: str
    """Dtype of the autocast region in which the model was called; empty if there was none."""
    witnesses: list[Witness]
    num_modules: int
    uncalled: Named = Named()
    """Modules with parameters that this pass did not call."""
    rounded: dict[str, bool] = {}
    """Whether a value that is no witness's output (a group of modules, or a module's input, named `NAME (input)`) holds
    only values of a narrower dtype."""


class Feed(msgspec.Struct, frozen=True, tag="feed", kw_only=True):
    """A data loader at the beginning or the end of a pass over it."""

    loader: int
    """Number of the loader in this process, in order of first use."""
    epoch: int
    """Number of earlier passes that were begun over this loader."""
    is_end: bool
    is_training: bool
    """Whether its batches were trained on; known at the end of the first pass, and always from the second on."""
    dataset: str
    """Class of the data set."""
    dataset_size: int
    """Number of samples; -1 if the data set has no length."""
    num_batches: int
    """len(loader); -1 if it has none."""
    batch_size: int
    num_taken: int
    """Number of batches that this pass has yielded so far."""
    num_samples: int
    """Number of samples in these batches; -1 if they cannot be counted."""
    sampler: str
    """Classes of the samplers, outermost first: `BatchSamplerShard>BatchSampler>DistributedSampler`."""
    is_shuffling: bool
    """Whether the sampler says that it shuffles."""
    sampler_epoch: int
    """The epoch given to `set_epoch`; -1 if the sampler takes none."""
    num_shards: int
    """Number of parts that samplers and wrappers cut the data set into; 4 if it is cut in two twice."""
    order: int = 0
    """At the end of a pass: fingerprint of the batches in their order; 0 if unknown."""
    content: int = 0
    """Fingerprint that tells this rank's data set from another rank's; 0 if unknown, or if nothing cuts the data
    set."""
    whole_size: int = -1
    """For a subset: the size of the data set that it is taken from; else -1."""


class Skipped(msgspec.Struct, frozen=True, tag="skipped", kw_only=True):
    """The loss scaler did not let the optimizer step."""

    in_a_row: int
    scale: float
    lowest_scale: float
    first_scale: float
    loss: float
    nonfinite: list[Nonfinite] = []
    num_taken: int = 0
    """Steps that the scaler has let pass since the start."""


class Swapped(msgspec.Struct, frozen=True, tag="swapped", kw_only=True):
    """Within one autocast region, a model was called again after its weights had changed in place."""

    distance: float
    """Relative distance of the weights between the two calls, on a sample."""
    is_input_equal: bool
    is_output_equal: bool
    """Whether the two outputs are equal bit for bit."""
    num_times: int


class Modes(msgspec.Struct, frozen=True, tag="modes", kw_only=True):
    """Some modules of a trained model are in evaluation mode, or no longer are; sent when that changes."""

    model: str
    """Prefix of the model's tensor names."""
    evaluating: Named
    """Modules that compute something else in evaluation mode and were in it at every call for this step; none if all
    train again."""
    num_sensitive: int
    """Number of modules in the model that compute something else in evaluation mode."""
    is_whole: bool
    """Whether the model itself, its outermost module, was in evaluation mode."""


class Hoard(msgspec.Struct, frozen=True, tag="hoard", kw_only=True):
    """A container of the script that grows with the steps; reported when the rank's memory has grown by much."""

    name: str
    """Name in the script: `outputs`, `meter.history`."""
    where: str
    """File that holds it, and the function if it is a local variable."""
    length: int
    grown: int
    """Number of entries added in the last `num_steps` steps."""
    num_steps: int


class Rollout(msgspec.Struct, frozen=True, tag="rollout", kw_only=True):
    """Weights that the script generates with, compared to those that it trains; sent when it passes `watch.log(rollout=...)`."""

    num_equal: int
    """Number of tensors equal to the live ones, bit for bit."""
    num_moved: int
    """Number of live tensors that have changed since the previous log."""
    missing: Named = Named()
    """Trained tensors that the rollout weights do not contain."""
    stale: Named = Named()
    """Tensors equal to what the live ones were at an earlier log, but no longer are."""
    other: Named = Named()
    """Tensors equal to neither the live nor the earlier weights."""
    cast: Named = Named()
    """Tensors that hold the live values in another dtype."""
    cast_to: str = ""
    behind: int = 0
    """Age of the oldest stale tensor, in logs."""


class Routing(msgspec.Struct, frozen=True, tag="routing", kw_only=True):
    """Where a router of a mixture of experts sent the tokens of one forward pass.

    Sent now and then; in large jobs by some ranks only.
    """

    module: str
    """Name of the module that holds the router and the experts."""
    num_experts: int
    top_k: int
    """Number of experts that each token is sent to."""
    num_tokens: int
    counts: list[int]
    """Number of tokens that the router sent to each expert."""
    received: list[int] = []
    """Number of tokens (rows that are not all zero) that this rank's experts received; empty if the experts are not
    separate modules."""
    term: str = ""
    """Name of a scalar of the module that is called a balancing or other auxiliary loss and could carry a gradient;
    empty if there is none."""
    is_term_learning: bool = False
    """Whether the backward pass brought a gradient to that scalar."""


class ScaleGroup(msgspec.Struct, frozen=True, array_like=True):
    """Parameters whose gradients are summed over the same ranks and divided by the same number."""

    names: Named
    divisor: float
    """Number by which the sum over ranks is divided."""
    num_losses: int
    """Number of ranks whose losses contribute to these gradients."""
    how: str
    """How this is known, in words for a person."""
    axes: list[int] = []
    """Sizes of the axes that the gradients are reduced over."""


class GradientScales(msgspec.Struct, frozen=True, tag="gradient_scales", kw_only=True):
    """The divisors of a model's gradients; sent once after the first steps, by the lowest rank that holds the parameters."""

    groups: list[ScaleGroup]
    is_scale_free: bool
    """Whether a constant factor on the gradients changes nothing: no clipping was seen, and every optimizer divides the
    gradient by its own size, as Adam does."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded", kw_only=True):
    """The script loaded weights into a model with `load_state_dict`, before its first step or later."""

    files: list[str]
    """Absolute paths that `torch.load` read the weights from, as far as this was seen, the latest last."""
    num_elements: int
    """Number of elements of the largest state that a model was given."""


class StageTimes(msgspec.Struct, frozen=True, tag="stage_times", kw_only=True):
    """How long a pipeline stage computed in some steps, on the host, without the time it waited."""

    stage: int
    num_steps: int
    forward_s: list[float]
    """Seconds for each micro-batch, in the order in which the stage computed them; means over the steps."""
    backward_s: list[float]


class Overlap(msgspec.Struct, frozen=True, tag="overlap", kw_only=True):
    """Evaluation samples that this rank has trained on, as far as it remembers; sent again whenever their number has doubled."""

    loader: int
    """Number of the loader that is evaluated; -1 if the model was called with tensors that no loader yielded."""
    dataset: str
    """Class of the data set."""
    num_evaluated: int
    """Number of different evaluation samples that were examined."""
    num_met: int
    """How many of them were trained on."""
    num_trained: int
    """Number of different training samples that were examined."""
    num_pairs: int
    """Number of pairs of samples within one pass, of training or of evaluation."""
    num_repeats: int
    """How many of these pairs were the same, which shows how often that happens by chance."""
    is_distinctive: bool
    """Whether the samples are rows of fractional numbers, which are never equal by chance."""
    is_same_dataset: bool
    """Whether the loader reads the very data set object that a training loader reads."""
    num_clean: int = 0
    """Number of samples of other loaders of which none was trained on."""


class Labels(msgspec.Struct, frozen=True, tag="labels", kw_only=True):
    """How often this rank's loss was given each class, in the steps since the last report."""

    counts: dict[int, int]
    num_classes: int
    """Number of classes in the loss's input; 0 if not known."""
    is_weighted: bool
    """Whether the loss weights its classes."""
    first_step: int


class ScriptWarning(msgspec.Struct, frozen=True, tag="warned", kw_only=True):
    """A warning that Python or torch showed the script, of the few kinds that matter here. Tagged `warned`."""

    text: str
    where: str
    """File and line that the warning points to."""
    module: str = ""
    """The module whose forward was running; empty if none was."""
