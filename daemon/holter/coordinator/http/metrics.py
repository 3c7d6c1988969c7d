"""What `/metrics` says of the whole job. The cost of a scrape does not grow with the number of modules, and hardly with that of ranks. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from holter.coordinator.judge import DIAGNOSIS
from holter.coordinator.roster import Member, Roster
from holter.coordinator.run import Run
from holter.coordinator.window.assembly import Assembly
from holter.diagnosis.explain import WORST_FIRST
from holter.exporters.alert_text import incident_info
from holter.exporters.snapshot import CoordinatorSnapshot, IncidentInfo, JobFigures, ModuleFigures
from holter.faults.window import Spread, StepArrivals, StepNumbers
from holter.records import ModuleVitals, Vitals

SPREADS = ("loss", "gradient_norm", "learning_rate", "seconds", "loss_scale")
LOOK_BACK = 64
"""How many steps back the newest value of a number is looked for: not every step reads a loss."""


def job_figures(roster: Roster, assembly: Assembly) -> JobFigures:
    """The figures of the job as of now."""
    living = [member for member in roster.members.values() if member.state != "ended"]
    overheads = [one.numbers.overhead_ratio for one in living if one.numbers.overhead_ratio is not None]
    series, vitals = assembly.series(), assembly.newest_vitals()
    return JobFigures(
        world_size=roster.world_size,
        step=series[-1].step + 1 if series else None,
        sidecars={
            "connected": 0,
            "gone": 0,
            "silent": 0,
            "ended": 0,
            "absent": max(0, roster.world_size - len(roster.members)),
            **Counter(member.state for member in roster.members.values()),
        },
        phases=Counter(one.progress.phase for one in living if one.progress.phase is not None),
        last_progress_s=_last_progress_s(living),
        lag_s=_lag_s(assembly.arrivals()),
        dropped=roster.dropped,
        overhead_ratio=max(overheads, default=None),
        spreads=_newest(series[-LOOK_BACK:]),
        modules=module_figures(vitals),
        exponents=occupancy(vitals),
    )


def module_figures(told: Sequence[Vitals]) -> tuple[ModuleFigures, ...]:
    """Each module once: the largest of each number over the ranks, and over its groups of parameters."""
    groups: dict[str, list[ModuleVitals]] = {}
    for vitals in told:
        for module in vitals.modules:
            groups.setdefault(module.module, []).append(module)
    return tuple(
        ModuleFigures(
            module=name,
            gradient_norm=_largest(one.gradient_norm for one in known),
            weight_norm=_largest(one.weight_norm for one in known),
            update_ratio=_largest(one.update_ratio for one in known),
            gradient_zeros=_largest(one.gradient_zeros for one in known),
        )
        for name, known in groups.items()
    )


def occupancy(told: Sequence[Vitals]) -> tuple[float, ...]:
    """Share of gradient values in each bucket of exponents, over all modules and ranks that reported them."""
    tables = [module.exponents for vitals in told for module in vitals.modules if module.exponents]
    counts = [sum(column) for column in zip(*tables, strict=False)]
    total = sum(counts)
    return tuple(count / total for count in counts) if total else ()


def snapshot(run: Run) -> CoordinatorSnapshot:
    """For the exporter."""
    healthy = run.checkpoints.last_healthy()
    return CoordinatorSnapshot(
        halts=run.halts.outcomes,
        last_good_step=None if healthy is None else healthy.step,
        detectors=(*(detector.name for detector in run.judging.runner.detectors), DIAGNOSIS),
        detector_s=run.judging.runner.seconds,
        detector_failures=run.judging.runner.failures,
        findings=tuple((found.detector, found.severity) for found in run.judging.findings),
        open_incidents=tuple(run.incidents.open()),
        opened_s=run.incidents.opened_s(),
        incidents=run.incidents.by_cause(),
        infos=_infos(run),
        num_blind_spots=len(run.blind()),
        webhook=run.deliveries.counts,
        job=job_figures(run.roster, run.assembly),
    )


def _newest(series: Sequence[StepNumbers]) -> dict[str, Spread]:
    found: dict[str, Spread] = {}
    for entry in reversed(series):
        for name in SPREADS:
            if name not in found and name in entry.numbers:
                found[name] = entry.numbers[name]
        if len(found) == len(SPREADS):
            break
    return {name: found[name] for name in SPREADS if name in found}


def _last_progress_s(living: Iterable[Member]) -> float | None:
    moments = [one.progress.moved_ns for one in living if one.progress.moved_ns is not None]
    return max(moments) / 1e9 if moments else None


def _lag_s(arrivals: Sequence[StepArrivals]) -> float | None:
    return max((arrival.lag_s for arrival in arrivals[-1].latest), default=0.0) if arrivals else None


def _largest(values: Iterable[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _infos(run: Run) -> tuple[IncidentInfo, ...]:
    """The gravest first: of very many only some are described."""
    infos = [incident_info(diagnosis, run.settings.address) for diagnosis in run.incidents.settled()]
    return tuple(sorted(infos, key=lambda info: WORST_FIRST.index(info.severity)))
