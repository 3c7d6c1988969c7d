"""Data coverage: a whole pass over the data leaves out part of it.

What it detects
    A training loader whose samples, summed over all ranks, are clearly fewer than the data set holds, while samplers and wrappers
    together cut the data set into more parts than there are ranks, so that no rank reads some of them. Judged from the loader's own
    lengths when the pass begins, and from the samples counted when it ends. Data sets that are each rank's own part already, by their
    indices or elements, count as cut once more.

Why it matters
    The run trains on the same half (or quarter) of the data in each epoch, and an epoch is over too soon. Nothing fails; the loss looks
    ordinary; the model is worse than its data.

False positives
    A sampler that takes a part on purpose (a subset, a number of samples, weights), a pass that was left in the middle, and a short last
    batch are no faults: without more parts than ranks nothing is said, and each rank may drop an incomplete batch. Streams without a length
    are not judged. Data cut into more parts than ranks on purpose, to hold some back, is reported.

What to do
    Let one thing cut the data: the DistributedSampler or `prepare`, not both (`holter explain double_sharded_data`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.data.loader_passes import LoaderPass, passes, trained
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Feed, Finding


@dataclass(frozen=True)
class DataCoverage:
    """Judges how much of the data set the ranks' passes cover together."""

    name: ClassVar[str] = "data_coverage"

    covered: float = threshold(0.75, above=0, below=1)
    """Below this share of the data set, the ranks' samples are clearly too few; data that is sharded twice has at most a half."""
    enough_ranks: int = 8
    """Number of ranks, or all, whose loaders must be known; the others are assumed to be like them."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding.

        A pass counted at its end is better evidence than the length announced at its beginning.
        """
        by_pass: dict[tuple[int, int], list[LoaderPass]] = {}
        for one in trained(passes(window)):
            by_pass.setdefault((one.begin.loader, one.begin.epoch), []).append(one)
        short = {key: group for key, group in by_pass.items() if self._is_short(window, group)}
        counted = [key for key, group in short.items() if _is_counted(group)]
        if short:
            yield _finding(window, short[min(counted or short)])

    def _is_short(self, window: Window, group: Sequence[LoaderPass]) -> bool:
        feeds = [one.latest for one in group]
        size, shards = _size(window, feeds), _shards(window, feeds)
        has_one_size = len({feed.dataset_size for feed in feeds}) == 1 or _is_cut_by_hand(window, feeds)
        if len(group) < min(self.enough_ranks, window.world_size) or not has_one_size:
            return False
        if size <= 0 or shards <= window.world_size:
            return False
        counts = [_samples(feed) for feed in feeds]
        if any(count is None for count in counts):
            return False
        allowance = window.world_size * max(feed.batch_size - 1 for feed in feeds)
        return _total(window, group) < self.covered * size and _total(window, group) + allowance < size


def _is_cut_by_hand(window: Window, feeds: Sequence[Feed]) -> bool:
    """Whether each rank has cut out a part of its own, and a sampler cuts that for all ranks again."""
    contents = {feed.content for feed in feeds}
    if 0 in contents or len(contents) < len(feeds) or len(feeds) < 2:  # noqa: PLR2004 - nobody to differ from
        return False
    if any(feed.num_shards != window.world_size or feed.dataset_size <= 0 for feed in feeds):
        return False
    # Subsets drawn at random on each rank overlap: together they are more than the set they are taken from.
    whole, size = feeds[0].whole_size, sum(feed.dataset_size for feed in feeds) / len(feeds) * window.world_size
    return whole <= 0 or size <= 1.05 * whole


def _size(window: Window, feeds: Sequence[Feed]) -> int:
    """Return the size of the data set; the sum of the ranks' parts if each has cut out its own."""
    if not _is_cut_by_hand(window, feeds):
        return feeds[0].dataset_size
    return round(sum(feed.dataset_size for feed in feeds) / len(feeds) * window.world_size)


def _shards(window: Window, feeds: Sequence[Feed]) -> int:
    """Return the number of parts into which it is cut."""
    shards = min(feed.num_shards for feed in feeds)
    return shards * window.world_size if _is_cut_by_hand(window, feeds) else shards


def _samples(feed: Feed) -> int | None:
    """Return the samples of a whole pass, counted at its end or announced at its beginning; None if neither is known."""
    is_whole = feed.is_end and 0 < feed.num_batches <= feed.num_taken
    if is_whole and feed.num_samples > 0:
        return feed.num_samples
    return feed.num_batches * feed.batch_size if feed.num_batches > 0 and feed.batch_size > 0 else None


def _is_counted(group: Sequence[LoaderPass]) -> bool:
    return all(0 < one.latest.num_batches <= one.latest.num_taken and one.latest.num_samples > 0 for one in group)


def _total(window: Window, group: Sequence[LoaderPass]) -> float:
    counts = [_samples(one.latest) or 0 for one in group]
    return sum(counts) / len(counts) * window.world_size


def _finding(window: Window, group: Sequence[LoaderPass]) -> Finding:
    feed = group[0].latest
    is_counted = _is_counted(group)
    total = round(_total(window, group))
    feeds = [one.latest for one in group]
    size, shards = _size(window, feeds), _shards(window, feeds)
    step = min(one.begin_step for one in group)
    share = f"{total} of {size} samples"
    own = " on each rank, other ones on each" if _is_cut_by_hand(window, feeds) else ""
    verb = "Took" if is_counted else "Will take"
    return Finding(
        detector=DataCoverage.name,
        severity="warning",
        first_step=step,
        detected_step=max(one.end_step if one.end_step is not None else one.begin_step for one in group),
        ranks=tuple(sorted(window.attached)),
        summary=f"{verb} {share} in a whole pass over the data: the data set is cut into {shards} parts for {window.world_size} ranks.",
        facts={"has_more_parts_than_ranks": True, "is_counted": is_counted, "is_covered": False},
        evidence=(
            Evidence(
                kind="loader",
                summary=f"{feed.dataset} of {feed.dataset_size} samples{own}, sampled by {feed.sampler}: {shards} parts, {window.world_size} ranks",
                values={"dataset_size": size, "num_shards": shards, "sampler": feed.sampler},
            ),
            Evidence(
                kind="count",
                summary=f"{'counted at the end' if is_counted else 'by the length'} of pass {feed.epoch}, all ranks together: {share}",
                values={"num_samples": total, "epoch": feed.epoch, "is_counted": is_counted},
            ),
        ),
    )
