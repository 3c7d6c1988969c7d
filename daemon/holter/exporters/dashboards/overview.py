"""Dashboard of one run: whether it goes on, how fast, whether it learns, and what is wrong."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from holter.exporters.dashboards.board import TO_INCIDENTS, TO_RANKS, TO_SELF, DashboardFrame, board
from holter.exporters.dashboards.incidents import findings, open_incidents
from holter.exporters.dashboards.panels import CRITICAL, FINE, LOG, Card, Panel, Query, lines, number
from holter.exporters.dashboards.promql import RANK, ago, each, job, job_speed, job_spread, or_none, series


def build() -> Dashboard:
    """Build the dashboard "Run overview"."""
    text = "Does the run go on, how fast, does it learn, and what is wrong. Every number is holter's own; nothing is judged here."
    return board(DashboardFrame("holter-overview", "holter / Run overview", text), [*_now(), *_lately()])


def _now() -> list[Panel]:
    progress = each("run_id", series("job_last_progress_timestamp_seconds"))
    nonfinite = each("run_id", series("job_nonfinite_ranks", 'number="loss"'))
    heard, ended = (each("run_id", series("job_sidecars", f'state="{state}"')) for state in ("connected", "ended"))
    # A rank that never came has no series of its own; where no coordinator is scraped, nobody misses it.
    share = f"{heard} / ({each('run_id', series('job_ranks'))} - {ended})"
    watched = f"max({share}) or avg(min by (rank) ({series('sidecar_up', of=RANK)}))"
    incidents = or_none(f"sum({each('cause, severity', series('incident_open'))})")
    return [
        number(
            Card(6, "Open incidents", "Incidents that stand now, of every severity.", "none", 4, 5, ((1, CRITICAL),), FINE, TO_INCIDENTS),
            Query(incidents),
        ),
        number(
            Card(
                5, "Ranks watched", "Share of ranks whose sidecar the coordinator hears. Below 100 % holter is partly blind.", "percentunit",
                4, 5, ((1, FINE),), CRITICAL, TO_SELF,
            ),
            Query(watched),
        ),
        number(
            Card(1, "Steps", "Optimizer steps that every living rank has completed.", "none", 4, 5),
            Query(each("run_id", series("job_step"))),
        ),
        number(
            Card(2, "Step time", "Mean over the ranks of how long the newest step took.", "s", 4, 5),
            Query(job("step_duration_seconds", "mean")),
        ),
        number(
            Card(3, "Loss", "Mean over the ranks at the newest step that read one. NaN: that of one rank or more was not finite.", "short", 4, 5),
            # 0 / 1 adds nothing; 0 / 0 is NaN.
            Query(f"{job('loss', 'mean')} + 0 / ({nonfinite} == bool 0)"),
            nan=("NaN", CRITICAL),
        ),
        number(
            Card(4, "Since the last progress", "Since any rank completed a step or changed phase.", "s", 4, 5, link=TO_RANKS),
            Query(ago(progress)),
        ),
        open_incidents(12),
    ]  # fmt: skip


def _lately() -> list[Panel]:
    return [
        lines(
            Card(7, "Loss", "Mean, lowest and highest over the ranks, of those that are finite.", "short"),
            Query(job_spread("loss"), "{{aggregate}}"),
        ),
        lines(
            Card(8, "Gradient norm", "L2 norm of the ranks' gradients: mean, lowest and highest of those that are finite.", "short"),
            Query(job_spread("gradient_norm"), "{{aggregate}}"),
            scale=LOG,
        ),
        lines(
            Card(9, "Steps per second", "Of the whole job: steps that every living rank has completed.", "ops"),
            Query(job_speed(), "steps"),
        ),
        lines(
            Card(10, "Step time", "Of the newest step: mean, shortest and longest over the ranks.", "s", 12, link=TO_RANKS),
            Query(job_spread("step_duration_seconds"), "{{aggregate}}"),
        ),
        findings(11, width=12),
    ]  # fmt: skip
