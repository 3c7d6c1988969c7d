"""How long to wait before the next attempt: doubling, capped, with jitter so that 16,000 sidecars do not come back at once."""

import random
from dataclasses import dataclass


@dataclass
class Backoff:
    """One per peer; `reset` after a connection that lasted."""

    first_s: float = 0.1
    """The shortest wait, before jitter."""
    cap_s: float = 5.0
    """The longest wait."""
    attempts: int = 0
    """Failures in a row."""

    def next_s(self) -> float:
        """Seconds to wait now: between half and all of the doubled wait."""
        # Beyond 2**32 the cap has long won.
        wait_s = min(self.cap_s, self.first_s * 2.0 ** min(self.attempts, 32))
        self.attempts += 1
        return wait_s * random.uniform(0.5, 1.0)  # noqa: S311 - jitter is no secret

    def reset(self) -> None:
        """The peer was fine: begin with the shortest wait again."""
        self.attempts = 0
