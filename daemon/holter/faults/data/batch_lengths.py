"""Batch lengths: some ranks will run out of data before the others.

What it detects
    Training loaders of replicas that give different numbers of batches in the same pass, told when the pass begins: which ranks run out
    first, at which step, and who will then wait for them.

Why it matters
    A rank that has no batch left leaves the loop, the others enter the next reduction and wait for it, until a timeout kills the job hours
    later, at the end of an epoch, far from any checkpoint.

False positives
    Loaders that are only evaluated, a short last batch, and loaders without a length say nothing. A loop inside DDP's `join()` context,
    or one that restarts its loader whenever it is exhausted, copes with uneven lengths on purpose. That cannot be known beforehand, so it
    is reported, until a rank was seen to restart its loader while the others went on.

What to do
    Give each rank the same number of batches: a DistributedSampler (it pads, or drops with `drop_last`), or cut every rank at the shortest
    (`holter explain uneven_batches`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.data.loader_passes import LoaderPass, passes, trained
from holter.faults.shared.structure import distinct_censuses
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import listed, ranks_text
from holter.faults.window import Window
from holter.records import Evidence, Finding

MAX_RANKS_SHOWN = 8


@dataclass(frozen=True)
class BatchLengths:
    """Compares the lengths of the ranks' loaders before the first is exhausted."""

    name: ClassVar[str] = "batch_lengths"

    min_difference: int = threshold(1, at_least=1)
    """Number of batches by which the longest must differ from the shortest; one is enough to hang a job."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the first uneven pass."""
        if not _must_keep_pace(window):
            return
        known = passes(window)
        by_pass: dict[tuple[int, int, str, str], list[LoaderPass]] = {}
        for one in trained(known):
            feed = one.begin
            if feed.num_batches > 0:
                by_pass.setdefault((feed.loader, feed.epoch, feed.dataset, feed.sampler), []).append(one)
        for group in sorted(by_pass.values(), key=lambda group: min(one.begin_step for one in group)):
            if self._is_uneven(group) and not _is_restarted(window, group, known):
                yield _finding(window, group)
                return

    def _is_uneven(self, group: Sequence[LoaderPass]) -> bool:
        lengths = [one.begin.num_batches for one in group]
        is_together = len({one.begin_step for one in group}) == 1
        return is_together and max(lengths) - min(lengths) >= self.min_difference


def _must_keep_pace(window: Window) -> bool:
    """Whether ranks meet in reductions at every step, because they are replicas or shards of one model."""
    return window.world_size > 1 and any(
        entry.optimizer >= 0 and (entry.is_replicated or entry.is_sharded)
        for census in distinct_censuses(window, None)
        for entry in census.entries
    )


def _is_restarted(window: Window, group: Sequence[LoaderPass], known: Sequence[LoaderPass]) -> bool:
    """Whether a rank that ran out of data started its loader again, and all ranks continued stepping."""
    shortest = min(one.begin.num_batches for one in group)
    out = {one.rank for one in group if one.begin.num_batches == shortest}
    last = max((view.step for view in window.steps if not view.missing), default=-1)
    loader, epoch = group[0].begin.loader, group[0].begin.epoch
    return any(
        one.rank in out and one.begin.loader == loader and one.begin.epoch > epoch and last > one.begin_step
        for one in known
    )


def _finding(window: Window, group: Sequence[LoaderPass]) -> Finding:
    lengths = {one.rank: one.begin.num_batches for one in group}
    shortest = min(lengths.values())
    out = tuple(sorted(rank for rank, length in lengths.items() if length == shortest))
    waiting = tuple(sorted(rank for rank, length in lengths.items() if length > shortest))
    begin = group[0].begin_step
    short_step = begin + shortest // _micro_steps(window)
    feed = group[0].begin
    return Finding(
        detector=BatchLengths.name,
        severity="warning",
        first_step=begin,
        detected_step=max((view.step for view in window.steps), default=begin),
        ranks=waiting,
        summary=(
            f"{ranks_text(out).capitalize()} will run out of data before step {short_step}, while {ranks_text(waiting)} "
            f"{'has' if len(waiting) == 1 else 'have'} batches left and will wait there for ever."
        ),
        facts={
            "has_uneven_lengths": True,
            "is_trained_on": True,
            "is_begun_anew": False,
            "ranks_running_out": list(out),
            "compared_ranks": sorted(lengths),
        },
        evidence=(
            _lengths_evidence(lengths, feed.epoch, begin),
            Evidence(
                kind="loader",
                summary=f"the loader: {feed.dataset}, batches of {feed.batch_size}, sampled by {feed.sampler or 'no sampler'}",
                values={"dataset": feed.dataset, "batch_size": feed.batch_size, "sampler": feed.sampler},
            ),
            Evidence(
                kind="forecast",
                summary=f"{ranks_text(out)} can take steps {begin} to {short_step - 1} with {shortest} batches; step {short_step} will lack them",
                values={"short_step": short_step, "ranks": list(out)},
            ),
        ),
    )


def _micro_steps(window: Window) -> int:
    spread = next(
        (entry.numbers["micro_steps"] for entry in reversed(window.series) if "micro_steps" in entry.numbers), None
    )
    return max(1, round(spread.mean)) if spread and spread.num > spread.num_nonfinite else 1


def _lengths_evidence(lengths: dict[int, int], epoch: int, begin: int) -> Evidence:
    shown = [f"{length} on rank {rank}" for rank, length in sorted(lengths.items())]
    more = (
        [f"{min(lengths.values())} to {max(lengths.values())} on {len(lengths)} ranks in all"]
        if len(shown) > MAX_RANKS_SHOWN
        else []
    )
    return Evidence(
        kind="loader",
        summary=f"batches in pass {epoch}, which began at step {begin}: {listed([*shown[:MAX_RANKS_SHOWN], *more])}",
        values={
            "num_batches": {str(rank): length for rank, length in sorted(lengths.items())[:MAX_RANKS_SHOWN]},
            "epoch": epoch,
        },
    )
