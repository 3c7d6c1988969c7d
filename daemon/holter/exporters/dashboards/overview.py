"""One run on one screen: does it go on, how fast, does it learn, and what is wrong."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from holter.exporters.dashboards.board import TO_INCIDENTS, TO_RANKS, TO_SELF, Frame, board
from holter.exporters.dashboards.card import CRITICAL, FINE, PLAIN, Card, Panel, Query
from holter.exporters.dashboards.panels import LOG, lines, number
from holter.exporters.dashboards.promql import RANK, ago, by_rank, each, or_none, rate, series, step_buckets
from holter.exporters.dashboards.shared import findings, open_incidents


def build() -> Dashboard:
    """Run overview."""
    text = "Does the run go on, how fast, does it learn, and what is wrong. Every number is holter's own; nothing is judged here."
    return board(Frame("holter-overview", "holter / Run overview", text), [*_now(), *_lately()])


def _now() -> list[Panel]:
    progress = by_rank("last_progress_timestamp_seconds")
    heard, ended = (each("run_id", series("job_sidecars", f'state="{state}"')) for state in ("connected", "ended"))
    # A rank that never came has no series of its own; where no coordinator is scraped, nobody misses it.
    share = f"{heard} / ({each('run_id', series('job_ranks'))} - {ended})"
    watched = f"max({share}) or avg(min by (rank) ({series('sidecar_up', of=RANK)}))"
    incidents = or_none(f"sum({each('cause, severity', series('incident_open'))})")
    return [
        number(
            Card(1, "Steps", "Optimizer steps that every chosen rank has completed.", "none", 4, 5),
            Query(f"min({by_rank('step')})"),
        ),
        number(
            Card(2, "Step time", "Median duration of an optimizer step, from the histogram's buckets.", "s", 4, 5),
            Query(f"histogram_quantile(0.5, {step_buckets()})"),
            nan=("no steps", PLAIN),
        ),
        number(
            Card(3, "Loss", "Mean over the chosen ranks of the loss that each last read.", "short", 4, 5),
            Query(f"avg({by_rank('loss')})"),
            nan=("NaN", CRITICAL),
        ),
        number(
            Card(4, "Since the last progress", "Of the rank that has not moved for longest.", "s", 4, 5, link=TO_RANKS),
            Query(ago(f"min({progress})")),
        ),
        number(
            Card(
                5, "Ranks watched", "Share of ranks whose sidecar the coordinator hears. Below 100 % holter is partly blind.", "percentunit",
                4, 5, ((1, FINE),), CRITICAL, TO_SELF,
            ),
            Query(watched),
        ),
        number(
            Card(6, "Open incidents", "Incidents that stand now, of every severity.", "none", 4, 5, ((1, CRITICAL),), FINE, TO_INCIDENTS),
            Query(incidents),
        ),
    ]  # fmt: skip


def _lately() -> list[Panel]:
    return [
        lines(
            Card(7, "Loss", "What each rank read at its last backward pass, before any filter of the framework.", "short"),
            Query(by_rank("loss"), "rank {{rank}}"),
        ),
        lines(
            Card(8, "Gradient norm", "L2 norm of each rank's gradient.", "short"),
            Query(by_rank("gradient_norm"), "rank {{rank}}"),
            scale=LOG,
        ),
        lines(
            Card(9, "Steps per second", "Of each rank. One line below the others is a rank that lost its peers.", "ops"),
            Query(each("rank", rate("step_seconds_count")), "rank {{rank}}"),
        ),
        lines(
            Card(10, "Step time", "Quantiles over the chosen ranks' steps, interpolated within the histogram's buckets.", "s", 12, link=TO_RANKS),
            *(Query(f"histogram_quantile({q}, {step_buckets()})", f"{int(q * 100)} %") for q in (0.5, 0.9, 0.99)),
        ),
        findings(11, width=12),
        open_incidents(12),
    ]  # fmt: skip
