"""Expert capacity: tokens that a router sent to an expert do not arrive there, because it was full.

What it detects
    A rank whose experts were given far fewer tokens than its router had sent them, at eight looks in a row, where only experts that
    were full lost any: those that were sent less than the fullest one received got all of it. Thirty per cent or more are lost, and
    not less at the last look than at the first. Where experts lie on other ranks, what all ranks sent is held against what all
    received.

Why it matters
    A token beyond capacity passes the layer by. Nothing raises; the layer learns from what is left, and the loss tells little.

False positives
    Some loss belongs to routing by capacity, above all in the first steps: a share that falls is none, nor one under a third.
    Padding that is not routed is missing from all experts alike, which is no overflow. Experts that are computed densely, or not as
    modules, are not judged.

What to do
    Raise the capacity factor, or balance the router (`holter explain expert_overflow`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.experts.looks import RoutingLook, enough_at, is_long_enough, looks_of
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import ranks_text
from holter.faults.window import Window
from holter.records import Evidence, Finding, Routing

SLACK = 0.02
"""Share of tokens: rows of zeros are counted as padding, and a few tokens may be such rows."""


@dataclass(frozen=True)
class _Loss:
    """One look: the share of tokens that each rank lost, or that all lost together."""

    step: int
    shares: dict[int, float]
    sent: int
    received: int
    capacity: int


@dataclass(frozen=True)
class ExpertCapacity:
    """Compares what experts were sent with what they received."""

    name: ClassVar[str] = "expert_capacity"

    lost: float = threshold(0.3, above=0, below=1)
    """Share of tokens that do not arrive."""
    min_looks: int = threshold(8, at_least=3)
    """Number of looks in a row."""
    min_steps: int = threshold(24, at_least=1)
    """Number of steps from the first of these looks to the last."""
    falling: float = threshold(0.05, above=0)
    """A share that has fallen by more than this is on its way to balance."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding per mixture of experts."""
        for module, looks in sorted(looks_of(window).items()):
            recent = looks[-self.min_looks :]
            losses = [loss for look in recent if (loss := _loss(look, window.world_size)) is not None]
            if len(losses) < len(recent) or not is_long_enough(recent, self.min_looks, self.min_steps):
                continue
            ranks = set.intersection(
                *({rank for rank, share in loss.shares.items() if share >= self.lost} for loss in losses)
            )
            steady = {rank for rank in ranks if losses[-1].shares[rank] >= losses[0].shares[rank] - self.falling}
            if steady:
                seen = _lasting(looks, steady, self.lost, window.world_size)
                steps = seen[0], enough_at(seen, self.min_looks, self.min_steps)
                yield _finding(module, losses, tuple(sorted(steady)), steps)


def _lasting(looks: list[RoutingLook], ranks: set[int], lost: float, world_size: int) -> list[int]:
    """Return the steps of the unbroken run of looks, until now, at which all these ranks lost at least this share."""
    found: list[int] = []
    for look in reversed(looks):
        loss = _loss(look, world_size)
        if loss is None or any(loss.shares.get(rank, 0.0) < lost for rank in ranks):
            break
        found.append(look.step)
    return found[::-1]


def _loss(look: RoutingLook, world_size: int) -> _Loss | None:
    """Return what was lost at one look; None if that is unknown or is no overflow."""
    told = look.by_rank
    sent = sum(sum(one.counts) for one in told.values())
    received = sum(sum(one.received) for one in told.values())
    if all(len(one.received) == len(one.counts) for one in told.values()):
        shares = {rank: _own_loss(one) for rank, one in told.items()}
        if any(share is None for share in shares.values()):
            return None
        capacity = max(max(one.received) for one in told.values())
        return _Loss(look.step, {rank: share or 0.0 for rank, share in shares.items()}, sent, received, capacity)
    if len(told) < world_size or not all(one.received for one in told.values()) or received > sent:
        return None
    full = max(max(one.received) for one in told.values())
    num_full = sum(count >= (1 - SLACK) * full for one in told.values() for count in one.received)
    # It is unknown which rank holds which expert, but several equally full ones mean that there is a capacity.
    is_capped = num_full > 1 or max(look.counts) > full
    return (
        _Loss(look.step, dict.fromkeys(told, 1 - received / max(sent, 1)), sent, received, full) if is_capped else None
    )


def _own_loss(told: Routing) -> float | None:
    """Return the share that a rank with all experts lost.

    None if its experts received less for another reason than being full.
    """
    pairs = list(zip(told.counts, told.received, strict=True))
    full = max(received for _, received in pairs)
    is_overflow = all(received <= sent and (sent > full or received >= (1 - SLACK) * sent) for sent, received in pairs)
    return 1 - sum(told.received) / max(sum(told.counts), 1) if is_overflow and full else None


def _finding(module: str, losses: list[_Loss], ranks: tuple[int, ...], steps: tuple[int, int]) -> Finding:
    last = losses[-1]
    share = max(last.shares[rank] for rank in ranks)
    return Finding(
        detector=ExpertCapacity.name,
        severity="warning",
        first_step=steps[0],
        detected_step=steps[1],
        ranks=ranks,
        modules=(module,),
        summary=f"On {ranks_text(ranks)} {share:.0%} of the tokens of {module or 'the model'} reach no expert: the experts they are sent to are full.",
        facts={"is_capacity_exceeded": True, "is_evening_out": False},
        evidence=(
            Evidence(
                kind="routing",
                summary=f"step {last.step}: {last.sent} tokens sent, {last.received} received; no expert received more than {last.capacity}, and only experts that were full lost any",
                values={"module": module, "sent": last.sent, "received": last.received, "capacity": last.capacity},
            ),
            Evidence(
                kind="routing",
                summary=f"lost at {len(losses)} looks in a row: {', '.join(f'{max(loss.shares.values()):.0%}' for loss in losses)}",
                values={"shares": [max(loss.shares.values()) for loss in losses]},
            ),
        ),
    )
