"""The corpus: each fault, what must be said of it, and the healthy runs of which nothing may be said.

A case passes when the top-ranked cause, the culprit ranks, the tensors or modules and the step are right, and its twin (the same
script with `--healthy`) raises nothing of severity warning or above.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
LAYERS = ("encoder", "block.0", "block.2", "head")
NET = frozenset(f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias"))
INTERVAL = 10
"""Steps between two comparisons, at most, at the default budget."""


@dataclass(frozen=True)
class Case:
    """One fault."""

    row: int
    """Of the public corpus; 0: not in it."""
    script: str
    causes: frozenset[str]
    """The top cause is one of these."""
    step: int
    """At which it began."""
    late_by: int = 0
    """How much later it may be said to have begun: what is compared now and then is dated to the comparison that shows it."""
    ranks: tuple[int, ...] | None = None
    """Exactly these; None: no rank is to blame."""
    tensors: frozenset[str] | None = None
    """Exactly these."""
    modules: tuple[str, ...] | None = None
    """Exactly these."""
    never: tuple[str, ...] = ()
    """No tensor or module begins with one of these."""
    says: tuple[str, ...] = ()
    """Words of the evidence."""
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, hash=False)
    ranks_run: int = 2
    """Ranks of the job."""
    family: str = ""
    """Of faults that `make test` has this job of; empty: another variant, which `make test-all` runs too."""

    @property
    def name(self) -> str:
        """For people and for test ids."""
        label = "-".join([self.script, *(word for word in self.arguments if not word.startswith("-"))])
        return f"{self.row:02d}-{label}" if self.row else label


def case(row: int, script: str, cause: str, step: int = 0, **more: Any) -> Case:
    """A line of the table."""
    tensors = more.pop("tensors", None)
    return Case(
        row, script, frozenset(cause.split("|")), step, tensors=None if tensors is None else frozenset(tensors), **more
    )


EVERY_STEP = {"HOLTER_OVERHEAD_BUDGET": "1", "HOLTER_OVERHEAD_FLOOR_S": "1"}
"""Weights are read before and after each, whatever that costs."""
CASES = (
    case(1, "lost_hooks", "gradient_sync_bypassed", tensors=NET, family="replicas"),
    case(2, "unused_layer", "unreduced_parameters", tensors=NET),
    case(3, "uneven_clipping", "uneven_clipping", ranks=(1,), tensors=("ln.weight", "ln.bias")),
    case(4, "seed_per_rank", "unsynced_initialisation", tensors=NET),
    case(5, "unfrozen_after_wrapping", "unreduced_parameters", tensors=("a.weight", "a.bias")),
    case(6, "local_statistics", "buffer_divergence", late_by=INTERVAL, tensors=("1.running_mean", "1.running_var"), family="replicas"),
    case(7, "stale_optimizer", "stale_optimizer_parameters", late_by=1, family="learning"),
    case(0, "kept_outputs", "host_memory_leak", step=0, late_by=60, ranks=(1,), says=("outputs",), family="memory"),
    case(8, "no_zero_grad", "gradients_never_cleared", late_by=INTERVAL),
    case(9, "detached_checkpoint", "graph_detached", late_by=INTERVAL, never=("head", "embedding"), tensors=[f"blocks.{n}.0.{kind}" for n in (0, 1) for kind in ("weight", "bias")], family="learning"),
    case(10, "swapped_reference", "stale_autocast_cache", late_by=INTERVAL, says=("distance",)),
    case(11, "bfloat16_adamw", "rounded_away_updates", late_by=INTERVAL),
    case(12, "inf_in_every_batch", "every_step_skipped"),
    case(13, "bfloat16_rotary", "buffer_precision_loss", tensors=("attention.inv_freq",), says=("641",), family="precision"),
    case(14, "half_overflow", "activation_overflow", modules=("layer1",), family="numerics"),
    case(15, "hidden_nan_loss", "hidden_nonfinite_loss|nonfinite_forward", step=30),
    case(16, "nan_in_batch", "nonfinite_input", step=30, ranks=(1,), family="numerics"),
    case(17, "empty_encoder", "frozen_component_uninitialised", late_by=INTERVAL, ranks=(1,), tensors=[f"encoder.{layer}.{kind}" for layer in ("first", "second") for kind in ("weight", "bias")], family="frozen"),
    case(18, "double_sharded", "double_sharded_data", late_by=40),
    case(19, "same_batches", "duplicate_data_across_ranks", late_by=INTERVAL, ranks=(0, 1), family="data"),
    case(0, "odd_data", "data_leakage", late_by=40, arguments=("leaked",), says=("evaluated samples",), family="data"),
    case(0, "odd_data", "distribution_shift", step=25, late_by=2, ranks=(1,), arguments=("shifted",)),
    case(20, "one_batch_more", "uneven_batches", late_by=INTERVAL, says=("41",)),
    case(21, "equal_rewards", "zero_advantages", late_by=INTERVAL, family="logged"),
    case(22, "one_code", "codebook_collapse", late_by=INTERVAL),
    case(23, "different_freezing", "frozen_set_mismatch", tensors=("a.weight", "a.bias", "b.weight", "b.bias")),
    case(32, "learning_rate_jump", "learning_rate_too_high", step=40, family="numerics"),
    case(0, "raw_module", "gradient_sync_bypassed", tensors=NET),
    case(0, "nan_in_forward", "nonfinite_forward", step=20, ranks=(1,), modules=("body.compress",)),
    case(0, "nan_in_backward", "nonfinite_backward", step=20, ranks=(1,)),
    case(0, "flipped_bit", "silent_data_corruption", step=20, ranks=(1,), tensors=("block.0.weight",), env=EVERY_STEP, family="replicas"),
)  # fmt: skip

UP, BOTH, ALL4 = ("blocks.0.up.weight",), (0, 1), (0, 1, 2, 3)


def mesh(kind: str, fault: str, cause: str, *more: str, script: str = "mesh_runs", **expected: Any) -> Case:
    """A fault of a sharded job."""
    return case(0, script, cause, arguments=(kind, "--fault", fault, *more), **expected)


MESH_CASES = (
    mesh("fsdp2", "flip", "silent_data_corruption", step=12, ranks=(1,), tensors=UP, says=("own",), env=EVERY_STEP),
    mesh("fsdp2", "flip_moment", "silent_data_corruption", step=12, ranks=(1,), tensors=("optimizer: blocks.0.up.weight.exp_avg",), env=EVERY_STEP),
    mesh("hsdp", "flip", "silent_data_corruption", step=12, ranks=(1,), tensors=UP, says=("replicate",), env=EVERY_STEP, ranks_run=4, family="mesh"),
    mesh("hsdp", "seed_per_replica", "unsynced_initialisation", says=("replicate",), ranks=ALL4, ranks_run=4),
    mesh("hsdp", "never_reduced", "gradient_sync_bypassed", says=("replicate",), ranks=ALL4, ranks_run=4),
    mesh("hsdp", "lost_once", "corrupted_collective", step=12, says=("replicate",), env=EVERY_STEP, ranks_run=4),
    mesh("fsdp2", "other_rate", "optimizer_state_mismatch", ranks=BOTH),
    mesh("fsdp2", "frozen_sets", "frozen_set_mismatch", tensors=[f"blocks.0.{layer}.{kind}" for layer in ("gate", "up") for kind in ("weight", "bias")]),
    mesh("fsdp2", "other_buffer", "buffer_divergence", late_by=INTERVAL, tensors=("positions",)),
    mesh("ignoring", "nobody_reduces", "unreduced_parameters", tensors=("head.weight",), says=("ignored",)),
    mesh("fsdp2_frozen", "frozen_garbage", "frozen_component_uninitialised", ranks=(1,), tensors=UP),
    mesh("fsdp2", "local_clip", "clip_on_local_shard"),
    mesh("fsdp2", "uneven_clip", "uneven_clipping", "--culprit", "0", ranks=(0,), late_by=1),
    mesh("hsdp", "uneven_clip", "uneven_clipping", "--culprit", "2", ranks=(2,), says=("replicate",), ranks_run=4),
    mesh("fsdp2", "nan_forward", "nonfinite_forward", step=12, ranks=(1,), modules=("blocks.0.up",), says=("graph",)),
    mesh("tp", "nan_forward", "nonfinite_forward", step=12, ranks=(1,), modules=("blocks.0.up",), says=("graph",)),
    mesh("tp", "other_inputs", "parallel_input_mismatch", late_by=INTERVAL, says=("tp",)),
    mesh("2", "flip_partition", "silent_data_corruption", script="zero_runs", step=12, ranks=(1,), env=EVERY_STEP),
    mesh("3", "flip_partition", "silent_data_corruption", script="zero_runs", step=12, ranks=(1,), env=EVERY_STEP),
    mesh("2", "other_rate", "optimizer_state_mismatch", script="zero_runs", ranks=BOTH),
    mesh("2", "other_buffer", "buffer_divergence", script="zero_runs", late_by=INTERVAL, tensors=("positions",)),
    mesh("3", "frozen_garbage", "frozen_component_uninitialised", script="zero_runs", ranks=(1,), tensors=("blocks.0.gate.weight",)),
)  # fmt: skip
"""Silent faults of sharded jobs, on two ranks or four."""


def composed(kind: str, cause: str, **expected: Any) -> Case:
    """A fault of composed parallelism."""
    return case(0, "composed_runs", cause, arguments=(kind,), **expected)


SECOND_LAYER = [
    f"layers.1.{name}" for name in ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
]
COMPOSED_CASES = (
    composed("collapse", "expert_collapse", step=2, modules=("layers.0",), says=("expert 2",)),
    composed("overflow", "expert_overflow", step=2, late_by=12, ranks=BOTH, modules=("layers.0",)),
    composed("idle_term", "auxiliary_loss_inactive", step=2, modules=("layers.0",), says=("aux_loss",), family="experts"),
    composed("doubled_experts", "gradient_scale_mismatch", tensors=[f"layers.0.expert.{n}.{kind}" for n in (0, 2) for kind in ("weight", "bias")]),
    composed("expert_mesh", "gradient_scale_mismatch", tensors=[f"layers.0.expert.{n}.{kind}" for n in (0, 2) for kind in ("weight", "bias")], ranks_run=4),
    composed("one_divisor", "gradient_scale_mismatch", tensors=SECOND_LAYER),
    composed("axis_divisor", "gradient_scale_mismatch", says=("2 x 2",), ranks_run=4),
    composed("summed_twice", "gradient_scale_mismatch", tensors=[f"layers.{n}.norm.{kind}" for n in (0, 1) for kind in ("weight", "bias")]),
    composed("micro_batches", "gradient_scale_mismatch", late_by=2, ranks=BOTH),
    composed("summed_loss", "gradient_scale_mismatch", ranks=(1,)),
    composed("other_world", "corrupt_labels_or_range", ranks=(1,)),
    composed("drifting_norm", "silent_data_corruption", step=13, ranks=(1,), tensors=("layers.0.norm.weight",), env=EVERY_STEP),
)  # fmt: skip
"""Re-created from public reports and from what they describe: mixtures of experts, scales of gradients, ranks in other worlds."""


def composition(kind: str, cause: str, **expected: Any) -> Case:
    """What Megatron-LM#7452 describes."""
    return case(0, "composition_runs", cause, arguments=(kind,), **expected)


COMPOSITION_CASES = (
    composition("partial_norm", "unreduced_parameters", tensors=("layers.0.inner.weight", "layers.0.inner.bias"), env={"HOLTER_MESH": "tp=2"}),
)  # fmt: skip


def staged(kind: str, cause: str, **expected: Any) -> Case:
    """A fault of a pipeline's stages."""
    return case(0, "stage_runs", cause, arguments=(kind,), ranks_run=4, **expected)


STAGE_CASES = (
    staged("other_file", "wrong_weights_loaded", ranks=(2,), says=("stage_1.pt",)),
    staged("local_names", "wrong_weights_loaded", ranks=(1, 2, 3), says=("whole.pt",)),
    staged("untied", "unreduced_parameters", ranks=(0, 3), tensors=("embedding.weight", "head.weight")),
    staged("flipped", "silent_data_corruption", step=20, ranks=(1,), tensors=("layer.up.weight",), env=EVERY_STEP),
    # Told eight steps at a time.
    staged("slow_part", "slow_compute", step=16, late_by=16, ranks=(2,), says=("'micro_batch': 2",)),
)
MISSED = (
    "gathered_logits",
    "token_counts",
    "other_group",
    "missing_heads",
    "masked_parts",
    "overwritten_counts",
    "local_names",
)
"""Kinds of `composition_runs.py` of which nothing shows that holter reads: weights, reduced gradients and norms agree wherever they should."""
RECIPES = {
    "fsdp2": 2, "hsdp": 4, "tp": 2, "sequence": 2, "loss_parallel": 2, "tp_fsdp2": 4, "sequence_fsdp2": 4, "pipeline": 2, "pipeline_1f1b": 2,
    "experts": 2, "checkpointing": 2, "fsdp1": 2, "hybrid1": 4, "zero1": 2, "zero2": 2, "zero3": 2,
}  # fmt: skip
"""Healthy sharded jobs, as PyTorch's and DeepSpeed's own pages write them, and their ranks."""
RECIPES_IN_MAKE_TEST = ("sequence",)

SILENT = (
    "thousand_steps", "evaluation", "slow_checkpoint", "slow_first_step", "accumulation", "dropout", "unused_branch", "loss_scaler",
    "schedule", "adapter", "unfreezing", "reference_model", "weight_tying", "variable_length", "broadcast_statistics",
    "local_statistics", "hand_sharded", "hand_reduced", "noisy_loss", "resumed", "two_models", "short_last_batch", "jitter",
    "averaged_copy",
)  # fmt: skip
"""Runs of `scripts/healthy_runs.py`."""
SILENT_IN_MAKE_TEST = ("evaluation", "reference_model")


@dataclass(frozen=True)
class Job:
    """One run of the corpus: a fault, a twin, or a healthy run."""

    name: str
    script: str
    arguments: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict, hash=False)
    ranks: int = 2


def run(job: Job, nursery: Any, directory: Path) -> Any:
    """The job after its end."""
    return nursery.run(directory, [str(SCRIPTS / job.script), *job.arguments], env=job.env, ranks=job.ranks)


def fault(of: Case) -> Job:
    """The case's fault."""
    return Job(of.name, f"{of.script}.py", of.arguments, of.env, of.ranks_run)


def twin(of: Case) -> Job:
    """The same script without the fault."""
    return Job(f"{of.name}-twin", f"{of.script}.py", (*of.arguments, "--healthy"), of.env, of.ranks_run)


def silent(name: str) -> Job:
    """A healthy run."""
    env = {"HOLTER_LOCAL_BUFFERS": "*.running_*,*.num_batches_tracked"} if name == "local_statistics" else {}
    return Job(f"silent-{name}", "healthy_runs.py", (name,), env=env)


def missed(kind: str, *, is_healthy: bool = False) -> Job:
    """A fault that is not found, or its twin."""
    tail = ("--healthy",) if is_healthy else ()
    ranks = 4 if kind == "other_group" else 2
    return Job(f"composition-{kind}{'-twin' * is_healthy}", "composition_runs.py", (kind, *tail), ranks=ranks)


def recipe(name: str, ranks: int) -> Job:
    """A sharded job as the framework's own pages write it."""
    script, argument = ("zero_runs.py", name[-1]) if name.startswith("zero") else ("mesh_runs.py", name)
    return Job(f"recipe-{name}", script, (argument,), ranks=ranks)


def mistakes(of: Case, diagnoses: list[dict[str, Any]]) -> list[str]:
    """What is wrong with what was said, a sentence each; empty: the case passes."""
    alarms = [diagnosis for diagnosis in diagnoses if diagnosis["severity"] != "info"]
    if len(alarms) != 1:
        return [f"{len(alarms)} incidents: {[_brief(alarm) for alarm in alarms]}"]
    top, began = alarms[0]["causes"][0], alarms[0]["first_step"]
    named = [*top["tensors"], *top["modules"]]
    evidence = " ".join(str(proof) for proof in top["evidence"])
    checks = {
        f"the cause is {top['cause']} ({top['confidence']})": top["cause"] in of.causes,
        f"it began at step {began}": of.step <= began <= of.step + of.late_by,
        f"the ranks are {top['ranks']}": of.ranks is None or tuple(top["ranks"]) == of.ranks,
        f"the tensors are {top['tensors']}": of.tensors is None or set(top["tensors"]) == of.tensors,
        f"the modules are {top['modules']}": of.modules is None or tuple(top["modules"]) == of.modules,
        f"{named} is named": not any(name.startswith(of.never) for name in named) if of.never else True,
        **{f"{word!r} is not said": word in evidence for word in of.says},
    }
    return [text for text, is_right in checks.items() if not is_right]


def _brief(diagnosis: dict[str, Any]) -> str:
    top = diagnosis["causes"][0]
    return f"{top['cause']} on {top['ranks']} at {diagnosis['first_step']}: {diagnosis['symptom']}"
