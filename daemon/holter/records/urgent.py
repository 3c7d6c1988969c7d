"""Which observations must be judged at once.

A host's agent sends them without delay, and the coordinator judges without waiting for its next turn.
"""

from holter.records.halting import Halting
from holter.records.observation import Exam, Exited, Observation, Overdue
from holter.records.rank import Feed, Inspection, Skipped, StepDone, Swapped

URGENT_SKIPS = 16
"""From this many skipped steps in a row on, a loss scaler's report is judged at once."""


def is_urgent(observation: Observation) -> bool:
    """Whether this observation must be judged at once."""
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
