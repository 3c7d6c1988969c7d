"""Snapshots -> Prometheus metric families. A scrape touches no rank, no driver, no lock: it renders the last state.

Names, help and labels stand in one table; a metric that is not in it cannot be made. Ranks that are not in the list have no
series, so that one which exited disappears instead of standing still; of one whose sidecar is gone only that is shown.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from holter.exporters.snapshot import STEP_BUCKETS_S, CoordinatorSnapshot, RankSnapshot
from holter.records import Phase, Where

DETAILED_RANKS = 256
"""Above this many ranks one scrape carries only step and sidecar_up; the sidecars' own /metrics have the rest."""


@dataclass(frozen=True)
class _Spec:
    help: str
    labels: tuple[str, ...]
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily


_RANK = ("run_id", "rank")
_TABLE: dict[str, _Spec] = {
    "build_info": _Spec("Version of holter.", ("run_id", "version")),
    "rank_info": _Spec("Where a rank runs.", (*_RANK, "hostname", "gpu_uuid")),
    "step": _Spec("Optimizer steps completed.", _RANK),
    "last_progress_timestamp_seconds": _Spec("When the rank last moved, since the epoch.", _RANK),
    "phase": _Spec("1 for what the rank is doing.", (*_RANK, "phase")),
    "loss": _Spec("Loss at the last step that read one.", _RANK),
    "gradient_norm": _Spec("L2 norm of the gradient at the last step that read one.", _RANK),
    "nonfinite_total": _Spec("Tensors that held NaN or Inf.", (*_RANK, "where"), CounterMetricFamily),
    "overhead_ratio": _Spec("Share of step time that holter takes.", _RANK),
    "observations_dropped_total": _Spec("Observations lost on the way.", _RANK, CounterMetricFamily),
    "sidecar_up": _Spec("1 while the rank's sidecar is connected.", _RANK),
    "finding_active": _Spec("1 while a detector's finding stands.", ("run_id", "detector", "severity")),
    "incident_open": _Spec("Open incidents.", ("run_id", "cause", "severity")),
    "incidents_total": _Spec("Incidents since the start.", ("run_id", "cause"), CounterMetricFamily),
    "detector_seconds": _Spec("How long a detector took when it last judged.", ("run_id", "detector")),
    "detector_failures_total": _Spec(
        "How often a detector failed to judge.", ("run_id", "detector"), CounterMetricFamily
    ),
}
_STEPS = _Spec("Duration of optimizer steps.", _RANK)


class _Page:
    """The families of one scrape, in the table's order."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._steps = HistogramMetricFamily("holter_step_seconds", _STEPS.help, labels=_STEPS.labels)
        self._families = {
            name: spec.kind(f"holter_{name.removesuffix('_total')}", spec.help, labels=spec.labels)
            for name, spec in _TABLE.items()
        }

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """One series; none for a value that is not known."""
        if value is not None:
            self._families[name].add_metric([self._run_id, *labels], value)

    def set_steps(self, rank: RankSnapshot) -> None:
        """The step time histogram of a rank."""
        bounds = [*(str(bound) for bound in STEP_BUCKETS_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(rank.steps.counts), strict=True))
        self._steps.add_metric([self._run_id, str(rank.rank)], buckets, rank.steps.total_s)

    def families(self) -> Iterator[Metric]:
        """Those that have a series."""
        return (family for family in (*self._families.values(), self._steps) if family.samples)


def families(
    run_id: str, version: str, ranks: Sequence[RankSnapshot], coordinator: CoordinatorSnapshot | None = None
) -> list[Metric]:
    """Everything one scrape shows, in the table's order; a sidecar gives its own rank and no coordinator."""
    page = _Page(run_id)
    page.set("build_info", 1, version)
    for rank in ranks:
        page.set("sidecar_up", int(rank.is_sidecar_up), str(rank.rank))
        if rank.is_sidecar_up:
            page.set("step", rank.step, str(rank.rank))
        if rank.is_sidecar_up and len(ranks) <= DETAILED_RANKS:
            _show_rank(page, rank)
    if coordinator is not None:
        _show_coordinator(page, coordinator)
    return list(page.families())


def expose(metrics: Iterable[Metric], accept: str) -> tuple[bytes, str]:
    """Body and content type in the format that the scraper asked for: OpenMetrics or the classic text."""
    encoder, content_type = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Rendered(list(metrics)))
    return encoder(registry), content_type


class _Rendered(Collector):
    """Families that are ready, in the form the encoders take."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _show_rank(page: _Page, rank: RankSnapshot) -> None:
    label = str(rank.rank)
    page.set("rank_info", 1, label, rank.hostname, rank.gpu_uuid)
    page.set("last_progress_timestamp_seconds", rank.last_progress_s, label)
    page.set("loss", rank.loss, label)
    page.set("gradient_norm", rank.gradient_norm, label)
    page.set("overhead_ratio", rank.overhead_ratio, label)
    page.set("observations_dropped_total", rank.dropped, label)
    page.set_steps(rank)
    for phase in Phase if rank.phase is not None else ():
        page.set("phase", int(phase is rank.phase), label, phase.name.lower())
    for where in get_args(Where):
        page.set("nonfinite_total", rank.nonfinite.get(where, 0), label, where)


def _show_coordinator(page: _Page, state: CoordinatorSnapshot) -> None:
    for detector in state.detectors:
        page.set("detector_seconds", state.detector_s.get(detector), detector)
        page.set("detector_failures_total", state.detector_failures.get(detector, 0), detector)
    for detector, severity in sorted(set(state.findings)):
        page.set("finding_active", 1, detector, severity)
    for cause, severity in sorted(set(state.open_incidents)):
        page.set("incident_open", state.open_incidents.count((cause, severity)), cause, severity)
    for cause, number in sorted(state.incidents.items()):
        page.set("incidents_total", number, cause)
