"""Every metric there is: name, help, labels, unit. A metric that is not in this table cannot be made.

A name that ends in `_total` is a counter, which begins at 0. A unit is the name's last word. Metrics of a rank are exported by its sidecar and,
in jobs that are not too large, by the coordinator too; those of a device by the sidecar alone; lag, and those of the job and of modules, by the
coordinator alone.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]

HALT_OUTCOMES = ("completed", "called_off", "refused", "incomplete", "failed")
WEBHOOK_OUTCOMES = ("delivered", "failed", "dropped")
AGGREGATES = ("mean", "min", "max")
"""Over the ranks, of one step."""


@dataclass(frozen=True)
class Metric:
    """One line of the table."""

    help: str
    labels: tuple[str, ...] = ()
    """After `run_id`, which every metric has."""
    unit: str = ""
    kind: Kind = "gauge"


_RANK = ("rank",)
_DEVICE = ("rank", "gpu_uuid")
_INCIDENT = ("incident", "cause", "severity", "ranks", "tensors", "collective", "step", "url")

METRICS: dict[str, Metric] = {
    "build_info": Metric("Version of holter.", ("version",)),
    "rank_info": Metric("Where a rank runs.", (*_RANK, "hostname", "gpu_uuid")),
    "step": Metric("Optimizer steps completed.", _RANK),
    "last_progress_timestamp_seconds": Metric("When the rank last moved, since the epoch.", _RANK, "seconds"),
    "phase": Metric("1 for what the rank is doing.", (*_RANK, "phase")),
    "loss": Metric("Loss at the last step that read one.", _RANK),
    "gradient_norm": Metric("L2 norm of the gradient at the last step that read one.", _RANK),
    "nonfinite_total": Metric("Tensors that held NaN or Inf.", (*_RANK, "where"), kind="counter"),
    "collective_lag_seconds": Metric(
        "How late the rank came to collectives, behind the median of the others.", _RANK, "seconds"
    ),
    "overhead_ratio": Metric("Share of step time that holter takes.", _RANK, "ratio"),
    "observations_dropped_total": Metric("Observations lost on the way.", _RANK, kind="counter"),
    "sidecar_up": Metric("1 while the rank's sidecar is connected.", _RANK),
    "coordinator_up": Metric("1 while the rank's sidecar hears the coordinator.", _RANK),
    "device_throttled": Metric("1 while the device's clock is held down for this reason.", (*_DEVICE, "reason")),
    "device_clock_hertz": Metric("Clock of the device's processors.", _DEVICE, "hertz"),
    "device_clock_limit_hertz": Metric("The most that clock can be.", _DEVICE, "hertz"),
    "device_temperature_celsius": Metric("Temperature of the device.", _DEVICE, "celsius"),
    "device_power_watts": Metric("Power that the device draws.", _DEVICE, "watts"),
    "finding_active": Metric("1 while a detector's finding stands.", ("detector", "severity")),
    "incident_open": Metric("Open incidents.", ("cause", "severity")),
    "incident_info": Metric("1 for an open incident: what, who, where, since when.", _INCIDENT),
    "incident_opened_timestamp_seconds": Metric(
        "When the newest open incident was opened, since the epoch.", ("severity",), "seconds"
    ),
    "incidents_total": Metric(
        "Incidents since the start; one that came to be explained otherwise counts for each of its causes.",
        ("cause",),
        kind="counter",
    ),
    "halts_total": Metric("Halts since the start, by how they ended.", ("outcome",), kind="counter"),
    "checkpoint_last_good_step": Metric("Completed steps in the newest checkpoint whose numbers are good."),
    "detector_seconds": Metric("How long a detector took when it last judged.", ("detector",), "seconds"),
    "detector_failures_total": Metric("How often a detector failed to judge.", ("detector",), kind="counter"),
    "blind_spots": Metric("Things that holter cannot see, each a sentence in /api/v1/status."),
    "webhook_messages_total": Metric(
        "Messages to the webhook: delivered, attempts that failed, messages dropped.", ("outcome",), kind="counter"
    ),
    "job_ranks": Metric("Ranks that the job has."),
    "job_sidecars": Metric("Ranks by the state of their sidecar.", ("state",)),
    "job_phase_ranks": Metric("Ranks by what they are doing.", ("phase",)),
    "job_step": Metric("Optimizer steps that every living rank has completed."),
    "job_last_progress_timestamp_seconds": Metric("When any rank last moved, since the epoch.", (), "seconds"),
    "job_collective_lag_seconds": Metric("How late the latest rank came to collectives.", (), "seconds"),
    "job_observations_dropped_total": Metric("Observations lost on the way, of all ranks.", kind="counter"),
    "job_overhead_ratio": Metric("Share of step time that holter takes, on the rank where it takes most.", (), "ratio"),
    "job_nonfinite_ranks": Metric("Ranks whose number was NaN or Inf at the newest step that read it.", ("number",)),
    "job_loss": Metric("Loss over all ranks.", ("aggregate",)),
    "job_gradient_norm": Metric("L2 norm of the gradient over all ranks.", ("aggregate",)),
    "job_learning_rate": Metric("Learning rate over all ranks.", ("aggregate",)),
    "job_loss_scale": Metric("The loss scaler's factor over all ranks.", ("aggregate",)),
    "job_step_duration_seconds": Metric("Duration of the last step over all ranks.", ("aggregate",), "seconds"),
    "module_gradient_norm": Metric("L2 norm of a module's gradient, the largest modules.", ("module",)),
    "module_weight_norm": Metric("L2 norm of a module's weights, the largest modules.", ("module",)),
    "module_update_ratio": Metric(
        "Norm of a step over norm of the weights, the largest modules.", ("module",), "ratio"
    ),
    "module_gradient_zeros_ratio": Metric("Share of zeros in the gradient, the largest modules.", ("module",), "ratio"),
    "gradient_exponent_ratio": Metric(
        "Share of gradient values from 2^exponent to below 2^(exponent+8); NaN and Inf are in the highest, zeros in the lowest.",
        ("exponent",),
        "ratio",
    ),
    "step_seconds": Metric("Duration of optimizer steps.", _RANK, "seconds", "histogram"),
}
