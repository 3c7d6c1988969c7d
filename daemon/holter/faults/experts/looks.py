"""What the ranks reported about one mixture of experts, look by look."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holter.faults.window import Window
from holter.records import Routing


@dataclass(frozen=True)
class RoutingLook:
    """One mixture of experts at one step, with all ranks that reported it."""

    step: int
    by_rank: dict[int, Routing]

    @property
    def top_k(self) -> int:
        """Number of experts to which each token is sent."""
        return next(iter(self.by_rank.values())).top_k

    @property
    def counts(self) -> list[int]:
        """Number of tokens that each expert was sent."""
        told = [routing.counts for routing in self.by_rank.values()]
        return [sum(parts) for parts in zip(*told, strict=False)]

    @property
    def busiest_share(self) -> float:
        """Share of all tokens that went to the `top_k` busiest experts, to which a single token could go."""
        counts = sorted(self.counts, reverse=True)
        return sum(counts[: self.top_k]) / max(sum(counts), 1)


def looks_of(window: Window) -> dict[str, list[RoutingLook]]:
    """Return each module's looks, ascending; looks with another number of experts than the newest are left out."""
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
    """Whether there are enough looks over enough steps."""
    return len(looks) >= min_looks and looks[-1].step - looks[0].step >= min_steps


def enough_at(steps: Sequence[int], min_looks: int, min_steps: int = 0) -> int:
    """Return the step at which there were enough looks in a row, which a coordinator that reads late learns only now."""
    known = (step for place, step in enumerate(steps) if place + 1 >= min_looks and step - steps[0] >= min_steps)
    return next(known, steps[-1])
