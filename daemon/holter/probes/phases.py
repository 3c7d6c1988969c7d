"""Which phase the main thread is in, and how long it was in each."""

from holter import clock
from holter.records import Phase


class PhaseClock:
    """Adds up the seconds of each phase between two `take`s."""

    def __init__(self) -> None:
        self.phase = Phase.ATTACH
        self._since = clock.monotonic_s()
        self._seconds: dict[Phase, float] = {}

    def enter(self, phase: Phase) -> Phase:
        """Begin a phase; returns the one that it interrupts, to be entered again afterwards."""
        now = clock.monotonic_s()
        interrupted = self.phase
        self._seconds[interrupted] = self._seconds.get(interrupted, 0.0) + now - self._since
        self.phase, self._since = phase, now
        return interrupted

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        self.enter(self.phase)
        taken = {phase.name.lower(): round(seconds, 7) for phase, seconds in self._seconds.items() if seconds > 0}
        self._seconds.clear()
        return taken
