"""What a rank says of itself: who it is and what it trains, each step and the tables behind it, and what it reports rarely."""

import enum
from typing import Literal

import msgspec

Where = Literal["input", "loss", "gradient", "reduced_gradient"]
"""In which kind of tensor a value was met. `gradient` is the rank's own, from before any reduction."""
View = Literal["local", "replicated", "sharded"]
"""Where a statistic was taken: the rank's own before any reduction, reduced and equal on all replicas, reduced and cut into shards."""


class Mark(enum.IntFlag):
    """What is odd about one tensor's values."""

    CONSTANT = 1
    """More than one element, all equal."""
    ZERO = 2
    """All elements are zero."""
    NONFINITE = 4
    ROUNDED = 8
    """Not constant, float32 or float64, and the low mantissa bits of (nearly) all values are zero: it passed through a narrower dtype."""
    HUGE = 16
    """A magnitude above 1e6, or as many subnormal values as only uninitialised memory has."""


OWN = "own"
"""The scope of a tensor of which nobody else holds the same bytes: only its own history tells something."""
IGNORED = "ignored"
"""The scope of a plain parameter that the wrapper around it was told to leave alone: a rank's own, or a replica that nobody reduces. `ignored:dp`: what
lies on a part of a mesh, along an axis of the whole that is called as data-parallel ones are."""


def is_ignored(axis: str) -> bool:
    """Whether nobody says that what is compared along this axis is reduced.

    >>> is_ignored("ignored:dp_replicate"), is_ignored("dp_replicate")
    (True, False)
    """
    return axis.partition(":")[0] == IGNORED


class Named(msgspec.Struct, frozen=True, array_like=True):
    """Some tensors or modules by name: all are counted, the first few named."""

    count: int = 0
    names: list[str] = []


class Attached(msgspec.Struct, frozen=True, tag="attached", kw_only=True):
    """holter was attached to a rank."""

    pid: int
    host: str
    world_size: int
    local_rank: int
    command: list[str]
    versions: dict[str, str]
    framework: str = "loop"
    environment: dict[str, str] = {}
    """What libraries read of it, without secrets; rank 0 alone says it, as the next."""
    code: dict[str, str] = {}
    """File beside the script -> digest of its content, the script's own first."""


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
    axis: str = ""
    """Over which axes of a mesh other ranks hold the same bytes, joined by `+`; `own`, `ignored`; empty: all ranks if `is_replicated`, else not known."""
    placements: str = ""
    """How it lies on its mesh: `replicate=R,shard=S(0)`; P is partial. Empty: on none that is known."""
    policy: str = ""
    """Dtypes that a wrapper casts it to, to compute with and to reduce in: `bfloat16,float32`; empty: it casts nothing."""


class MeshAxis(msgspec.Struct, frozen=True, array_like=True):
    """One axis of a mesh of ranks."""

    name: str
    size: int
    stride: int
    """Distance of two neighbours' rank numbers: a rank's place is `rank // stride % size`."""
    kind: str = ""
    """`tensor`: ranks compute parts of one result from the same inputs; `data`: from inputs of their own; empty: not known."""


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
    axes: list[MeshAxis] = []
    """Of the meshes that the parameters lie on, outermost first; the same on all ranks."""
    stages: list[int] = []
    """Of torch's pipelines, those that this rank computes, 0 the first."""


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
    stage: int = -1
    """Number of the pipeline stage that this rank computes, 0 the first; -1: it is in no pipeline that is known."""
    is_received: bool = False
    """Of an input: the stage before sent it."""
    is_from_clip: bool = False
    """Of a reduced gradient: this rank's shards were finite before the script clipped by the norm of all, which was not."""
    received_from: int = -1
    """Of an input: the rank that sent it in this step, as a pipeline's stage does; -1: none that is known."""


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

    @property
    def num_divided(self) -> int:
        """By how much the script divided its loss for each backward pass, as an accumulating loop does: the loss that it means is so much larger."""
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


class Preparing(msgspec.Struct, frozen=True, tag="preparing", kw_only=True):
    """The rank makes something ready in a thread of holter's, and may be slow meanwhile; told when that begins and when it is over."""

    what: str
    """`kernels`: they are compiled for its device."""
    is_over: bool
    seconds: float = 0.0
    num: int = 0
    """How many were made."""


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
    is_loss_alone: bool = False
    """It is the model's outermost forward that made it, and only its loss: what its modules gave was finite."""
    is_by_graph: bool = False
    """It was read off the graph of the loss, without a replay: the module, or an operation between it and the next one."""
    place: int = -1
    """Of the module in the order of the forward pass, by the graph; -1: unknown."""
    num_models: int = 1
    """Models that the step had called: the replay is of one of them."""
    are_outputs_finite: bool | None = None
    """Whether all that the models of the step gave back was finite, but for a loss among it; None: nobody could look."""
    operation: str = ""
    """What the loss's own graph shows: `log of 3 of 8 values that are zero or negative`; empty: nothing."""
    is_of_nothing: bool | None = None
    """Whether the graph shows an average over no values, as of a batch in which no label counts; None: nobody could look."""
    lines: list[str] = []
    """Lines of the script that made the loss, the likeliest first."""


class ModuleVitals(msgspec.Struct, frozen=True, array_like=True):
    """One group of parameters of one module, after an optimizer step; shares are between 0 and 1, NaN where nobody looked."""

    module: str
    dtype: str
    numel: int
    weight_norm: float
    gradient_norm: float
    """As the optimizer is given it."""
    gradient_zeros: float
    gradient_subnormals: float
    gradient_absmax: float
    update_ratio: float
    """Norm of what the step changed over norm of the weights, on a sample of elements."""
    changed: float
    """Share of sampled elements with a non-zero gradient that the step changed."""
    learning_rate: float
    exponents: list[int] = []
    """How many gradient values have which exponent: 32 buckets of 8 exponents each, the smallest first; empty where not taken."""


class Vitals(msgspec.Struct, frozen=True, tag="vitals", kw_only=True):
    """The weights against their own history, at a step of comparison. In large jobs the ranks take turns."""

    view: View
    modules: list[ModuleVitals]
    num_trainable: int
    """Parameters that require gradients and that a stepping optimizer holds."""
    no_gradient: Named = Named()
    """Of those: gradient None at this step and at every one for `idle_steps`."""
    zero_gradient: Named = Named()
    """Of those: gradient exactly zero, likewise."""
    idle_steps: int = 0
    """For how many steps in a row those named under no_gradient and zero_gradient have had none."""
    unchanged: Named = Named()
    """Gradient and learning rate not zero, the optimizer stepped, and no bit of the tensor changed."""
    without_rate: Named = Named()
    """Gradient not zero, and a learning rate of exactly zero."""
    unheld: Named = Named()
    """Parameters of a model that is trained, with a gradient, that no optimizer which ever stepped holds."""
    is_unheld_at_rest: bool | None = None
    """Whether an optimizer that never stepped holds one of those; None: nobody looked."""
    faint: Named = Named()
    """Matrices whose gradient is not zero, and whose norm is a hundred-millionth of the largest tensor's or less."""
    rounded: Named = Named()
    """Trained float32 tensors that have changed since the start and whose low mantissa bits are all zero still."""
    frozen_moved_in_step: Named = Named()
    """Frozen parameters that an optimizer's step changed."""
    frozen_moved_between: Named = Named()
    """Frozen parameters that changed outside of an optimizer's step, and are not the copy of a live one."""
    frozen_still_checks: int = 0
    """For how many comparisons in a row before this one none of those in frozen_moved_* had moved; 0 if one moves all the time."""
    moved_between: Named = Named()
    """Trained parameters that changed between two steps, outside of any optimizer."""
    uncleared_steps: int = 0
    """For how many checked steps in a row gradients were there, and not zero, before the first backward pass of a step."""
    uncleared_growth: float = 0.0
    """Norm of those left-over gradients over what it was when this began."""


class Witness(msgspec.Struct, frozen=True, array_like=True):
    """One module as one training forward pass showed it."""

    module: str
    module_class: str
    num_calls: int
    output_dtype: str
    output_zeros: float
    """Share of zeros in its output; NaN where nobody looked."""
    input_zeros: float
    was_gradient_on: bool
    """Whether gradients were recorded while it ran."""
    has_gradient_path: bool
    """Whether its output requires a gradient."""
    has_parameters: bool
    is_rounded: bool | None = None
    """Whether its float32 output holds nothing but values of a narrower dtype; None: nobody looked, or there were too few."""
    has_gradient: bool | None = None
    """Whether the backward pass brought anything but zeros back to its output; None: nobody looked."""
    lost_in: str = ""
    """A module that its result goes into, and to which a gradient comes back that is all zeros here."""


class Inspection(msgspec.Struct, frozen=True, tag="inspection", kw_only=True):
    """One forward pass with hooks on every module: rare, and only to answer a question."""

    reason: Literal["first", "idle", "changed"]
    autocast_dtype: str
    """Of the region in which the model was called; empty: none."""
    witnesses: list[Witness]
    num_modules: int
    uncalled: Named = Named()
    """Modules with parameters that this pass did not call."""
    rounded: dict[str, bool] = {}
    """What is no witness's output (a whole of several modules; a module's input, by its name and " (input)") -> whether it holds nothing but values of a narrower dtype."""


class Feed(msgspec.Struct, frozen=True, tag="feed", kw_only=True):
    """A data loader at the beginning or the end of a pass over it."""

    loader: int
    """Number of the loader in this process, in order of first use."""
    epoch: int
    """Passes over this loader that were begun before."""
    is_end: bool
    is_training: bool
    """Its batches were trained on; known at the end of a pass, and from the second on."""
    dataset: str
    """Class."""
    dataset_size: int
    """-1: it has none."""
    num_batches: int
    """len(loader); -1: it has none."""
    batch_size: int
    num_taken: int
    """Batches that this pass has given so far."""
    num_samples: int
    """Samples in them; -1 if they cannot be counted."""
    sampler: str
    """Classes, outermost first: `BatchSamplerShard>BatchSampler>DistributedSampler`."""
    is_shuffling: bool
    """The sampler says that it shuffles."""
    sampler_epoch: int
    """The epoch given to `set_epoch`; -1 if the sampler takes none."""
    num_shards: int
    """Into how many parts samplers and wrappers cut the data set, each counted: 4 if cut in two twice."""
    order: int = 0
    """At the end: fingerprint of the batches in their order, 0 if unknown."""
    content: int = 0
    """Tells this rank's data set from another's; 0: unknown, or nothing cuts it."""
    whole_size: int = -1
    """Of a subset: the size of what it is taken from."""


class Skipped(msgspec.Struct, frozen=True, tag="skipped", kw_only=True):
    """The loss scaler did not let a step happen."""

    in_a_row: int
    scale: float
    lowest_scale: float
    first_scale: float
    loss: float
    nonfinite: list[Nonfinite] = []
    num_taken: int = 0
    """Steps that the scaler has let pass since the start."""


class Swapped(msgspec.Struct, frozen=True, tag="swapped", kw_only=True):
    """Within one autocast region a model was called again after its weights had changed in place."""

    distance: float
    """Relative distance of the weights between the two calls, on a sample."""
    is_input_equal: bool
    is_output_equal: bool
    """Bit for bit."""
    num_times: int


class Modes(msgspec.Struct, frozen=True, tag="modes", kw_only=True):
    """A model is trained while modules of it are in evaluation mode, or no longer; told when that changes."""

    model: str
    """Prefix of its names."""
    evaluating: Named
    """Modules that compute something else in evaluation mode, and were in it at every call for this step; none: all train again."""
    num_sensitive: int
    """All modules of the model that compute something else in evaluation mode."""
    is_whole: bool
    """The model itself, its outermost module, was in evaluation mode."""


class Hoard(msgspec.Struct, frozen=True, tag="hoard", kw_only=True):
    """A container of the script that grows with the steps, told when the rank's memory has grown by much."""

    name: str
    """As the script calls it: `outputs`, `meter.history`."""
    where: str
    """Its file, and the function if it is local."""
    length: int
    grown: int
    """Entries that it got in the last `num_steps`."""
    num_steps: int


class Rollout(msgspec.Struct, frozen=True, tag="rollout", kw_only=True):
    """The weights that a script generates with beside those that it trains: told when it gives the former (`watch.log(rollout=...)`)."""

    num_equal: int
    """Tensors that are the live ones, bit for bit."""
    num_moved: int
    """Live tensors that have changed since the log before."""
    missing: Named = Named()
    """Trained tensors that it does not have."""
    stale: Named = Named()
    """Equal to what the live ones were at an earlier log, and are no more."""
    other: Named = Named()
    """Neither."""
    cast: Named = Named()
    """The live values in another dtype."""
    cast_to: str = ""
    behind: int = 0
    """The oldest of the stale ones is so many logs old."""


class Routing(msgspec.Struct, frozen=True, tag="routing", kw_only=True):
    """Where one router of a mixture of experts sent the tokens of one forward pass; told now and then, in large jobs by some ranks."""

    module: str
    """That holds the router and the experts."""
    num_experts: int
    top_k: int
    """Experts that each token is sent to."""
    num_tokens: int
    counts: list[int]
    """Tokens that the router sent to each expert."""
    received: list[int] = []
    """Tokens, rows that are not all zero, that this rank's experts were given; empty where they are not modules of their own."""
    term: str = ""
    """A scalar of the module that calls itself a balancing or other auxiliary loss, and could carry a gradient; empty: none."""
    is_term_learning: bool = False
    """The backward pass brought a gradient to it."""


class ScaleGroup(msgspec.Struct, frozen=True, array_like=True):
    """Parameters whose gradients are summed over the same ranks and divided by the same number."""

    names: Named
    divisor: float
    """What the sum over ranks is divided by."""
    num_losses: int
    """Ranks whose losses have a part in these gradients."""
    how: str
    """How that is known, for a person."""
    axes: list[int] = []
    """Sizes of the axes that the gradients are reduced over."""


class GradientScales(msgspec.Struct, frozen=True, tag="gradient_scales", kw_only=True):
    """By how much the gradients of a model's parameters are divided; told once the first steps are done, by the lowest rank that holds them."""

    groups: list[ScaleGroup]
    is_scale_free: bool
    """No clipping was seen and every optimizer divides the gradient by its own size, as Adam does: a constant factor changes nothing."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded", kw_only=True):
    """The script gave a model weights by `load_state_dict` before its first step, or since."""

    files: list[str]
    """What `torch.load` had read them from, as far as that was seen: absolute paths, the last one at the end."""
    num_elements: int
    """Of the largest state that a model was given."""


class StageTimes(msgspec.Struct, frozen=True, tag="stage_times", kw_only=True):
    """How long a pipeline's stage computed in some steps, on the host, without what it waited for."""

    stage: int
    num_steps: int
    forward_s: list[float]
    """Of each micro-batch, in the order in which the stage computed them: mean over the steps."""
    backward_s: list[float]


class Overlap(msgspec.Struct, frozen=True, tag="overlap", kw_only=True):
    """Samples of an evaluation that this rank has trained on, as far as it remembers; told again whenever there are twice as many."""

    loader: int
    """Number of the loader that is evaluated; -1: the model was called with tensors that no loader gave."""
    dataset: str
    """Class."""
    num_evaluated: int
    """Different samples of it that were looked at."""
    num_met: int
    """Those among them that were trained on."""
    num_trained: int
    """Different samples of the training that were looked at."""
    num_pairs: int
    """Pairs of samples within one pass, of training or of evaluation."""
    num_repeats: int
    """Those among them that were the same: how often that happens by chance."""
    is_distinctive: bool
    """Samples are rows of numbers that are not whole, which are never the same by chance."""
    is_same_dataset: bool
    """The loader reads the very object that a loader of the training reads."""
    num_clean: int = 0
    """Samples of other loaders of which none was trained on."""


class Labels(msgspec.Struct, frozen=True, tag="labels", kw_only=True):
    """How often this rank's loss was given each class, at the steps since the last time it was told."""

    counts: dict[int, int]
    num_classes: int
    """Of the loss's input; 0: not known."""
    is_weighted: bool
    """The loss weighs its classes."""
    first_step: int


class ScriptWarning(msgspec.Struct, frozen=True, tag="warned", kw_only=True):
    """A warning that Python or torch showed the script, of the few kinds that matter here. Journals call it `warned`."""

    text: str
    where: str
    """File and line."""
    module: str = ""
    """The module whose forward was running."""
