"""Dashboard of the training's numbers: loss, norms, non-finite tensors, use of exponents, size of the updates."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from holter.exporters.dashboards.board import TO_INCIDENTS, DashboardFrame, board
from holter.exporters.dashboards.panels import FROM_ZERO, LOG, Card, Panel, Query, heat, lines
from holter.exporters.dashboards.promql import END, RANK, each, highest, highest_by_rank, increase, job_spread, series


def build() -> Dashboard:
    """Build the dashboard "Numerics"."""
    text = (
        "Loss, norms, what is not finite, how the exponents are used, how much a step changes. Modules: the twenty largest, over all ranks; "
        "the rank variable is for what a rank has of its own."
    )
    return board(DashboardFrame("holter-numerics", "holter / Numerics", text), [*_ranks(), *_modules()])


def _ranks() -> list[Panel]:
    nonfinite = each("rank, where", increase("nonfinite_total"))
    so_far = f"sum by (rank) ({each('rank, where', series('nonfinite_total', of=RANK) + END)})"
    return [
        lines(
            Card(1, "Loss", "Read at the last backward pass, before any filter of the framework: over all ranks, and of those where it is highest.", "short", 12),
            Query(job_spread("loss"), "{{aggregate}}"),
            Query(highest_by_rank("loss"), "rank {{rank}}"),
        ),
        lines(
            Card(2, "Gradient norm", "L2 norm of the gradient: over all ranks, and of those where it is highest.", "short", 12),
            Query(job_spread("gradient_norm"), "{{aggregate}}"),
            Query(highest_by_rank("gradient_norm"), "rank {{rank}}"),
            scale=LOG,
        ),
        lines(
            Card(3, "Non-finite tensors by place", "Tensors that held NaN or Inf, by where they were met first: input, loss, the rank's own gradient, the reduced one.", "none", 12, link=TO_INCIDENTS),
            Query(f"sum by (where) ({nonfinite})", "{{where}}"),
            scale=FROM_ZERO,
        ),
        heat(
            Card(4, "Non-finite tensors by rank", "The rank that lights up alone, or first, made them: after an all-reduce every rank has them.", "none", 12, link=TO_INCIDENTS),
            Query(highest(f"sum by (rank) ({nonfinite})", so_far), "{{rank}}"),
            scheme="Purples",
        ),
    ]  # fmt: skip


def _modules() -> list[Panel]:
    return [
        lines(
            Card(5, "Gradient norm by module", "L2 norm as the optimizer is given it, largest over the ranks.", "short", 12, 9),
            _module("gradient_norm"),
            scale=LOG,
        ),
        heat(
            Card(6, "Exponent occupancy", "Share of gradient values by exponent (base 2, eight to a row). What falls below the format's smallest exponent is lost.", "percentunit", 12, 9),
            Query(each("exponent", series("gradient_exponent_ratio")), "{{exponent}}"),
            scheme="Purples",
        ),
        lines(
            Card(7, "Update ratio by module", "Norm of what a step changed over the norm of the weights. Around 0.001 is usual; 0 does not learn.", "sci", 12, 9),
            _module("update_ratio"),
            scale=LOG,
        ),
        lines(
            Card(8, "Weight norm by module", "L2 norm of the weights.", "short", 12, 9),
            _module("weight_norm"),
        ),
        lines(
            Card(9, "Zeros in gradients by module", "Share of gradient values that are exactly zero.", "percentunit", 24),
            _module("gradient_zeros_ratio"),
        ),
    ]  # fmt: skip


def _module(name: str) -> Query:
    return Query(each("module", series(f"module_{name}")), "{{module}}")
