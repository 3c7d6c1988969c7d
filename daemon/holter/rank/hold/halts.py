"""What the probes know of halts: before a step is applied, the rank may have to stand still until it is decided what becomes of it."""

from typing import Literal, Protocol

HoldReason = Literal["nonfinite", "peer", "agreed"]
"""What the optimizer is about to apply is not finite here; on another rank's shard; or the ranks agreed to stop before this step."""


class Halts(Protocol):
    """The rank's desk for halts; `halting.desk` has it."""

    def is_due(self, step: int) -> bool:
        """Whether the ranks agreed to stop before this step is applied; two attribute reads in a healthy run.

        Rounds that a loss scaler has skipped since the step before count as steps.
        """

    def hold(self, step: int, why: HoldReason, num_skipped: int = 0) -> None:
        """Stand still, in the main thread, until it is decided: returns to go on training, raises SystemExit(93) after the save."""

    def is_wanted(self) -> bool:
        """Whether a non-finite gradient is to be held at all: the action is halt, and somebody is there to decide."""

    def linger(self, why: str) -> None:
        """An exception has left the script: wait a bounded moment whether something is to be saved first; returns to die of it."""
