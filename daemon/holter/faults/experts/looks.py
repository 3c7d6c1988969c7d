"""What ranks told of one mixture of experts, look by look."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holter.faults.window import Window
from holter.records import Routing


@dataclass(frozen=True)
class RoutingLook:
    """One mixture at one step, all ranks that told of it together."""

    step: int
    by_rank: dict[int, Routing]

    @property
    def top_k(self) -> int:
        """Experts a token."""
        return next(iter(self.by_rank.values())).top_k

    @property
    def counts(self) -> list[int]:
        """Tokens that each expert was sent."""
        told = [routing.counts for routing in self.by_rank.values()]
        return [sum(parts) for parts in zip(*told, strict=False)]

    @property
    def busiest_share(self) -> float:
        """Of all that was sent, what the fewest experts that a token can be sent to got."""
        counts = sorted(self.counts, reverse=True)
        return sum(counts[: self.top_k]) / max(sum(counts), 1)


def looks_of(window: Window) -> dict[str, list[RoutingLook]]:
    """Module -> its looks, ascending; those with another number of experts than the newest are left out."""
    found: dict[str, dict[int, dict[int, Routing]]] = {}
    for note, routing in window.notes_of(Routing):
        found.setdefault(routing.module, {}).setdefault(note.step, {})[note.rank] = routing
    return {
        module: _alike(RoutingLook(step, told) for step, told in sorted(steps.items()))
        for module, steps in found.items()
    }


def _alike(looks: Iterable[RoutingLook]) -> list[RoutingLook]:
    known = list(looks)
    size = len(known[-1].counts) if known else 0
    return [look for look in known if len(look.counts) == size > 1]


def is_long_enough(looks: list[RoutingLook], min_looks: int, min_steps: int) -> bool:
    """Whether so many looks went over so many steps."""
    return len(looks) >= min_looks and looks[-1].step - looks[0].step >= min_steps


def enough_at(steps: Sequence[int], min_looks: int, min_steps: int = 0) -> int:
    """The step at which looks in a row had been long enough: what a coordinator that is late reads at once was known then."""
    known = (step for place, step in enumerate(steps) if place + 1 >= min_looks and step - steps[0] >= min_steps)
    return next(known, steps[-1])
