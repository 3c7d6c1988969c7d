"""Ranks that call something else than their peers."""

from holter.faults.cause import CauseEntry
from holter.records import Fix

COLLECTIVE_ORDER_MISMATCH = CauseEntry(
    cause="collective_order_mismatch",
    happened="Ranks call different operations at the same place in a group.",
    mechanism=(
        "Collectives have no names: the n-th call of one rank in a group meets the n-th call of the others. A branch on the rank, on its data or on "
        "the clock that adds, drops or swaps one call shifts everything after it. Then an all_reduce meets a broadcast: the ranks wait for ever, "
        "abort, or exchange each other's buffers and go on with wrong numbers."
    ),
    would_refute="The ranks' recorders show the same operation at that number of that group.",
    refuting_fact="is_order",
    is_refuted_by=False,
    fix=Fix(
        do=(
            "Find the two calls in the evidence in the script, and the condition that lets the named rank take another way: "
            "`grep -nE 'all_reduce|all_gather|broadcast|barrier|gather_for_metrics|if .*(rank|is_main_process)' train.py`. Move every collective out of branches "
            "that not all ranks take, call them in the same order everywhere, and give independent streams of calls groups of their own "
            "(`dist.new_group`). Then resume from the last checkpoint before the step named here."
        ),
        changes="Which calls a rank makes, not what they compute: sound steps stay as they were.",
        does_not_fix="Weights of steps in which mismatched calls did go through: they hold another call's data, so go back to before them.",
        expect="All ranks pass the named number of the named group with the same operation.",
        verify=(
            "Run the job again with `TORCH_FR_BUFFER_SIZE=20000`: `holter report` of it stays empty, and its step time no longer ends in a wait at this place."
        ),
        otherwise=(
            "If the script has no such branch, look at what it calls: evaluation, logging and checkpoint code that runs on rank 0 only, a library's "
            "retry after an exception, hooks that DDP or FSDP fire in the order in which gradients become ready (a model whose graph differs between ranks)."
        ),
    ),
)

COLLECTIVE_SHAPE_MISMATCH = CauseEntry(
    cause="collective_shape_mismatch",
    happened="Ranks call the same operation with tensors of other sizes.",
    mechanism=(
        "An operation such as all_reduce needs the same number of elements on every rank and does not check it. gloo aborts one process, whose peers then "
        "report a closed connection; NCCL hangs, or reads and writes past a buffer's end. Sizes differ where they come from data (a short last batch, "
        "sequence lengths, the number of unmasked tokens) or from a model that is not the same on all ranks."
    ),
    would_refute="The ranks' recorders show the same sizes at that number of that group.",
    refuting_fact="is_shape",
    is_refuted_by=False,
    fix=Fix(
        do=(
            "Print the shape right before the call named here, on every rank: `print(dist.get_rank(), tensor.shape, flush=True)`. Make it equal: pad to the largest "
            "(`accelerator.pad_across_processes`, or `dist.all_reduce` of the size with `ReduceOp.MAX` first), drop the short batch (`drop_last=True`), or reduce sums and "
            "counts instead of the samples themselves. Where sizes are meant to differ use an operation that takes them: `dist.all_to_all` with split sizes, "
            "`dist.all_gather_object`. Then resume from the last checkpoint."
        ),
        changes="The tensor that is handed to this call, on the ranks where it was of another size.",
        does_not_fix="Data that differs between ranks for a reason of its own: a loader that gives one rank less still does.",
        expect="The job passes the step named here, and later ones with short batches as well.",
        verify="Both sizes of the evidence are one size in the next run's print-out; `holter report` of it stays empty.",
        otherwise=(
            "If the call comes from DDP or FSDP and not from the script, the models differ: compare `sum(p.numel() for p in model.parameters() if p.requires_grad)` and "
            "`[n for n, p in model.named_parameters() if p.requires_grad]` on all ranks."
        ),
    ),
)

COLLECTIVE_DTYPE_MISMATCH = CauseEntry(
    cause="collective_dtype_mismatch",
    happened="Ranks call the same operation with tensors of other dtypes.",
    mechanism=(
        "A collective moves bytes. If one rank hands in float32 and another int32 or bfloat16, widths that agree raise no error at all: one side's bits are read as the "
        "other's type, and the sum is garbage on every rank. Widths that differ abort or hang. It comes from a value that is a Python int on one rank and a "
        "float on another (`torch.tensor(0)` against `torch.tensor(0.5)`), from autocast on some ranks only, or from a model loaded in another precision."
    ),
    would_refute="The ranks' recorders show the same dtypes at that number of that group.",
    refuting_fact="is_dtype",
    is_refuted_by=False,
    fix=Fix(
        do=(
            "Stop the run: what this call returned is wrong on all ranks. Print the dtype right before the call named here, on every rank "
            "(`print(dist.get_rank(), tensor.dtype, flush=True)`), and write it out where the tensor is made: `torch.tensor(value, dtype=torch.float32)`, "
            "`loss.detach().float()`. Then resume from a checkpoint of before the step named here."
        ),
        changes="The values that this call returns, on every rank.",
        does_not_fix="What was computed from them: a metric is merely wrong in the log; a gradient, a loss or a count that divides has spoilt the weights.",
        expect="The result of the call is what a sum or mean of the ranks' own values is.",
        verify="Both dtypes of the evidence are one in the next run's print-out; compare the call's result with the ranks' values added by hand, once.",
        otherwise=(
            "If the call comes from DDP or FSDP, parameters or gradients differ in dtype between ranks: compare `{p.dtype for p in model.parameters()}` on all ranks, "
            "and whether all of them run under the same autocast."
        ),
    ),
)

CAUSES: tuple[CauseEntry, ...] = (
    COLLECTIVE_ORDER_MISMATCH,
    COLLECTIVE_SHAPE_MISMATCH,
    COLLECTIVE_DTYPE_MISMATCH,
)
