"""Whether the ranks call the same collectives."""

from holter.faults.row import Row

_NO_OTHER_SIDE = "the other side's record of this call: its process ended before a copy could be made, so that what it called is inferred from what it always called"
_NO_NEXT_CALL = "the call after the one it stands in, which tells whether it left a call out or swapped two: it never came to make it"
_NO_CALLS = "the calls themselves: the digests of a run of calls differ between ranks, but the recorders had gone past them when they were read"

ROWS: tuple[Row, ...] = (
    # collective_mismatch: what differs at one number, and is it seen on both sides? Who deviates is told by the ranks it names.
    Row("collective_order_mismatch", "collective_mismatch", 0.95, "observation", seen=("is_order", "is_seen_on_both_sides", "is_culprit_clear")),
    Row("collective_order_mismatch", "collective_mismatch", 0.93, "observation", seen=("is_order", "is_seen_on_both_sides")),
    Row("collective_shape_mismatch", "collective_mismatch", 0.95, "observation", seen=("is_shape", "is_seen_on_both_sides", "is_culprit_clear")),
    Row("collective_shape_mismatch", "collective_mismatch", 0.93, "observation", seen=("is_shape", "is_seen_on_both_sides")),
    Row("collective_dtype_mismatch", "collective_mismatch", 0.95, "observation", seen=("is_dtype", "is_seen_on_both_sides", "is_culprit_clear")),
    Row("collective_dtype_mismatch", "collective_mismatch", 0.93, "observation", seen=("is_dtype", "is_seen_on_both_sides")),
    # A call left out shifts all that follow: the job has not stopped over it, or died of it.
    Row("rank_missing_from_collective", "collective_mismatch", 0.93, "observation", seen=("is_missing", "is_seen_on_both_sides")),
    Row("rank_missing_from_collective", "collective_mismatch", 0.45, "inference", seen=("is_perhaps_missing",), missing=_NO_NEXT_CALL),
    Row("collective_order_mismatch", "collective_mismatch", 0.40, "inference", seen=("is_perhaps_order",), missing=_NO_NEXT_CALL),
    # One side only: it left its own pattern at the call in which its peer died.
    Row("collective_order_mismatch", "collective_mismatch", 0.60, "inference", seen=("is_order",), missing=_NO_OTHER_SIDE),
    Row("collective_shape_mismatch", "collective_mismatch", 0.60, "inference", seen=("is_shape",), missing=_NO_OTHER_SIDE),
    Row("collective_dtype_mismatch", "collective_mismatch", 0.60, "inference", seen=("is_dtype",), missing=_NO_OTHER_SIDE),
    Row("rank_dead", "collective_mismatch", 0.45, "inference", seen=("is_dead",), absent=("is_seen_on_both_sides",), missing=_NO_OTHER_SIDE),
    # Neither: that they differ is sure, in what is not.
    Row("collective_order_mismatch", "collective_mismatch", 0.50, "inference", absent=("is_kind_known",), missing=_NO_CALLS),
    Row("collective_shape_mismatch", "collective_mismatch", 0.45, "inference", absent=("is_kind_known",), missing=_NO_CALLS),
    Row("collective_dtype_mismatch", "collective_mismatch", 0.40, "inference", absent=("is_kind_known",), missing=_NO_CALLS),
    Row("collective_order_mismatch", "collective_mismatch", 0.10, "inference", missing=_NO_CALLS),
)  # fmt: skip
