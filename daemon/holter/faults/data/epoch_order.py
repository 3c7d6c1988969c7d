"""Epoch order: every pass over the data comes in the same order, although the sampler says that it shuffles.

What it detects
    Whole passes of a training loader, one after the other on the same rank, whose batches had the same fingerprints in the same order,
    while the sampler says that it shuffles and was not told a new epoch between them.

Why it matters
    A DistributedSampler shuffles by seed and epoch; if nobody calls `set_epoch`, each epoch repeats the first. The model meets the same
    samples together every time: batch noise no longer averages out, and the last batches weigh more than the first.

False positives
    A loader that does not shuffle is meant to be so. Passes over a handful of samples repeat by chance and are not judged. Data whose
    batches are all alike (synthetic) has no order. A script that seeds each epoch alike on purpose is reported, because its sampler says
    that it shuffles.

What to do
    Call `sampler.set_epoch(epoch)` before each epoch, or let accelerate do it (`holter explain repeated_epoch_order`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.data.loader_passes import LoaderPass, passes
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import listed, ranks_text
from holter.faults.window import Window
from holter.records import Evidence, Finding

MAX_SHOWN = 4


@dataclass(frozen=True)
class EpochOrder:
    """Judges whether passes repeat each other."""

    name: ClassVar[str] = "epoch_order"

    min_batches: int = threshold(4, at_least=2)  # One batch has no order.
    """A pass of fewer batches has hardly an order."""
    min_samples: int = 10
    """A pass of fewer samples repeats by chance; 10 have 3.6 million orders."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """At most one finding: the first loader that repeats itself, with all the ranks that show it."""
        if _is_one_batch(window):
            return
        by_loader: dict[int, dict[int, list[LoaderPass]]] = {}
        for one in passes(window):
            if self._is_telling(one):
                by_loader.setdefault(one.begin.loader, {}).setdefault(one.rank, []).append(one)
        for _, by_rank in sorted(by_loader.items()):
            found = {rank: run for rank, of_rank in by_rank.items() if (run := _repeated(of_rank))}
            if found:
                yield _finding(found)
                return

    def _is_telling(self, one: LoaderPass) -> bool:
        end = one.end
        return (
            end is not None
            and end.is_training
            and end.is_shuffling
            and end.order != 0
            and end.num_taken >= max(self.min_batches, end.num_batches)
            and _num_samples(one) >= self.min_samples
        )


def _repeated(of_rank: Sequence[LoaderPass]) -> list[LoaderPass]:
    """The newest passes that follow each other and are alike, the oldest first; nothing if there are not two."""
    ordered = sorted(of_rank, key=lambda one: one.begin.epoch)
    run = ordered[-1:]
    for one in reversed(ordered[:-1]):
        if _key(one) != _key(run[0]) or run[0].begin.epoch - one.begin.epoch != 1:
            break
        run.insert(0, one)
    return run if len(run) > 1 else []


def _is_one_batch(window: Window) -> bool:
    """Whether the batches are all alike, as far as their signatures were seen."""
    views = [view for view in window.steps if view.batches]
    return len(views) > 1 and len({signature for view in views for signature in view.batches}) == 1


def _num_samples(one: LoaderPass) -> int:
    feed = one.latest
    return feed.num_samples if feed.num_samples > 0 else feed.num_taken


def _key(one: LoaderPass) -> tuple[int, int, int]:
    feed = one.latest
    return feed.order, feed.sampler_epoch, feed.num_taken


def _finding(found: dict[int, list[LoaderPass]]) -> Finding:
    ranks = tuple(sorted(found))
    run = found[ranks[0]]
    feed = run[-1].latest
    step = min(of_rank[1].begin_step for of_rank in found.values())
    epochs = [one.begin.epoch for one in run]
    shown = listed(map(str, epochs)) if len(epochs) <= MAX_SHOWN else f"{epochs[0]} to {epochs[-1]}"
    takes_epoch = feed.sampler_epoch >= 0
    return Finding(
        detector=EpochOrder.name,
        severity="warning",
        first_step=step,
        detected_step=max(one.end_step or 0 for of_rank in found.values() for one in of_rank),
        ranks=ranks,
        summary=f"Passes {shown} over the data came in the same order on {ranks_text(ranks)}, although the sampler shuffles.",
        facts={"is_order_repeated": True, "takes_epoch": takes_epoch, "is_epoch_told": False},
        evidence=(
            Evidence(
                kind="batch",
                summary=f"rank {ranks[0]}: passes {shown} gave {feed.num_taken} batches each, with the same fingerprints in the same order",
                values={
                    "rank": ranks[0],
                    "epochs": epochs[-MAX_SHOWN:],
                    "num_batches": feed.num_taken,
                    "order": feed.order,
                },
            ),
            Evidence(
                kind="loader",
                summary=f"sampler {feed.sampler} says that it shuffles; "
                + (
                    f"its epoch was {feed.sampler_epoch} each time"
                    if takes_epoch
                    else "it takes no epoch, so its random state was the same each time"
                ),
                values={"sampler": feed.sampler, "sampler_epoch": feed.sampler_epoch},
            ),
        ),
    )
