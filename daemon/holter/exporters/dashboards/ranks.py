"""Dashboard that compares ranks: which are late, slow or stopped, what they do, and their devices."""

from grafana_foundation_sdk.builders import statetimeline
from grafana_foundation_sdk.models.dashboard import Dashboard

from holter.exporters.dashboards.board import DashboardFrame, board
from holter.exporters.dashboards.panels import (
    CRITICAL,
    FINE,
    WARNING,
    Card,
    Column,
    Panel,
    Query,
    heat,
    lines,
    rows,
    states,
)
from holter.exporters.dashboards.promql import (
    END,
    INTERVAL,
    RANK,
    ago,
    by_rank,
    each,
    highest,
    highest_by_rank,
    lowest,
    mean_step_seconds,
    series,
    sidecars,
    step_buckets,
)
from holter.records import Phase

PHASES = {
    Phase.ATTACH: "semi-dark-purple",
    Phase.DATA: "semi-dark-orange",
    Phase.FORWARD: "semi-dark-blue",
    Phase.BACKWARD: "semi-dark-green",
    Phase.OPTIMIZER: "semi-dark-yellow",
    Phase.CHECKPOINT: "semi-dark-red",
    Phase.EVALUATION: "super-light-blue",
    Phase.OTHER: "#8e8e8e",
}


def build() -> Dashboard:
    """Build the dashboard "Ranks"."""
    text = (
        "Rank against rank: who comes late to collectives, who is slow, who does what, who has stopped. Of many ranks a panel shows "
        "the sixteen that are worst at the end of the time shown; the rank variable chooses among which."
    )
    return board(DashboardFrame("holter-ranks", "holter / Ranks", text), [*_times(), *_doings(), _table(), *_devices()])


def _times() -> list[Panel]:
    return [
        heat(
            Card(1, "Lag at collectives", "How late a rank came, behind the median of the others. The row in full colour is the rank that all others wait for.", "s", 12),
            Query(highest_by_rank("collective_lag_seconds"), "{{rank}}"),
        ),
        heat(
            Card(2, "Step time by rank", "Mean duration of a step. Ranks that wait for each other are equally slow: the lag beside this says who is to blame.", "s", 12),
            Query(highest(mean_step_seconds(), mean_step_seconds(END)), "{{rank}}"),
            scheme="Blues",
        ),
        heat(
            Card(3, "Distribution of step time", "Steps in a second by duration, over the chosen ranks.", "ops", 12),
            Query(step_buckets(), "{{le}}"),
            scheme="Purples",
            is_histogram=True,
        ),
        lines(
            Card(4, "Steps behind the furthest", "Of each rank. Ranks are scraped at different moments: a step or two apart is nothing.", "none", 12),
            Query(lowest(f"scalar(max({by_rank('step')})) - {by_rank('step')}", by_rank("step", at=END)), "rank {{rank}}"),
        ),
    ]  # fmt: skip


def _doings() -> list[Panel]:
    phases = {phase: series("phase", f'phase="{_name(phase)}"', of=RANK) for phase in Phase}
    now = " or ".join(f"{selected} * {int(phase)}" for phase, selected in phases.items())
    seen = each("phase", f"avg_over_time({series('job_phase_ranks')}{INTERVAL})")
    least_moved = by_rank("last_progress_timestamp_seconds", at=END)
    names = {str(int(phase)): (_name(phase), colour) for phase, colour in PHASES.items()}
    return [
        states(
            Card(5, "Phase", "What each rank was doing when it was scraped.", "none", 12),
            Query(lowest(each("rank", now), least_moved), "rank {{rank}}"),
            names,
        ),
        lines(
            Card(6, "Share of time by phase", "Over all ranks, as often as the coordinator was scraped while they were in it.", "percentunit", 12),
            Query(f"{seen} / scalar(sum({seen}))", "{{phase}}"),
            is_stacked=True,
            colours={_name(phase): colour for phase, colour in PHASES.items()},
        ),
        lines(
            Card(7, "Since the last progress", "Time since a rank completed a step or changed phase.", "s", 12),
            Query(lowest(ago(by_rank("last_progress_timestamp_seconds")), least_moved), "rank {{rank}}"),
        ),
        sidecar_states(8),
    ]  # fmt: skip


def sidecar_states(number: int) -> statetimeline.Panel:
    """Build the panel of connected sidecars; the dashboard of holter itself shows it, too."""
    text = "Whether the coordinator hears the rank's sidecar; of many ranks those first that it does not."
    heard = {"0": ("lost", CRITICAL), "1": ("connected", FINE)}
    return states(Card(number, "Sidecars", text, "none", 12), Query(sidecars(), "rank {{rank}}"), heard)


def _table() -> Panel:
    queries = (
        Query(each("rank, hostname, gpu_uuid", series("rank_info", of=RANK))),
        Query(by_rank("step")),
        Query(by_rank("collective_lag_seconds")),
        Query(by_rank("loss")),
    )
    columns = {
        "rank": Column("Rank"),
        "hostname": Column("Host"),
        "gpu_uuid": Column("Device"),
        "Value #B": Column("Steps", "none"),
        "Value #C": Column("Lag", "s"),
        "Value #D": Column("Loss", "short"),
    }
    return rows(
        Card(9, "Where the ranks run", "Host and device of each rank, and where it stands.", "none", 24, 6),
        queries,
        columns,
    )


def _name(phase: Phase) -> str:
    return phase.name.lower()


REASONS = {"power": WARNING, "thermal": CRITICAL, "hardware": CRITICAL}
"""Reasons for a reduced clock with their colours, mildest first."""


def _devices() -> list[Panel]:
    """Build the panels of the ranks' devices: reduced clocks with reasons, and dcgm-exporter's figures matched by UUID.

    holter's own readings come from the sidecars alone. On a machine without devices these panels are empty.
    """
    throttled = each("rank, reason", series("device_throttled", of=RANK) + END)
    names = {"0": ("free", FINE)} | {str(level): (reason, REASONS[reason]) for level, reason in enumerate(REASONS, 1)}
    return [
        lines(
            Card(10, "Device: clock", "Share of the most that it can be. A device that computes and is below its peers holds all of them up.", "percentunit", 12),
            Query(lowest(_clock(), _clock(END)), "rank {{rank}}"),
        ),
        states(
            Card(11, "Device: clock held down", "Why the clock is held down: power cap, heat, or the hardware itself. Idleness is none of them.", "none", 12),
            Query(highest(_held_down(), f"sum by (rank) ({throttled})"), "rank {{rank}}"),
            names,
        ),
        lines(
            Card(12, "Device: temperature", "As its driver tells the sidecar.", "celsius", 12),
            Query(highest_by_rank("device_temperature_celsius"), "rank {{rank}}"),
        ),
        lines(
            Card(13, "Device: power", "As its driver tells the sidecar.", "watt", 12),
            Query(highest_by_rank("device_power_watts"), "rank {{rank}}"),
        ),
        lines(
            Card(14, "Device: utilisation", "From dcgm-exporter, if Prometheus scrapes it: the device of each rank, found by its UUID.", "percent", 12),
            Query(lowest(_dcgm("GPU_UTIL"), _dcgm("GPU_UTIL", END)), "rank {{rank}}"),
        ),
        lines(
            Card(15, "Device: memory used", "From dcgm-exporter, likewise.", "mbytes", 12),
            Query(highest(_dcgm("FB_USED"), _dcgm("FB_USED", END)), "rank {{rank}}"),
        ),
    ]  # fmt: skip


def _clock(at: str = "") -> str:
    return f"{by_rank('device_clock_hertz', at=at)} / {by_rank('device_clock_limit_hertz', at=at)}"


def _held_down() -> str:
    """Return the number of the most severe reason for a reduced clock; 0 if there is none."""
    told = [series("device_throttled", f'reason="{reason}"', of=RANK) for reason in REASONS]
    return each("rank", " or ".join(f"{selected} * {level}" for level, selected in enumerate(told, 1)))


def _dcgm(field: str, at: str = "") -> str:
    """Return a metric of dcgm-exporter for each rank's device.

    Several ranks may share a device, and dcgm-exporter may report parts of it.
    """
    device = each("rank, gpu_uuid", series("rank_info", 'gpu_uuid!=""', of=RANK) + at)
    ranks = f'label_replace({device}, "UUID", "$1", "gpu_uuid", "(.+)")'
    return each("rank", f"{ranks} * on (UUID) group_left () {each('UUID', f'DCGM_FI_DEV_{field}{at}')}")
