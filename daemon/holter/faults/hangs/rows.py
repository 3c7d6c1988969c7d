"""Why a rank does not go on, and how a rank came to its end."""

from holter.faults.row import Row

_HELD = ("is_suspended", "is_unreachable", "has_ended", "is_interpreter_locked")
"""Nothing that the script does is to blame then."""
_NO_STACK = "the stack of the rank that did not come: py-spy could not read it"
_NO_THIRD = "a third rank, or calls from before that tell which side is right: both sides wait for each other, so both are named"
_NO_ABSENT = (
    "somebody who is missing: all ranks look alike, so that the network or the collective itself may be at fault"
)
_NO_SIGN = "what the rank does instead: neither its stack nor the ranks' recorders tell"
_NO_SECOND_SIGN = "a sign that it took another way: its stack shows that it is on the usual one and does not go on"
_BUSY_DEVICE = (
    "the wait channel's reason (`dmesg -T` on its host): a storage or a device that does not answer looks like this"
)
_SAVED_BELOW = "native code of its own that holds the lock: its stack shows that of the save"
_NO_NEXT_CALL = "the call after the one it stands in: had it only swapped two, the one it left out would be its next"
_NOT_LOOKED_AT = (
    "a look at the named rank before its peer's timeout was over: it is the only one left that can have been missing"
)
_NO_ABSENTEE = "the ranks' recorders from before the timeout: a rank gave up waiting, and nothing tells which of its peers was missing"
_LOCKED_TOO = "the interpreter's answer: it is locked, and that alone would explain the wait"

ROWS: tuple[Row, ...] = (
    # stalled_rank: is the process held?
    Row("rank_suspended", "stalled_rank", 0.95, "observation", seen=("is_suspended",)),
    Row("rank_suspended", "stalled_rank", 0.88, "observation", seen=("is_uninterruptible",), unless=("is_in_data", "is_in_checkpoint", "has_ended", "is_unreachable")),
    Row("rank_suspended", "stalled_rank", 0.50, "inference", seen=("is_uninterruptible",), missing=_BUSY_DEVICE),
    # Can its host be reached at all?
    Row("host_unreachable", "stalled_rank", 0.90, "observation", seen=("is_unreachable",)),
    # Does its interpreter answer?
    Row("interpreter_locked", "stalled_rank", 0.95, "observation", seen=("is_interpreter_locked", "has_stack"), unless=("is_suspended", "is_unreachable", "has_ended", "is_uninterruptible", "is_elsewhere", "is_saving")),
    Row("interpreter_locked", "stalled_rank", 0.85, "observation", seen=("is_interpreter_locked",), unless=("is_suspended", "is_unreachable", "has_ended", "is_uninterruptible", "is_saving")),
    Row("interpreter_locked", "stalled_rank", 0.50, "inference", seen=("is_interpreter_locked", "is_saving"), missing=_SAVED_BELOW),
    Row("interpreter_locked", "stalled_rank", 0.45, "inference", seen=("is_interpreter_locked",), missing="a native stack that shows the lock's owner at work, not in a system call"),
    # Where in the step is it?
    Row("stalled_data_loader", "stalled_rank", 0.93, "observation", seen=("is_in_data",), absent=("is_everyone_stuck",), unless=(*_HELD, "is_elsewhere")),
    Row("stalled_data_loader", "stalled_rank", 0.88, "observation", seen=("is_in_data", "is_everyone_stuck"), unless=(*_HELD, "is_elsewhere")),
    Row("stalled_data_loader", "stalled_rank", 0.40, "inference", seen=("is_in_data", "is_interpreter_locked"), missing=_LOCKED_TOO),
    Row("stalled_checkpoint", "stalled_rank", 0.93, "observation", seen=("is_in_checkpoint",), absent=("is_everyone_stuck",), unless=(*_HELD, "is_elsewhere", "is_in_data")),
    Row("stalled_checkpoint", "stalled_rank", 0.88, "observation", seen=("is_in_checkpoint", "is_everyone_stuck"), unless=(*_HELD, "is_elsewhere", "is_in_data")),
    # A write that does not end may hold the lock: it is where it waits, not why.
    Row("stalled_checkpoint", "stalled_rank", 0.93, "observation", seen=("is_saving", "is_interpreter_locked"), unless=(*_HELD[:3], "is_elsewhere")),
    Row("stalled_checkpoint", "stalled_rank", 0.40, "inference", seen=("is_in_checkpoint", "is_interpreter_locked"), missing=_LOCKED_TOO),
    Row("rank_stuck_in_python", "stalled_rank", 0.93, "observation", seen=("is_in_script",), absent=("is_interpreter_locked", "is_everyone_stuck"), unless=(*_HELD[:3], "is_uninterruptible", "is_elsewhere", "is_in_data", "is_in_checkpoint")),
    Row("rank_stuck_in_python", "stalled_rank", 0.85, "observation", seen=("is_in_script",), unless=(*_HELD, "is_uninterruptible", "is_elsewhere", "is_in_data", "is_in_checkpoint")),
    # Did it take another way?
    Row("rank_missing_from_collective", "stalled_rank", 0.93, "observation", seen=("is_elsewhere", "is_culprit_clear"), unless=_HELD[:3]),
    Row("rank_missing_from_collective", "stalled_rank", 0.90, "observation", seen=("has_ended",)),
    Row("rank_missing_from_collective", "stalled_rank", 0.65, "inference", seen=("is_elsewhere",), absent=("is_culprit_clear",), unless=_HELD[:3], missing=_NO_THIRD),
    Row("rank_missing_from_collective", "stalled_rank", 0.80, "observation", seen=("has_flight", "has_stack", "is_culprit_clear"), absent=("is_in_script", "is_in_data", "is_in_checkpoint", "is_everyone_stuck", "has_entered"), unless=_HELD),
    Row("rank_missing_from_collective", "stalled_rank", 0.65, "inference", seen=("has_flight", "is_culprit_clear"), absent=("has_stack", "is_everyone_stuck"), unless=(*_HELD, "is_in_data", "is_in_checkpoint"), missing=_NO_STACK),
    Row("rank_missing_from_collective", "stalled_rank", 0.45, "inference", seen=("is_in_script", "has_flight"), unless=_HELD, missing=_NO_SECOND_SIGN),
    Row("rank_missing_from_collective", "stalled_rank", 0.30, "inference", seen=("is_everyone_stuck",), absent=("is_culprit_clear",), unless=_HELD, missing=_NO_ABSENT),
    Row("rank_missing_from_collective", "stalled_rank", 0.15, "inference", missing=_NO_SIGN),
    Row("collective_order_mismatch", "stalled_rank", 0.40, "inference", seen=("is_perhaps_order",), unless=_HELD[:3], missing=_NO_NEXT_CALL),
    # dead_rank: how did the first one end?
    Row("rank_dead", "dead_rank", 0.95, "observation", seen=("is_signal",), unless=("is_terminated",)),
    Row("rank_dead", "dead_rank", 0.90, "observation", seen=("is_terminated",)),
    Row("rank_dead", "dead_rank", 0.93, "observation", seen=("is_exception",), unless=("is_connection_lost",)),
    Row("rank_dead", "dead_rank", 0.93, "observation", seen=("is_status_known",), absent=("is_signal", "is_exception")),
    Row("rank_dead", "dead_rank", 0.85, "observation", seen=("is_order_clear",), absent=("is_status_known",)),
    Row("rank_dead", "dead_rank", 0.60, "inference", absent=("is_status_known",), unless=("is_order_clear",), missing="exit codes: all ranks ended at once without last words, so the job may have been stopped from outside"),
    Row("rank_missing_from_collective", "dead_rank", 0.85, "observation", seen=("is_timed_out", "is_absent_seen")),
    Row("rank_missing_from_collective", "dead_rank", 0.65, "inference", seen=("is_timed_out", "is_absent_known"), absent=("is_absent_seen",), missing=_NOT_LOOKED_AT),
    Row("rank_missing_from_collective", "dead_rank", 0.40, "inference", seen=("is_timed_out",), absent=("is_absent_known",), missing=_NO_ABSENTEE),
    Row("rank_dead", "dead_rank", 0.55, "inference", unless=("is_timed_out",), missing="the end of the peer that closed the connection: no rank was seen to die before this one complained"),
)  # fmt: skip
