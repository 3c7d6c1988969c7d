"""What the ranks are fed."""

from holter.faults.row import Row

_NO_COUNT = "the samples of a whole pass, counted on all ranks"
_NO_STEPS = "batch signatures at several steps in a row"
_NO_EPOCH = "the sampler's epoch at each pass"
_NO_LENGTHS = "the lengths of all ranks' loaders, and that they are trained on"
_NO_PEER = (
    "a third rank, or a history from before: two ranks differ and nothing tells which one is sound, so both are named"
)
_ALL_ALIKE = "what changed at that step on all ranks at once: a curriculum or a new data source looks the same"

ROWS: tuple[Row, ...] = (
    # duplicate_batches: do replicas read the same, step after step?
    Row("duplicate_data_across_ranks", "duplicate_batches", 0.95, "observation", seen=("is_shared_at_every_step", "is_model_replicated"), absent=("is_loader_cut",)),
    Row("duplicate_data_across_ranks", "duplicate_batches", 0.93, "observation", seen=("is_shared_at_every_step", "is_model_replicated")),
    Row("duplicate_data_across_ranks", "duplicate_batches", 0.50, "inference", missing=_NO_STEPS),
    # data_coverage: more parts than ranks, and too few samples?
    Row("double_sharded_data", "data_coverage", 0.95, "observation", seen=("has_more_parts_than_ranks", "is_counted"), absent=("is_covered",)),
    Row("double_sharded_data", "data_coverage", 0.90, "observation", seen=("has_more_parts_than_ranks",), absent=("is_covered",)),
    Row("double_sharded_data", "data_coverage", 0.50, "inference", missing=_NO_COUNT),
    # epoch_order: the same order, and nobody told the sampler a new epoch?
    Row("repeated_epoch_order", "epoch_order", 0.95, "observation", seen=("is_order_repeated", "takes_epoch"), absent=("is_epoch_told",)),
    Row("repeated_epoch_order", "epoch_order", 0.88, "observation", seen=("is_order_repeated",), absent=("is_epoch_told", "takes_epoch")),
    Row("repeated_epoch_order", "epoch_order", 0.60, "inference", missing=_NO_EPOCH),
    # batch_lengths: who runs out first?
    Row("uneven_batches", "batch_lengths", 0.93, "observation", seen=("has_uneven_lengths", "is_trained_on"), absent=("is_begun_anew",)),
    Row("uneven_batches", "batch_lengths", 0.50, "inference", missing=_NO_LENGTHS),
    # batch_values: out of range, constant, or off their scale; one rank or all?
    Row("corrupt_labels_or_range", "batch_values", 0.93, "observation", seen=("is_out_of_range",), absent=("is_on_all_ranks",)),
    Row("corrupt_labels_or_range", "batch_values", 0.85, "documented", seen=("is_out_of_range", "is_on_all_ranks")),
    Row("corrupt_labels_or_range", "batch_values", 0.90, "observation", seen=("is_constant",), absent=("is_on_all_ranks",)),
    Row("corrupt_labels_or_range", "batch_values", 0.80, "documented", seen=("is_constant", "is_on_all_ranks")),
    Row("corrupt_labels_or_range", "batch_values", 0.90, "observation", seen=("is_off_scale", "is_culprit_known"), absent=("is_on_all_ranks",)),
    Row("corrupt_labels_or_range", "batch_values", 0.65, "inference", seen=("is_off_scale",), absent=("is_culprit_known",), missing=_NO_PEER),
    Row("corrupt_labels_or_range", "batch_values", 0.65, "inference", missing=_ALL_ALIKE),
)  # fmt: skip
