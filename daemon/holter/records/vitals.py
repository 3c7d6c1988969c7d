"""What a rank reports rarely: the weights against their own history, one pass under hooks, loaders, warnings."""

from typing import Literal

import msgspec

from holter.records.steps import Nonfinite
from holter.records.vocabulary import Named, View


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


class Inspection(msgspec.Struct, frozen=True, tag="inspection", kw_only=True):
    """One forward pass with hooks on every module: rare, and only to answer a question."""

    reason: Literal["first", "idle"]
    autocast_dtype: str
    """Of the region in which the model was called; empty: none."""
    witnesses: list[Witness]
    num_modules: int
    uncalled: Named = Named()
    """Modules with parameters that this pass did not call."""


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


class ScriptWarning(msgspec.Struct, frozen=True, tag="warned", kw_only=True):
    """A warning that Python or torch showed the script, of the few kinds that matter here. Journals call it `warned`."""

    text: str
    where: str
    """File and line."""
    module: str = ""
    """The module whose forward was running."""
