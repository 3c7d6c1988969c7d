"""Ranks the causes of findings that only artifacts show, which no live detector makes, by rows as the families of faults declare them."""

from collections.abc import Iterator

from holter.diagnosis.explain import rank_by
from holter.faults import CAUSES, DETECTORS
from holter.faults.family import CauseEntry, Row
from holter.records import Cause, Finding, Fix

_RATE = "the learning rate at each step: log it (`scheduler.get_last_lr()`), or give the config beside the log"
_NORMS = (
    "the gradient norm at each step: log what `clip_grad_norm_` returns, or run again under `python -m holter train.py`"
)
_ORIGIN = "which tensor was the first that was not finite: repeat the last steps from a checkpoint under `python -m holter train.py`, or with `torch.autograd.set_detect_anomaly(True)`"

ROWS: tuple[tuple[str, Row], ...] = (
    ("learning_rate_too_high", Row("curve", 0.90, "observation", seen=("is_rising", "has_jump"), unless=("is_rate_computed",))),
    ("learning_rate_too_high", Row("curve", 0.70, "inference", seen=("is_rising", "has_jump", "is_rate_computed"))),
    ("learning_rate_too_high", Row("curve", 0.70, "inference", seen=("is_rising", "is_early", "is_beyond_start", "is_at_peak"), absent=("has_jump",))),
    ("learning_rate_too_high", Row("curve", 0.66, "inference", seen=("is_rising", "is_early", "is_beyond_start"), absent=("has_jump", "has_rate"), missing=_RATE)),
    ("learning_rate_too_high", Row("curve", 0.45, "inference", seen=("is_rising",), absent=("has_jump",), missing=_RATE)),
    ("exploding_gradients", Row("curve", 0.80, "observation", seen=("is_rising", "is_norm_up", "is_norm_first"), absent=("has_jump",), unless=("is_early",))),
    ("exploding_gradients", Row("curve", 0.62, "inference", seen=("is_rising", "is_norm_up"), absent=("has_jump",), missing="what the batches of that step held, and the norms by layer: run again under `python -m holter train.py`")),
    ("loss_divergence", Row("curve", 0.75, "observation", seen=("is_rising", "has_rate"), absent=("has_jump", "is_early"))),
    ("loss_divergence", Row("curve", 0.68, "inference", seen=("is_rising",), absent=("has_jump", "is_early", "has_rate"), missing=f"{_RATE}; {_NORMS}")),
    ("loss_divergence", Row("curve", 0.60, "inference", seen=("is_rising",), missing=f"{_RATE}; {_NORMS}")),
    ("nonfinite_backward", Row("curve", 0.75, "documented", seen=("is_nan", "is_norm_first"), unless=("is_brief",))),
    ("nonfinite_backward", Row("curve", 0.60, "inference", seen=("is_nan", "is_norm_first", "is_brief"), missing=f"the next twenty logs: a loss scaler that looks for its scale skips a step now and then; {_ORIGIN}")),
    ("every_step_skipped", Row("curve", 0.45, "inference", seen=("is_nan", "is_norm_first", "is_brief"), missing="the loss scale at each step (`scaler.get_scale()`), where it trains in float16")),
    ("nonfinite_backward", Row("curve", 0.40, "inference", seen=("is_nan",), absent=("is_norm_first",), missing=_ORIGIN)),
    ("nonfinite_forward", Row("curve", 0.65, "inference", seen=("is_nan",), absent=("is_norm_first",), missing=_ORIGIN)),
    ("nonfinite_input", Row("curve", 0.55, "inference", seen=("is_nan",), absent=("is_norm_first",), missing="the batch of that step: `torch.isfinite(batch).all()` for each of its tensors")),
    ("hidden_nonfinite_loss", Row("curve", 0.85, "documented", seen=("is_hidden", "is_norm_nan"))),
    ("nonfinite_backward", Row("curve", 0.50, "inference", seen=("is_hidden", "is_norm_nan"), missing=_ORIGIN)),
    ("nonfinite_forward", Row("curve", 0.50, "inference", seen=("is_hidden", "is_norm_nan"), missing=_ORIGIN)),
    ("hidden_nonfinite_loss", Row("curve", 0.66, "inference", seen=("is_hidden",), missing=f"{_NORMS}; or set `logging_nan_inf_filter=False`")),
    ("overfitting", Row("curve", 0.85, "observation", seen=("is_overfitting", "is_training_falling"))),
    ("overfitting", Row("curve", 0.50, "inference", seen=("is_overfitting", "is_few"), missing="two more evaluations, or one each half epoch: of so few none shows a trend")),
    ("overfitting", Row("curve", 0.50, "inference", seen=("is_overfitting",), unknown=("is_training_falling",), unless=("is_few",), missing="the training loss over the same steps: log it beside the evaluation's")),
    ("zero_gradients", Row("curve", 0.80, "observation", seen=("is_norm_zero",))),
    ("graph_detached", Row("curve", 0.50, "inference", seen=("is_norm_zero",), missing="which parameters have `grad is None` after one backward pass")),
    ("nonfinite_input", Row("curve", 0.55, "inference", seen=("is_nan_for_a_while",), missing="the batch of that step: `torch.isfinite(batch).all()` for each of its tensors, and which samples were in it")),
    ("nonfinite_loss_function", Row("curve", 0.45, "inference", seen=("is_nan_for_a_while",), missing="the outputs of the model at that step: a loss over no sample (an empty mask, no box) is 0 divided by 0")),
    ("loss_plateau", Row("curve", 0.75, "observation", seen=("is_still", "is_rate_zero"))),
    ("loss_plateau", Row("curve", 0.72, "observation", seen=("is_still", "is_constant"))),
    ("zero_gradients", Row("curve", 0.60, "inference", seen=("is_still", "is_stopped"), missing=_NORMS)),
    ("loss_plateau", Row("curve", 0.65, "inference", seen=("is_still",), missing=f"whether one batch can be learnt by heart (200 steps on it alone); {_NORMS}")),
    ("device_memory_leak", Row("curve", 0.80, "observation", seen=("is_leaking",))),
    ("every_step_skipped", Row("curve", 0.90, "observation", seen=("is_scale_collapsed",))),
    ("every_step_skipped", Row("message", 0.90, "observation", seen=("is_every_step_skipped",))),
    ("exploding_gradients", Row("message", 0.66, "inference", seen=("is_scale_tiny",), missing=_NORMS)),
    ("every_step_skipped", Row("message", 0.60, "inference", seen=("is_scale_tiny",), missing="the next twenty logs: whether the scaler ever lets a step pass again")),
    ("out_of_memory", Row("message", 0.95, "observation", seen=("is_out_of_memory",))),
    ("out_of_memory", Row("message", 0.75, "documented", seen=("is_worker_killed",))),
    ("out_of_memory", Row("message", 0.50, "inference", seen=("is_killed",), missing="the kernel's log of that host: `dmesg -T | grep -i -E 'oom|killed process'`")),
    ("device_memory_error", Row("message", 0.93, "observation", seen=("is_memory_error",))),
    ("link_errors", Row("message", 0.90, "observation", seen=("is_link_error",))),
    ("device_fault", Row("message", 0.92, "observation", seen=("is_device_fault",))),
    ("device_fault", Row("message", 0.60, "inference", seen=("is_device_error",), missing="the driver's log: `dmesg -T | grep -i xid`, and one run with `CUDA_LAUNCH_BLOCKING=1`")),
    ("rank_missing_from_collective", Row("message", 0.90, "observation", seen=("is_behind",))),
    ("rank_missing_from_collective", Row("message", 0.80, "documented", seen=("is_silent",))),
    ("rank_missing_from_collective", Row("message", 0.60, "inference", seen=("is_maybe_silent",), missing="the rest of the log: it ends while the ranks complain, and the named ones may only not have spoken yet; or how many ranks the job had (`WORLD_SIZE`)")),
    ("rank_missing_from_collective", Row("message", 0.66, "inference", seen=("is_apart",), missing="whether the ranks speak of one process group: newer versions of torch name it in the same lines; or Flight Recorder dumps: `TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1`")),
    ("rank_missing_from_collective", Row("message", 0.55, "inference", seen=("is_watchdog_stuck",), missing="where the process stands: `py-spy dump --native --pid PID` on that rank while it hangs")),
    ("interpreter_locked", Row("message", 0.50, "inference", seen=("is_watchdog_stuck",), missing="which thread holds the interpreter's lock: `py-spy dump --native --pid PID`")),
    ("rank_missing_from_collective", Row("message", 0.50, "inference", seen=("is_timed_out",), missing="the logs of all ranks, or Flight Recorder dumps: run with `TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1`")),
    ("collective_order_mismatch", Row("message", 0.90, "observation", seen=("is_order",))),
    ("collective_shape_mismatch", Row("message", 0.88, "observation", seen=("is_shape",))),
    ("rank_dead", Row("message", 0.85, "observation", seen=("is_signal",))),
    ("host_unreachable", Row("message", 0.65, "inference", seen=("is_unreachable",), missing="whether the hosts reach each other on the interface that the ranks take: `nc -vz HOST PORT` from each host, and the first lines of one run with `NCCL_DEBUG=INFO`; `NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME` choose it")),
    ("rank_dead", Row("message", 0.50, "inference", seen=("is_unreachable",), missing="the log of the rank that was to be reached: it may have ended before")),
    ("rank_dead", Row("message", 0.60, "inference", seen=("is_connection_lost",), missing="the log of the rank whose connection was closed: it ended first")),
    ("unreduced_parameters", Row("message", 0.85, "documented", seen=("is_unreduced",))),
    ("graph_detached", Row("message", 0.80, "documented", seen=("is_without_graph",))),
    ("nothing_trainable", Row("message", 0.85, "documented", seen=("is_empty_optimizer",))),
    ("nothing_trainable", Row("message", 0.50, "inference", seen=("is_without_graph",), missing="how many parameters require a gradient: `sum(p.requires_grad for p in model.parameters())`")),
    ("corrupt_labels_or_range", Row("message", 0.85, "documented", seen=("is_out_of_range",))),
    ("nonfinite_backward", Row("message", 0.90, "observation", seen=("is_anomaly",))),
    ("nonfinite_forward", Row("message", 0.60, "inference", seen=("is_loss_stopped",), missing=_ORIGIN)),
    ("script_error", Row("message", 0.93, "observation", seen=("is_exception",))),
    ("script_error", Row("message", 0.55, "inference", seen=("is_exit_code",), missing="the rank's own traceback: decorate main with `torch.distributed.elastic.multiprocessing.errors.record`, or read its own log")),
    ("lopsided_architecture", Row("layers", 0.70, "inference", seen=("is_lopsided",))),
    ("degenerate_outputs", Row("samples", 0.90, "observation", seen=("is_repeating",))),
    ("no_learning_signal", Row("rewards", 0.85, "observation", seen=("is_constant_reward",))),
    ("vanishing_gradients", Row("by_layer", 0.85, "observation", seen=("is_vanishing",))),
    ("exploding_gradients", Row("by_layer", 0.85, "observation", seen=("is_exploding",))),
)  # fmt: skip


def _entry(
    cause: str, happened: str, mechanism: str, would_refute: str, fix: tuple[str, str, str, str, str, str]
) -> CauseEntry:
    do, changes, does_not_fix, expect, verify, otherwise = fix
    return CauseEntry(
        cause=cause, happened=happened, mechanism=mechanism, would_refute=would_refute, refuting_fact="is_refuted", is_refuted_by=True, rows=(),
        fix=Fix(do=do, changes=changes, does_not_fix=does_not_fix, expect=expect, verify=verify, otherwise=otherwise),
    )  # fmt: skip


ENTRIES: dict[str, CauseEntry] = {
    entry.cause: entry
    for entry in (
        _entry("device_fault", "The driver reported a fault of a device, or the device is lost.",
               "Xid messages come from the driver: 79 a device that fell off the bus, 119 a firmware that does not answer, 31 and 43 an access or a stop that a program may have caused.",
               "The same program fails alike on another device.",
               ("Drain the node, reset the device (`nvidia-smi -r`) or reboot; let the next run avoid that host.", "Which hardware is used.", "The steps since the last checkpoint.", "No Xid over the next run.",
                "`dmesg -T | grep -i xid` stays empty.", "If 31 or 43 come back on other devices, it is the program: run with CUDA_LAUNCH_BLOCKING=1.")),
        _entry("device_memory_error", "The device's memory has an uncorrectable error.",
               "A cell or row of the device's memory failed; the driver ends the program, and remaps the row at the next reset.",
               "The counters of uncorrectable errors are zero.",
               ("Drain the node and reset the device so that rows are remapped; replace it if remapping failed.", "Which hardware is used.", "Results that were computed meanwhile.", "No further ECC message.", "`nvidia-smi -q -d ECC,ROW_REMAPPER`.", "If it returns after a reset, return the device.")),
        _entry("link_errors", "The links between devices report errors.",
               "NVLink or PCIe transfers fail and are repeated until the driver gives up (Xid 74).",
               "The link counters do not grow.",
               ("Drain the node; reseat or replace bridge, cable or device.", "Which hardware is used.", "What was computed meanwhile.", "Counters stand still.", "`nvidia-smi nvlink -e`.", "Run with NCCL_P2P_DISABLE=1 to see whether the link is what fails.")),
        _entry("no_learning_signal", "Rewards never differ, so that nothing can be learned from them.",
               "All completions are truncated, empty or judged alike: a reward function that cannot be satisfied, a parser that finds no answer, a length limit that is too short.",
               "Two completions with different rewards.",
               ("Read ten completions and compute their rewards by hand; raise the length limit, or mend the parser.", "The reward.", "A higher rate or more steps.", "Rewards above and below their mean.", "`reward_std` is above zero at most steps.", "If no completion can succeed yet, begin with easier prompts.")),
    )
}  # fmt: skip


def entry_of(cause: str) -> CauseEntry | None:
    """Return a cause's declaration, from its family or from here; None if there is none."""
    return CAUSES.get(cause) or ENTRIES.get(cause)


def rank_causes(finding: Finding) -> tuple[Cause, ...]:
    """Return every cause that fits a finding of a live detector or of this package, the surest first."""
    if finding.detector in DETECTORS:
        return rank_by(((entry, row) for entry in CAUSES.values() for row in entry.rows), finding)
    return rank_by(_rows(), finding)


def _rows() -> Iterator[tuple[CauseEntry, Row]]:
    for cause, row in ROWS:
        entry = entry_of(cause)
        if entry is not None:
            yield entry, row
