"""What the coordinator makes of an observation the moment it arrives. Pure."""

from holter.faults import TableKey
from holter.records import (
    Body,
    Exam,
    Exited,
    Feed,
    Halting,
    Inspection,
    Observation,
    Overdue,
    Skipped,
    StepDone,
    Swapped,
    Table,
)

LONGEST_S = 1e9
"""No wait of a rank is longer."""
URGENT_SKIPS = 16
"""A loss scaler that let no step happen so often in a row is judged at once."""


def is_answer(key: TableKey, observation: Observation) -> bool:
    """Is this the table that was asked for, and does it add up."""
    table = observation.body
    return (
        isinstance(table, Table)
        and key == (table.tensor_class, observation.step, observation.rank)
        and len(table.names) == len(table.fingerprints)
        and all(len(beside) in (0, len(table.names)) for beside in (table.norms, table.sums, table.marks))
    )


def is_sound(body: Body) -> bool:
    """Are the times in it such that they can be reckoned with."""
    match body:
        case Overdue() as overdue:
            return _are_times(overdue.waited_s, overdue.deadline_s)
        case Exam() as exam:
            return _are_times(exam.waited_s, exam.process.stopped_s if exam.process else 0.0)
        case _:
            return True


def _are_times(*seconds: float) -> bool:
    # NaN is not between anything.
    return all(0.0 <= each <= LONGEST_S for each in seconds)


def is_urgent(observation: Observation) -> bool:
    """Can judging not wait for its turn."""
    match observation.body:
        case StepDone() as done:
            return bool(done.nonfinite)
        case Skipped() as skipped:
            return skipped.in_a_row >= URGENT_SKIPS
        case Feed() as feed:
            return not feed.is_end
        case Exited() | Swapped() | Inspection() | Overdue() | Exam() | Halting():
            return True
        case _:
            return False
