"""Expert load: a router sends nearly everything to few of its experts, or nothing at all to many.

What it detects
    A mixture of experts whose busiest experts, as many as one token is sent to, get nine tenths of all tokens or more, at eight
    looks in a row, and not less at the last than at the first; or of whose experts a quarter or more got no token in all of these
    looks. Counts are those of the router's own results, summed over the ranks that told of them.

Why it matters
    Experts that get nothing learn nothing, and take memory and time; the model computes what a dense one of a fraction of its size
    would. Left alone, a collapsed router stays collapsed: only experts that are chosen become better.

False positives
    Routers are uneven when they begin, and even out: where the share falls over the looks nothing is said. An uneven load as such
    is none, nor one idle expert of many (information). A router that may choose nearly all of its experts is not judged. Too few
    tokens, fewer than sixteen an expert over all looks, tell nothing.

What to do
    RoutingLook at the balancing term: is it added, does it have a gradient, is its weight large enough (`holter explain expert_collapse`)?
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.experts.looks import RoutingLook, enough_at, is_long_enough, looks_of
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding

SHOWN = 8


@dataclass(frozen=True)
class ExpertLoad:
    """Judges how tokens are spread over experts."""

    name: ClassVar[str] = "expert_load"

    busiest: float = threshold(0.9, above=0.5, below=1)
    """Share of tokens at the busiest experts from which on a router has collapsed."""
    idle: float = threshold(0.25, above=0, below=1)
    """Share of experts without any token from which on it is a warning."""
    min_looks: int = threshold(8, at_least=3)
    """Number of looks in a row."""
    min_steps: int = threshold(24, at_least=1)
    """Number of steps from the first of these looks to the last."""
    min_tokens: int = threshold(16, at_least=1)
    """Number of tokens per expert, on average, over these looks."""
    falling: float = threshold(0.03, above=0)
    """A share that has fallen by more than this is on its way to balance."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding per mixture of experts."""
        for module, looks in sorted(looks_of(window).items()):
            recent = looks[-self.min_looks :]
            if not is_long_enough(recent, self.min_looks, self.min_steps):
                continue
            totals = [sum(parts) for parts in zip(*(look.counts for look in recent), strict=True)]
            size, top_k = len(totals), recent[-1].top_k
            if 4 * top_k > 3 * size or sum(totals) < self.min_tokens * size:
                continue
            shares = [look.busiest_share for look in recent]
            # If a token may go to half of all experts, a share of one half is balance.
            limit = max(self.busiest, 1 - 0.1 * (1 - top_k / size))
            is_collapsed = min(shares) >= limit and shares[-1] >= shares[0] - self.falling
            idle = [place for place, total in enumerate(totals) if not total]
            if is_collapsed or idle:
                is_grave = is_collapsed or len(idle) >= max(self.idle * size, 1.5)
                run = _run(looks, limit) if is_collapsed else recent
                seen = [look.step for look in run]
                steps = seen[0], enough_at(seen, self.min_looks, self.min_steps)
                yield _finding(window, module, steps, recent, totals, shares, is_grave=is_grave)


def _run(looks: list[RoutingLook], limit: float) -> list[RoutingLook]:
    """Return the unbroken run of collapsed looks that lasts until now."""
    place = len(looks)
    while place and looks[place - 1].busiest_share >= limit:
        place -= 1
    return looks[min(place, len(looks) - 1) :]


def _finding(  # noqa: PLR0913, PLR0917 - what was found, all of it
    window: Window,
    module: str,
    steps: tuple[int, int],
    recent: list[RoutingLook],
    totals: list[int],
    shares: list[float],
    *,
    is_grave: bool,
) -> Finding:
    size, top_k = len(totals), recent[-1].top_k
    idle = sum(not total for total in totals)
    order = sorted(range(size), key=lambda place: -totals[place])
    busiest = ", ".join(f"expert {place}: {totals[place]}" for place in order[:SHOWN])
    share = sum(totals[place] for place in order[:top_k]) / sum(totals)
    return Finding(
        detector=ExpertLoad.name,
        severity="warning" if is_grave else "info",
        first_step=steps[0],
        detected_step=steps[1],
        ranks=tuple(sorted(window.attached)),
        modules=(module,),
        summary=f"The router of {module or 'the model'} sends {share:.0%} of its tokens to {top_k} of {size} experts; {idle} got none in the last {len(recent)} looks.",
        facts={"is_one_sided": True, "is_evening_out": False},
        evidence=(
            Evidence(
                kind="routing",
                summary=f"tokens of {len(recent)} looks, steps {recent[0].step} to {recent[-1].step}: {busiest}{' ...' if size > SHOWN else ''}",
                values={"module": module, "counts": totals[:256], "num_idle": idle, "top_k": top_k},
            ),
            Evidence(
                kind="routing",
                summary=f"share of the busiest {top_k}: {shares[0]:.0%} at step {recent[0].step}, {shares[-1]:.0%} at step {recent[-1].step}; in balance it would be {top_k / size:.0%}",
                values={"first": shares[0], "last": shares[-1], "balanced": top_k / size},
            ),
        ),
    )
