"""How a rank came to its end."""

from holter.diagnosis.rows.row import Row

ROWS: tuple[Row, ...] = (
    # dead_rank: how did the first one end?
    Row("rank_dead", "dead_rank", 0.95, "observation", seen=("is_signal",), unless=("is_terminated",)),
    Row("rank_dead", "dead_rank", 0.90, "observation", seen=("is_terminated",)),
    Row("rank_dead", "dead_rank", 0.93, "observation", seen=("is_exception",), unless=("is_connection_lost",)),
    Row("rank_dead", "dead_rank", 0.93, "observation", seen=("is_status_known",), absent=("is_signal", "is_exception")),
    Row("rank_dead", "dead_rank", 0.85, "observation", seen=("is_order_clear",), absent=("is_status_known",)),
    Row("rank_dead", "dead_rank", 0.60, "inference", absent=("is_status_known",), unless=("is_order_clear",), missing="exit codes: all ranks ended at once without last words, so the job may have been stopped from outside"),
    Row("rank_dead", "dead_rank", 0.55, "inference", missing="the end of the peer that closed the connection: no rank was seen to die before this one complained"),
)  # fmt: skip
