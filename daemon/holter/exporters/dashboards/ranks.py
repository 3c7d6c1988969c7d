"""Rank against rank: who comes late, who is slow, who does what, who has stopped; and their devices."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from holter.exporters.dashboards import devices
from holter.exporters.dashboards.board import DashboardFrame, board
from holter.exporters.dashboards.card import CRITICAL, FINE, Card, Panel, Query
from holter.exporters.dashboards.panels import heat, lines, states
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
from holter.exporters.dashboards.tables import Column, rows
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
    """Ranks."""
    text = (
        "Rank against rank: who comes late to collectives, who is slow, who does what, who has stopped. Of many ranks a panel shows "
        "the sixteen that are worst at the end of the time shown; the rank variable chooses among which."
    )
    return board(
        DashboardFrame("holter-ranks", "holter / Ranks", text), [*_times(), *_doings(), _table(), *devices.panels()]
    )


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
            scheme="Greens",
            is_histogram=True,
        ),
        lines(
            Card(4, "Steps behind the furthest", "Of each rank. Ranks are scraped at different moments: a step or two apart is nothing.", "none", 12),
            Query(lowest(f"scalar(max({by_rank('step')})) - {by_rank('step')}", by_rank("step", at=END)), "rank {{rank}}"),
        ),
    ]  # fmt: skip


def _doings() -> list[Panel]:
    now = " or ".join(f"{series('phase', _is(phase), of=RANK)} * {int(phase)}" for phase in Phase)
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
        states(
            Card(8, "Sidecars", "Whether the coordinator hears the rank's sidecar; of many ranks those first that it does not.", "none", 12),
            Query(sidecars(), "rank {{rank}}"),
            {"0": ("lost", CRITICAL), "1": ("connected", FINE)},
        ),
    ]  # fmt: skip


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


def _is(phase: Phase) -> str:
    return f'phase="{_name(phase)}"'


def _name(phase: Phase) -> str:
    return phase.name.lower()
