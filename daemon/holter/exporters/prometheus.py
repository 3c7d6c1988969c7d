"""Turn snapshots into Prometheus metrics. A scrape touches no rank, driver or lock: it renders the last known state.

`METRICS` lists every metric with name, help, labels and unit; others cannot be made. A name that ends in `_total` is a
counter, which begins at 0. A unit is the name's last word. Metrics of a rank are exported by its sidecar and, in jobs
that are not too large, by the coordinator as well; those of a device by the sidecar alone; lag, and those of the job
and of modules, by the coordinator alone.

A rank that is not in the list has no series: a rank that exited disappears, so that its last values do not persist. Of
a rank whose sidecar is gone, only that fact is shown.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from holter import clock
from holter.exporters.alert_text import clipped
from holter.exporters.snapshot import STEP_BUCKETS_S, CoordinatorSnapshot, JobFigures, ModuleFigures, RankSnapshot
from holter.records import Device, Phase, Where
from holter.records.goodput import Goodput

Kind = Literal["gauge", "counter", "histogram"]

HALT_OUTCOMES = ("completed", "called_off", "refused", "incomplete", "failed")
WEBHOOK_OUTCOMES = ("delivered", "failed", "dropped")
AGGREGATES = ("mean", "min", "max")
"""Aggregates over the ranks, of one step."""


@dataclass(frozen=True)
class Metric:
    """Description of one metric."""

    help: str
    labels: tuple[str, ...] = ()
    """Label names in addition to `run_id`, which every metric has."""
    unit: str = ""
    kind: Kind = "gauge"


_RANK = ("rank",)
_DEVICE = ("rank", "gpu_uuid")
_INCIDENT = ("incident", "cause", "severity", "ranks", "tensors", "collective", "step", "url")

METRICS: dict[str, Metric] = {
    "build_info": Metric("Version of holter.", ("version",)),
    "hub_run": Metric("1 for the state in which `holter hub` sees a run.", ("state",)),
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
    "unwatched": Metric("1 when no coordinator has heard this rank's sidecar for nine seconds.", _RANK),
    "device_throttled": Metric("1 while the device's clock is held down for this reason.", (*_DEVICE, "reason")),
    "device_clock_hertz": Metric("Clock of the device's processors.", _DEVICE, "hertz"),
    "device_clock_limit_hertz": Metric("The most that clock can be.", _DEVICE, "hertz"),
    "device_temperature_celsius": Metric("Temperature of the device.", _DEVICE, "celsius"),
    "device_power_watts": Metric("Power that the device draws.", _DEVICE, "watts"),
    "device_memory_used_bytes": Metric("Memory of the device that is in use, by whomever.", _DEVICE, "bytes"),
    "device_memory_size_bytes": Metric("Memory that the device has.", _DEVICE, "bytes"),
    "device_errors_total": Metric("What the device's driver counts, by kind.", (*_DEVICE, "kind"), kind="counter"),
    "device_state": Metric("1 while the device is in this state.", (*_DEVICE, "state")),
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
    "notifications_total": Metric(
        "Messages to phones and chats: delivered, attempts that failed, messages dropped.", ("outcome",), kind="counter"
    ),
    "event_requests_total": Metric(
        "Requests to a collector of OpenTelemetry: delivered, attempts that failed, requests dropped.",
        ("outcome",),
        kind="counter",
    ),
    "goodput_ratio": Metric("Share of the wall time that made progress, over all lives of the run.", (), "ratio"),
    "wall_seconds": Metric(
        "Wall time of all lives of the run, by what it went into. Not a counter: a stall is told after a while.",
        ("part",),
        "seconds",
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

DETAILED_RANKS = 256
"""Above this many ranks, the coordinator exports only step, sidecar_up and the lag of the latest ranks; the rest is in
the sidecars' /metrics."""
MAX_LATEST = 16
"""Number of ranks whose lag is exported in a job that large; only the coordinator knows lags."""
MAX_MODULES = 20
"""Number of modules exported for each figure: those with the largest values."""
MAX_INFOS = 32
"""Number of open incidents that are described one by one."""
DEVICE_STATES = ("lost", "reset_required", "row_remap_pending", "row_remap_failed", "page_retirement_pending")
HELD = ("power_held_ns", "thermal_held_ns")
"""Counters of a device that do not count errors."""
THROTTLES = ("thermal", "power", "hardware")

_SPREADS = {
    "loss": "job_loss",
    "gradient_norm": "job_gradient_norm",
    "learning_rate": "job_learning_rate",
    "loss_scale": "job_loss_scale",
    "seconds": "job_step_duration_seconds",
}
_MAY_BE_NONFINITE = ("loss", "gradient_norm")
_FIGURES: dict[str, Callable[[ModuleFigures], float]] = {
    "module_gradient_norm": lambda module: module.gradient_norm,
    "module_weight_norm": lambda module: module.weight_norm,
    "module_update_ratio": lambda module: module.update_ratio,
    "module_gradient_zeros_ratio": lambda module: module.gradient_zeros,
}


class _Page:
    """The metrics of one scrape, in the order of `METRICS`."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._families = {name: _family(name, metric) for name, metric in METRICS.items()}

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """Add one series, unless its value is not known."""
        family = self._families[name]
        assert not isinstance(family, HistogramMetricFamily)
        if value is not None:
            family.add_metric([self._run_id, *labels], value)

    def set_steps(self, rank: RankSnapshot) -> None:
        """Add the step time histogram of a rank."""
        bounds = [*(str(bound) for bound in STEP_BUCKETS_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(rank.steps.counts), strict=True))
        family = self._families["step_seconds"]
        assert isinstance(family, HistogramMetricFamily)
        family.add_metric([self._run_id, str(rank.rank)], buckets, rank.steps.total_s)

    def families(self) -> Iterator[MetricFamily]:
        """Return the metrics that have a series."""
        return (family for family in self._families.values() if family.samples)


_Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily


def _family(name: str, metric: Metric) -> _Family:
    kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
    made: _Family = kinds[metric.kind](
        f"holter_{name.removesuffix('_total')}", metric.help, labels=("run_id", *metric.labels), unit=metric.unit
    )
    return made


def families(
    run_id: str, version: str, ranks: Sequence[RankSnapshot], coordinator: CoordinatorSnapshot | None = None
) -> list[MetricFamily]:
    """Return all metrics of a scrape, in the order of `METRICS`.

    A sidecar passes its own rank and no coordinator.
    """
    page = _Page(run_id)
    page.set("build_info", 1, version)
    for rank in ranks:
        page.set("sidecar_up", int(rank.is_sidecar_up), str(rank.rank))
        if rank.is_sidecar_up:
            page.set("step", rank.step, str(rank.rank))
        if rank.is_sidecar_up and len(ranks) <= DETAILED_RANKS:
            _show_rank(page, rank)
    if len(ranks) > DETAILED_RANKS:
        for rank in _latest(ranks):
            page.set("collective_lag_seconds", rank.lag_s, str(rank.rank))
    if coordinator is not None:
        _show_coordinator(page, coordinator)
        _show_job(page, coordinator.job)
        if coordinator.goodput is not None:
            _show_goodput(page, coordinator.goodput)
    return list(page.families())


def hub_families(run_id: str, state: str, zeros: Iterable[str] = ()) -> list[MetricFamily]:
    """Return what the hub itself knows of a run, with zero counters for the causes in `zeros`, which have not occurred there."""
    page = _Page(run_id)
    page.set("hub_run", 1, state)
    for cause in sorted(zeros):
        page.set("incidents_total", 0, cause)
    return list(page.families())


def expose(metrics: Iterable[MetricFamily], accept: str) -> tuple[bytes, str]:
    """Return body and content type in the format that the scraper asked for: OpenMetrics or the classic text."""
    encoder, content_type = choose_encoder(accepted_format(accept))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Rendered(list(metrics)))
    return encoder(registry), content_type


class _Rendered(Collector):
    """Wraps finished metrics in the interface that the encoders need."""

    def __init__(self, metrics: list[MetricFamily]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[MetricFamily]:
        return self._metrics


def _show_rank(page: _Page, rank: RankSnapshot) -> None:
    label = str(rank.rank)
    page.set("rank_info", 1, label, rank.hostname, rank.gpu_uuid)
    page.set("last_progress_timestamp_seconds", clock.for_people_s(rank.last_progress_s), label)
    page.set("loss", rank.loss, label)
    page.set("gradient_norm", rank.gradient_norm, label)
    page.set("collective_lag_seconds", rank.lag_s, label)
    page.set("overhead_ratio", rank.overhead_ratio, label)
    page.set("observations_dropped_total", rank.dropped, label)
    page.set_steps(rank)
    for phase in Phase if rank.phase is not None else ():
        page.set("phase", int(phase is rank.phase), label, phase.name.lower())
    for where in get_args(Where):
        page.set("nonfinite_total", rank.nonfinite.get(where, 0), label, where)
    if rank.is_coordinator_there is not None:
        page.set("coordinator_up", int(rank.is_coordinator_there), label)
    if rank.is_unwatched is not None:
        page.set("unwatched", int(rank.is_unwatched), label)
    if rank.device is not None:
        _show_device(page, label, rank.device)


def _show_device(page: _Page, rank: str, device: Device) -> None:
    for reason in THROTTLES:
        page.set("device_throttled", int(reason in device.throttled_by), rank, device.uuid, reason)
    page.set("device_clock_hertz", _hertz(device.clock_mhz), rank, device.uuid)
    page.set("device_clock_limit_hertz", _hertz(device.clock_limit_mhz), rank, device.uuid)
    page.set("device_temperature_celsius", device.temperature_c, rank, device.uuid)
    page.set("device_power_watts", device.power_w, rank, device.uuid)
    page.set("device_memory_used_bytes", device.memory_used_bytes, rank, device.uuid)
    page.set("device_memory_size_bytes", device.memory_total_bytes, rank, device.uuid)
    for kind, number in device.counters.items():
        if kind not in HELD:
            page.set("device_errors_total", number, rank, device.uuid, kind)
    for state in DEVICE_STATES:
        page.set("device_state", int(state in device.states), rank, device.uuid, state)


def _hertz(mhz: float | None) -> float | None:
    return None if mhz is None else mhz * 1e6


def _show_coordinator(page: _Page, state: CoordinatorSnapshot) -> None:
    for detector in state.detectors:
        page.set("detector_seconds", state.detector_s.get(detector), detector)
        page.set("detector_failures_total", state.detector_failures.get(detector, 0), detector)
    for detector, severity in sorted(set(state.findings)):
        page.set("finding_active", 1, detector, severity)
    for cause, severity in sorted(set(state.open_incidents)):
        page.set("incident_open", state.open_incidents.count((cause, severity)), cause, severity)
    for info in state.infos[:MAX_INFOS]:
        where = (info.ranks, info.tensors, info.collective, info.step, info.url)
        page.set("incident_info", 1, info.incident, info.cause, info.severity, *where)
    for severity, opened_s in sorted(state.opened_s.items()):
        page.set("incident_opened_timestamp_seconds", clock.for_people_s(opened_s), severity)
    for cause, number in sorted(state.incidents.items()):
        page.set("incidents_total", number, cause)
    for outcome in HALT_OUTCOMES:
        page.set("halts_total", state.halts.get(outcome, 0), outcome)
    page.set("checkpoint_last_good_step", state.last_good_step)
    page.set("blind_spots", state.num_blind_spots)
    for outcome in WEBHOOK_OUTCOMES:
        page.set("webhook_messages_total", state.webhook.get(outcome, 0), outcome)
        page.set("notifications_total", state.notifications.get(outcome, 0), outcome)
        page.set("event_requests_total", state.events.get(outcome, 0), outcome)


def _show_goodput(page: _Page, goodput: Goodput) -> None:
    page.set("goodput_ratio", goodput.ratio)
    for part, seconds in goodput.parts.items():
        page.set("wall_seconds", seconds, part)


def _show_job(page: _Page, job: JobFigures) -> None:
    page.set("job_ranks", job.world_size)
    for state, number in sorted(job.sidecars.items()):
        page.set("job_sidecars", number, state)
    for phase in Phase:
        page.set("job_phase_ranks", job.phases.get(phase, 0), phase.name.lower())
    page.set("job_step", job.step)
    page.set("job_last_progress_timestamp_seconds", clock.for_people_s(job.last_progress_s))
    page.set("job_collective_lag_seconds", job.lag_s)
    page.set("job_observations_dropped_total", job.dropped)
    page.set("job_overhead_ratio", job.overhead_ratio)
    for name, spread in job.spreads.items():
        for aggregate, value in zip(AGGREGATES, (spread.mean, spread.low, spread.high), strict=True):
            page.set(_SPREADS[name], value, aggregate)
        if name in _MAY_BE_NONFINITE:
            page.set("job_nonfinite_ranks", spread.num_nonfinite, name)
    for name, figure in _FIGURES.items():
        for label, value in _largest(job.modules, figure):
            page.set(name, value, label)
    # Imported here, because it imports the detectors, for which a sidecar must not wait; a sidecar never gets here.
    from holter.diagnosis.plots import EXPONENTS_OF_BUCKET, LOWEST_EXPONENT  # noqa: PLC0415

    for bucket, share in enumerate(job.exponents):
        page.set("gradient_exponent_ratio", share, str(bucket * EXPONENTS_OF_BUCKET + LOWEST_EXPONENT))


def _latest(ranks: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    late = (rank for rank in ranks if rank.is_sidecar_up and rank.lag_s)
    return heapq.nlargest(MAX_LATEST, late, key=lambda rank: rank.lag_s or 0.0)


def _largest(modules: Sequence[ModuleFigures], figure: Callable[[ModuleFigures], float]) -> list[tuple[str, float]]:
    """Return the modules with the largest values, infinite first; NaN means that nobody looked.

    Long names that are equal after clipping become one series with the largest value.
    """
    told = [(clipped(module.module), figure(module)) for module in modules if not math.isnan(figure(module))]
    largest = dict(sorted(told, key=lambda pair: pair[1]))
    return sorted(largest.items(), key=lambda pair: (-pair[1], pair[0]))[:MAX_MODULES]


OPEN_METRICS = "application/openmetrics-text"
CLASSIC = ("text/plain", "text/*", "*/*")


def accepted_format(accept: str) -> str:
    """Return an Accept header that the library can handle; empty for the classic text.

    OpenMetrics is chosen if the scraper weighs it no less than the classic text and asks for a version that we speak. The library itself
    ignores weights, claims any version it is asked for, and raises on one that is not a number.
    """
    weights: dict[str, float] = {}
    for kind, parameters in map(_media_range, accept.split(",")):
        if kind != OPEN_METRICS or (parameters.get("version") or "1").split(".")[0] == "1":
            weights[kind] = max(weights.get(kind, 0.0), _quality(parameters.get("q", "1")))
    weight = weights.get(OPEN_METRICS, 0.0)
    is_preferred = weight > 0 and weight >= max(weights.get(kind, 0.0) for kind in CLASSIC)
    return f"{OPEN_METRICS};version=1.0.0" if is_preferred else ""


def _media_range(part: str) -> tuple[str, dict[str, str]]:
    kind, *parameters = part.split(";")
    pairs = (word.partition("=") for word in parameters)
    return kind.strip().lower(), {name.strip().lower(): value.strip(' "') for name, _, value in pairs}


def _quality(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
