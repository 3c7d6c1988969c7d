"""What the ranks are fed."""

from holter.faults.data.batch_lengths import BatchLengths
from holter.faults.data.batch_values import BatchValues
from holter.faults.data.data_coverage import DataCoverage
from holter.faults.data.duplicate_batches import DuplicateBatches
from holter.faults.data.epoch_order import EpochOrder
from holter.faults.data.input_shift import InputShift
from holter.faults.data.label_counts import LabelCounts
from holter.faults.data.parallel_inputs import ParallelInputs
from holter.faults.data.sample_overlap import SampleOverlap
from holter.faults.family import (
    NOT_BY_A_NUMBER,
    NOT_BY_A_SCRIPT,
    CauseEntry,
    Consequence,
    Damage,
    DetectorEntry,
    Family,
    Row,
    Stage,
)
from holter.records import Fix

_NO_COUNT = "the samples of a whole pass, counted on all ranks"
_NO_STEPS = "batch signatures at several steps in a row"
_NO_EPOCH = "the sampler's epoch at each pass"
_NO_LENGTHS = "the lengths of all ranks' loaders, and that they are trained on"
_NO_PEER = (
    "a third rank, or a history from before: two ranks differ and nothing tells which one is sound, so both are named"
)
_ALL_ALIKE = "what changed at that step on all ranks at once: a curriculum or a new data source looks the same"

DUPLICATE_DATA_ACROSS_RANKS = CauseEntry(
    cause="duplicate_data_across_ranks",
    happened="Replicas train on the same batches.",
    mechanism=(
        "Nothing gives each rank its own part of the data: the loader has no DistributedSampler and was not prepared, or every rank has "
        "the same shard and the same seed. All ranks compute the same gradient; their mean is that gradient. The job learns as fast as "
        "one rank alone, at the price of all."
    ),
    would_refute="The ranks hold parts of one model (tensor or pipeline parallelism) and are meant to read the same batch.",
    refuting_fact="is_model_replicated",
    is_refuted_by=False,
    rows=(
        Row("duplicate_batches", 0.95, "observation", seen=("is_shared_at_every_step", "is_model_replicated"), absent=("is_loader_cut",)),
        Row("duplicate_batches", 0.93, "observation", seen=("is_shared_at_every_step", "is_model_replicated")),
        Row("duplicate_batches", 0.50, "inference", missing=_NO_STEPS),
    ),
    fix=Fix(
        do=(
            "Give each rank its own part: `DataLoader(dataset, sampler=DistributedSampler(dataset))` with `set_epoch(epoch)` before "
            "each epoch, or `accelerator.prepare(loader)`, not both; for a stream, `split_dataset_by_node` or `shard(rank, world_size)`. "
            "Then go on from the latest checkpoint: its weights are sound."
        ),
        changes="An epoch becomes shorter by the number of ranks, and the effective batch larger by it: learning rate and schedule that were tuned to this run may need to follow.",
        does_not_fix="The steps already taken: they count as steps of a batch that was so many times smaller than planned.",
        expect="Batch signatures differ between ranks at every step; the loss of a step is less noisy, because it averages different samples.",
        verify="Print the first sample's index or hash on each rank for one step: all are different. This incident is not opened again.",
        otherwise=(
            "If a sampler is there, look at its arguments: `rank=0` or `num_replicas=1` written out, a sampler made before "
            "`init_process_group`, or a generator with one seed for all ranks that draws the samples itself."
        ),
    ),
)  # fmt: skip

DOUBLE_SHARDED_DATA = CauseEntry(
    cause="double_sharded_data",
    happened="The data set is cut into parts twice, so that no rank reads some of the parts.",
    mechanism=(
        "A DistributedSampler gives each rank its share, and a wrapper (accelerate's `prepare`, a framework's loader) cuts that share once "
        "more by the number of ranks. Each rank keeps one part of its own part; the rest is never read, in any epoch."
    ),
    would_refute="All ranks together take about as many samples in a whole pass as the data set holds.",
    refuting_fact="is_covered",
    is_refuted_by=True,
    rows=(
        Row("data_coverage", 0.95, "observation", seen=("has_more_parts_than_ranks", "is_counted"), absent=("is_covered",)),
        Row("data_coverage", 0.90, "observation", seen=("has_more_parts_than_ranks",), absent=("is_covered",)),
        Row("data_coverage", 0.50, "inference", missing=_NO_COUNT),
    ),
    fix=Fix(
        do=(
            "Remove one of the two: give `prepare` a loader without DistributedSampler (plain `shuffle=True`), or keep the sampler and do "
            "not prepare the loader (`accelerator.prepare(model, optimizer)` only). With `datasets`, do not call `shard` before either."
        ),
        changes="An epoch becomes longer by the factor of the second cut: schedules that count steps per epoch must be computed again.",
        does_not_fix="What the model has not seen so far. With half the data unseen, consider starting again; the weights themselves are sound.",
        expect="`len(loader) * batch_size * ranks` is about the size of the data set, and this incident is not opened again.",
        verify="Count the samples of one epoch on every rank and sum them: it is the data set's size, up to one batch a rank.",
        otherwise="If parts are held back on purpose, say so by cutting the data set itself (`Subset`, `select`), so that its size is what is meant to be read.",
    ),
)  # fmt: skip

REPEATED_EPOCH_ORDER = CauseEntry(
    cause="repeated_epoch_order",
    happened="Every epoch comes in the same order although the sampler shuffles, or one batch is trained on again and again.",
    mechanism=(
        "A DistributedSampler draws its order from a seed plus an epoch number that only `set_epoch` changes. If nobody calls it, or the "
        "script seeds everything alike at the top of each epoch, each epoch repeats the batches of the first: the same samples together, in the same order. "
        "A script that keeps a batch (for a plot, a test, a retry) and does not let go of it learns that one by heart."
    ),
    would_refute="The sampler was told a new epoch before the pass.",
    refuting_fact="is_epoch_told",
    is_refuted_by=True,
    rows=(
        Row("epoch_order", 0.92, "observation", seen=("is_order_repeated", "is_one_batch"), absent=("is_epoch_told",)),
        Row("epoch_order", 0.95, "observation", seen=("is_order_repeated", "takes_epoch"), absent=("is_epoch_told",)),
        Row("epoch_order", 0.88, "observation", seen=("is_order_repeated",), absent=("is_epoch_told", "takes_epoch")),
        Row("epoch_order", 0.60, "inference", missing=_NO_EPOCH),
    ),
    fix=Fix(
        do=(
            "Call `loader.sampler.set_epoch(epoch)` before each epoch (with accelerate `loader.set_epoch(epoch)`). If the sampler takes no "
            "epoch, do not seed within the loop, or give its generator a seed that depends on the epoch. No need to stop the run now: "
            "change it at the next restart."
        ),
        changes="The order of samples from the next epoch on. A run compared with an older one bit by bit will differ from there.",
        does_not_fix="Epochs already made: the model has met the same batches in the same order; nobody can say how much that cost.",
        expect="The loss within an epoch no longer repeats its small ups and downs of the epoch before.",
        verify="The first batches' indices of two epochs differ on each rank.",
        otherwise="If the call is there, it reaches another sampler than the one in use: after `prepare`, the loader has a new one; call it on the prepared loader.",
    ),
)  # fmt: skip

UNEVEN_BATCHES = CauseEntry(
    cause="uneven_batches",
    happened="Ranks have different numbers of batches: some will run out of data while the others wait for them.",
    mechanism=(
        "Each step of replicas ends in a reduction that all must enter. A rank without a next batch leaves the loop; the others go into "
        "the next reduction and wait for it until the timeout, or, worse, meet in it with another collective that came later."
    ),
    would_refute="A rank that ran out of data restarted its loader, and all ranks went on stepping.",
    refuting_fact="is_begun_anew",
    is_refuted_by=True,
    rows=(
        Row("batch_lengths", 0.93, "observation", seen=("has_uneven_lengths", "is_trained_on"), absent=("is_begun_anew",)),
        Row("batch_lengths", 0.50, "inference", missing=_NO_LENGTHS),
    ),
    fix=Fix(
        do=(
            "Nothing hangs yet: save a checkpoint before the step named here. Then make lengths equal: a DistributedSampler (it pads; "
            "`drop_last=True` cuts), accelerate's `even_batches`, or stop all ranks at the shortest (`all_reduce` the length with MIN once "
            "and use `itertools.islice`). For uneven data on purpose wrap the loop in `with Join([ddp]):`."
        ),
        changes="At most one batch a rank is repeated or dropped in an epoch.",
        does_not_fix="Files or shards of different sizes on the ranks: the longer ranks' surplus is cut off each epoch unless it is shuffled across.",
        expect="All ranks report the same number of batches when the next pass begins, and the epoch ends on all ranks at the same step.",
        verify="`len(loader)` is the same on every rank; the job passes the step named here.",
        otherwise=(
            "If lengths are equal and it hangs at the end of an epoch still, batches are dropped inside the loop (a `continue` on some rank) "
            "or a stream ends early: count the batches on each rank."
        ),
    ),
)  # fmt: skip

CORRUPT_LABELS_OR_RANGE = CauseEntry(
    cause="corrupt_labels_or_range",
    happened="Labels are constant or out of range, or inputs left their usual magnitude.",
    mechanism=(
        "What the loader gives still has the right shape and dtype but no longer the right content: a decoder that returns zeros for a file "
        "that it cannot read, a shifted column, labels of another data set, a normalisation that one rank does not apply. Its gradients "
        "are averaged into all."
    ),
    would_refute="All ranks changed alike at the same step: then the data source itself changed, perhaps on purpose.",
    refuting_fact="is_on_all_ranks",
    is_refuted_by=True,
    damage=Damage("with the step", "suspect", "weights learn from labels or inputs that are out of range"),
    rows=(
        Row("rank_shares", 0.80, "documented", seen=("is_loss_apart",), absent=("is_factor_steady",)),
        Row("rank_shares", 0.75, "documented", seen=("is_parted",)),
        Row("label_counts", 0.92, "observation", seen=("is_one_label_alone",)),
        Row("batch_values", 0.93, "observation", seen=("is_out_of_range",), absent=("is_on_all_ranks",)),
        Row("batch_values", 0.85, "documented", seen=("is_out_of_range", "is_on_all_ranks")),
        Row("batch_values", 0.90, "observation", seen=("is_constant",), absent=("is_on_all_ranks",)),
        Row("batch_values", 0.80, "documented", seen=("is_constant", "is_on_all_ranks")),
        Row("batch_values", 0.90, "observation", seen=("is_off_scale", "is_culprit_known"), absent=("is_on_all_ranks",)),
        Row("batch_values", 0.65, "inference", seen=("is_off_scale",), absent=("is_culprit_known",), missing=_NO_PEER),
        Row("batch_values", 0.65, "inference", missing=_ALL_ALIKE),
    ),
    fix=Fix(
        do=(
            "Take the named rank's batch at the named step (same seed, epoch and index) and look at the named tensor: as image, as text, as a "
            "histogram of labels. Follow it back through collate, transforms and decoder to the file. Repair that, add a check of range to "
            "the data set, and resume from a checkpoint that is older than the named step."
        ),
        changes="The data of the named rank, or the code that reads it. Model and optimizer stay as they are.",
        does_not_fix="The weights trained since: they are finite and not lost, but have learnt from nonsense in the share of the named ranks.",
        expect="The tensor's smallest and largest values return to what they were before the named step and to what other ranks have.",
        verify="Log minimum, maximum and number of different labels on each rank for a few batches: all ranks agree in kind.",
        otherwise=(
            "If only one host's ranks have it, compare its files (checksums), its mounts and its library versions with another's. If the data "
            "is what it should be (a curriculum, a new source), nothing is wrong: note it and go on."
        ),
    ),
)  # fmt: skip

PARALLEL_INPUT_MISMATCH = CauseEntry(
    cause="parallel_input_mismatch",
    happened="Ranks that compute parts of one result were fed different batches.",
    mechanism=(
        "A tensor-parallel group multiplies one batch with parts of each weight and adds the parts up. A sampler, an augmentation or a mask that is seeded "
        "by the global rank gives each of them another batch: the sum mixes samples, gradients of replicated layers differ, and nothing raises. Dropout of a result that all of "
        "them hold does the same if their random states differ."
    ),
    would_refute="The ranks of the group are meant to get different parts of the sequence, and the model knows it.",
    refuting_fact="are_inputs_different",
    is_refuted_by=False,
    damage=Damage("with the step", "suspect", "parts of a result were computed from different batches, and the weights took it"),
    rows=(
        Row("parallel_inputs", 0.85, "documented", seen=("are_inputs_different", "is_repeated")),
        Row("parallel_inputs", 0.10, "inference", missing="whether the inputs differ at the steps that follow too"),
        Row("replica_divergence", 0.85, "documented", seen=("is_randomness_apart", "gradients_differ"), unless=("gradients_differ_once", "parameters_differ_at_first"), names="everyone", tensors="gradients"),
    ),
    fix=Fix(
        do=(
            "Give all ranks of the group the same batch: seed sampler, augmentation and masks by the rank's place on the data-parallel axis "
            '(`mesh["dp"].get_local_rank()`), or load on one of them and broadcast. Restart from the beginning, or from a checkpoint older than this step.'
        ),
        changes="The batches of the named ranks.",
        does_not_fix="What was trained on mixed batches.",
        expect="The ranks of the group have the same batch at every step.",
        verify="`holter report` of the next run stays empty past the first steps.",
        otherwise="If the loaders are seeded alike, look for something that draws a random number on some ranks only, before the loader is made.",
    ),
)  # fmt: skip

DATA_LEAKAGE = CauseEntry(
    cause="data_leakage",
    happened="Samples of the evaluation are trained on.",
    mechanism=(
        "The two sets were cut from one source that holds samples twice, or before it was shuffled and again after, or the evaluation was "
        "joined to the training data. What is evaluated was learned by heart: the figure says how well the model remembers."
    ),
    would_refute="The evaluation is meant to show the training data: it reads the same data set, or another evaluation is clean.",
    refuting_fact="is_by_chance",
    is_refuted_by=True,
    rows=(
        Row("sample_overlap", 0.93, "observation", seen=("is_trained_on",), absent=("is_same_dataset", "has_clean_evaluation", "is_by_call")),
        Row("sample_overlap", 0.80, "documented", seen=("is_trained_on",), absent=("is_by_call",)),
        Row("sample_overlap", 0.65, "inference", seen=("is_trained_on", "is_by_call"), missing="whether the script evaluates its training data on purpose"),
        Row("sample_overlap", 0.10, "inference", missing="fingerprints of samples of both sets"),
    ),
    fix=Fix(
        do="Take the shared samples out of the evaluation, or out of the training data, and evaluate again. Training need not stop: what it learns is sound, only its evaluation is not.",
        changes="The evaluation's figures: they will be worse, and true.",
        does_not_fix="Choices that were made by the old figures: the checkpoint that was kept as the best, when training was stopped, hyper-parameters.",
        expect="No sample is in both sets, and evaluation loss and training loss part as they did not before.",
        verify="Hash every sample of both sets, before augmentation, and intersect: nothing is left. `holter report` of the next run has no data_leakage.",
        otherwise="If the sets are disjoint by their indices, look for duplicates in the source: the same file twice, the same text under two numbers.",
    ),
)  # fmt: skip

CLASS_IMBALANCE = CauseEntry(
    cause="class_imbalance",
    happened="One class has nearly all labels.",
    mechanism=(
        "The loss is a mean over samples. Where nineteen of twenty have the same label, a model that always answers with it is nearly right, "
        "and the gradient of the other classes is lost among theirs. Often a filter, a join or a mapping of labels has made it so."
    ),
    would_refute="Counts over a whole pass of the data are even: what was seen so far was a part that is not.",
    refuting_fact="is_evened_out",
    is_refuted_by=True,
    rows=(
        Row("label_counts", 0.90, "observation", seen=("has_one_class_nearly_all",), absent=("is_evened_out",)),
        Row("label_counts", 0.10, "inference", missing="counts of labels over several stretches of the run"),
    ),
    fix=Fix(
        do="Compare the counts with those that the data set should have. If they are right, weigh the classes in the loss or sample them evenly, and judge by a metric of each class. If they are not, look at the code that maps and filters labels.",
        changes="How much each class weighs in the gradient.",
        does_not_fix="A class of which there are too few samples to learn from.",
        expect="The accuracy of all together falls a little, that of the rare classes rises.",
        verify="Print the counts of labels of a whole pass, and recall by class at the evaluation.",
        otherwise="If rare classes stay unlearned though they weigh as much, look at their labels: they may be wrong.",
    ),
)  # fmt: skip

DISTRIBUTION_SHIFT = CauseEntry(
    cause="distribution_shift",
    happened="Inputs are no longer what they were.",
    mechanism=(
        "From one step on the loader gives something else: another file or source, a normalisation that was left out or made twice, another "
        "tokenizer, a decoder that fails quietly. It has the right shape, so nothing raises, and the model follows."
    ),
    would_refute="The inputs return to what they were by themselves.",
    refuting_fact="has_returned",
    is_refuted_by=True,
    rows=(
        Row("input_shift", 0.90, "observation", seen=("has_shifted", "is_on_one_rank")),
        Row("input_shift", 0.80, "documented", seen=("has_shifted", "is_on_all_ranks")),
        Row("input_shift", 0.10, "inference", missing="statistics of the batches before and after"),
    ),
    fix=Fix(
        do="Take batches of the named rank from before and after the named step and compare them: as images, as text, as numbers. If the change is meant (a curriculum, a second stage), nothing is wrong. If not, repair the source and go on from a checkpoint that is older than the named step.",
        changes="What the named rank is fed.",
        does_not_fix="What the weights have learned from the other inputs since.",
        expect="Mean, spread and range of the named tensor are those of before, on every rank.",
        verify="Log mean and standard deviation of the inputs on each rank for some steps: they agree with each other and with the first steps of the run.",
        otherwise="If only one host's ranks have it, compare its files, mounts and library versions with another's.",
    ),
)  # fmt: skip

FAMILY = Family(
    detectors=(
        DetectorEntry(BatchLengths(), Stage.FED),
        DetectorEntry(DataCoverage(), Stage.FED),
        DetectorEntry(EpochOrder(), Stage.FED),
        DetectorEntry(DuplicateBatches(), Stage.FED),
        DetectorEntry(BatchValues(), Stage.FED),
        DetectorEntry(ParallelInputs(), Stage.FED),
        DetectorEntry(InputShift(), Stage.FED),
        DetectorEntry(LabelCounts(), Stage.FED),
        DetectorEntry(SampleOverlap(), Stage.FED),
    ),
    causes=(
        DUPLICATE_DATA_ACROSS_RANKS, DOUBLE_SHARDED_DATA, REPEATED_EPOCH_ORDER, UNEVEN_BATCHES, CORRUPT_LABELS_OR_RANGE,
        PARALLEL_INPUT_MISMATCH, DISTRIBUTION_SHIFT, CLASS_IMBALANCE, DATA_LEAKAGE,
    ),
    brings_about=(
        # Replicated layers get gradients of different batches.
        Consequence("parallel_inputs", ("replica_divergence", "loss_trend"), ("curves",), whenever=True),
        # Ranks that run out of data are waited for until a peer gives up.
        Consequence("batch_lengths", ("collective_mismatch",)),
        Consequence("batch_lengths", ("stalled_rank",), unless_follower_is=NOT_BY_A_SCRIPT),
        Consequence("batch_lengths", ("dead_rank",), unless_follower_has=NOT_BY_A_NUMBER),
        Consequence("data_coverage", ("duplicate_batches", "overfitting", "loss_trend"), whenever=True),
        Consequence("duplicate_batches", ("overfitting", "loss_trend"), whenever=True),
        Consequence("epoch_order", ("overfitting", "loss_trend")),
        # Values off their scale or range are found by batch_values, which explains them better.
        Consequence("batch_values", ("input_shift",), whenever=True),
        Consequence("input_shift", (), ("curves",)),
        Consequence("batch_values", ("nonfinite_values",), ("curves",), unless_follower_is=("nonfinite_input",)),
    ),
)  # fmt: skip
