"""Which phase the main thread is in, and how long it was in each."""

from holter import clock
from holter.records import Phase

NAMES = [phase.name.lower() for phase in Phase]


class PhaseClock:
    """Adds up the seconds of each phase between two `take`s."""

    def __init__(self) -> None:
        self.phase = Phase.ATTACH
        self._since = clock.monotonic_s()
        self._seconds = [0.0] * len(NAMES)

    def enter(self, phase: Phase) -> Phase:
        """Begin a phase; returns the one that it interrupts, to be entered again afterwards."""
        now = clock.monotonic_s()
        interrupted = self.phase
        self._seconds[interrupted] += now - self._since
        self.phase, self._since = phase, now
        return interrupted

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        self.enter(self.phase)
        seconds, self._seconds = self._seconds, [0.0] * len(NAMES)
        return {NAMES[phase]: round(spent, 7) for phase, spent in enumerate(seconds) if spent > 0}
