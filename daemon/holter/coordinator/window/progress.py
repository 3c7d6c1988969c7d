"""Which ranks stand still, what examinations showed, and which lines are open: the facts by which a hang is judged. Pure."""

from holter.faults.window import Delay, Examined, LinkView
from holter.records import Exam, Link, Observation, Overdue, Unexamined

MAX_ASKED, MAX_UNASKED = 3, 2
"""Examinations kept of each rank: those that were asked for, and the last with native frames beside them; what it left when it died."""

SAME_S = 1.0
"""Two messages about one standstill agree to within this on when it began."""


class ProgressBook:
    """The newest word on every rank."""

    def __init__(self) -> None:
        self.delays: dict[int, Delay] = {}
        self.exams: dict[int, tuple[Examined, ...]] = {}
        self.unexamined: dict[int, int] = {}
        self.links: dict[int, LinkView] = {}

    def add(self, observation: Observation, received_ns: int) -> None:
        """Take one observation in."""
        rank, step = observation.rank, observation.step
        match observation.body:
            case Overdue(tier="moved"):
                self.delays.pop(rank, None)
            case Overdue() as overdue:
                told = Delay(step, received_ns, overdue)
                if not _is_repeated(self.delays.get(rank), told):
                    self.delays[rank] = told
            case Exam() as exam:
                self.exams[rank] = _bounded(
                    (*self.exams.get(rank, ()), Examined(step, received_ns, exam, observation.at_ns))
                )
            case Unexamined() as missed:
                self.unexamined[rank] = max(missed.asked_ns, self.unexamined.get(rank, 0))
            case Link() as link:
                self.links[rank] = LinkView(link.state, received_ns)
                if link.state == "closed":
                    # Nobody would say that it moves on; a sidecar that comes back says again how it stands.
                    self.delays.pop(rank, None)

    def forget(self, rank: int) -> None:
        """The rank runs in a new process."""
        for known in (self.delays, self.exams, self.unexamined):
            known.pop(rank, None)


def _is_repeated(known: Delay | None, told: Delay) -> bool:
    """Whether it repeats the same tier of the same standstill, as a sidecar does at every connection."""
    if known is None or (known.step, known.overdue.tier, known.overdue.phase) != (
        told.step,
        told.overdue.tier,
        told.overdue.phase,
    ):
        return False
    return abs(known.waited_s(told.at_ns) - told.overdue.waited_s) < SAME_S


def _bounded(seen: tuple[Examined, ...]) -> tuple[Examined, ...]:
    """The newest of each kind, in the order of their coming."""
    kept: list[Examined] = []
    room = {True: MAX_ASKED, False: MAX_UNASKED}
    is_native_kept = False
    for one in reversed(seen):
        is_asked = one.exam.reason == "asked"
        is_native = is_asked and one.exam.depth == "native"
        if room[is_asked] or (is_native and not is_native_kept):
            room[is_asked] = max(0, room[is_asked] - 1)
            is_native_kept = is_native_kept or is_native
            kept.append(one)
    return tuple(reversed(kept))
