"""Epoch order: every pass over the data comes in the same order, although the sampler says that it shuffles.

What it detects
    Whole passes of a training loader, one after the other on the same rank, whose batches had the same fingerprints in the same order,
    while the sampler says that it shuffles and was not told a new epoch between them. And one batch that a rank trains on at sixteen
    steps in a row, after it had others.

Why it matters
    A DistributedSampler shuffles by seed and epoch; if nobody calls `set_epoch`, each epoch repeats the first. The model meets the same
    samples together every time: batch noise no longer averages out, and the last batches weigh more than the first.

False positives
    A loader that does not shuffle is meant to be so. Passes over a handful of samples repeat by chance and are not judged. Data whose
    batches are all alike (synthetic) has no order, and one batch from the first step on is a test of the model. A script that seeds
    each epoch alike on purpose is reported, because its sampler says that it shuffles.

What to do
    Call `sampler.set_epoch(epoch)` before each epoch, or let accelerate do it (`holter explain repeated_epoch_order`).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.data.loader_passes import LoaderPass, passes
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import listed, ranks_text
from holter.faults.window import Spread, StepNumbers, Window
from holter.records import Evidence, Finding

MAX_SHOWN = 4
NEWEST = 256
"""Number of newest steps that must contain the last two looks at the batch."""


@dataclass(frozen=True)
class EpochOrder:
    """Judges whether passes repeat each other."""

    name: ClassVar[str] = "epoch_order"

    min_batches: int = threshold(4, at_least=2)  # One batch has no order.
    """A pass of fewer batches has hardly any order."""
    min_samples: int = 10
    """A pass of fewer samples may repeat by chance; 10 have 3.6 million orders."""
    min_same: int = threshold(16, at_least=3)
    """Steps in a row with the same batch."""
    min_others: int = 8
    """Number of different batches that came before."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the first loader that repeats itself, with all ranks that show it."""
        if _is_one_batch(window):
            return
        stuck = {rank: steps for rank in _of_same_batch(window) if (steps := self._stuck(window, rank))}
        if stuck := stuck or self._stuck_inputs(window):
            yield _stuck_finding(stuck)
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

    def _stuck(self, window: Window, rank: int) -> list[int]:
        """Return the newest steps at which this rank had the same batch, if it had others before."""
        had = [
            (view.step, signature)
            for view in window.steps
            for signature, ranks in view.batches.items()
            if signature and rank in ranks
        ]
        run = [step for step, _ in itertools.takewhile(lambda one: one[1] == had[-1][1], reversed(had))][::-1]
        before = had[: len(had) - len(run)]
        has_others = len({signature for _, signature in before[-self.min_others :]}) >= self.min_others
        return run if len(run) >= self.min_same and has_others else []

    def _stuck_inputs(self, window: Window) -> dict[int, list[int]]:
        """Return the newest steps at which the models of all ranks, or of one, were given the same tensor, by mean and spread.

        The loader itself may still be giving other batches.
        """
        told = (known for entry in reversed(window.series[-NEWEST:]) if (known := _inputs(entry)))
        last, before_last = [*itertools.islice(told, 2), {}, {}][:2]
        both = [name for name in last if name in before_last]
        # Older steps are read only if the newest two are equal, which in a sound run they are not. Positions and masks of full
        # sequences are the same at each step, but beside other tensors that are not.
        if both and all(last[name] == before_last[name] for name in both):
            runs = (self._same(window, name, None) for name in both if last[name][1].low > 0)
            return dict.fromkeys(sorted(window.attached), run) if (run := next(filter(None, runs), [])) else {}
        found: dict[int, list[int]] = {}
        for rank in sorted({rank for name in both for one in last[name] for rank in (one.low_rank, one.high_rank)}):
            kept = [name for name in both if (own := _own(last[name], rank)) and own == _own(before_last[name], rank)]
            if all(name in kept or last[name] == before_last[name] for name in both):
                runs = (self._same(window, name, rank) for name in kept)
                found |= {rank: run} if (run := next(filter(None, runs), [])) else {}
        return found

    def _same(self, window: Window, name: str, rank: int | None) -> list[int]:
        """Return the newest steps at which this input was the same on this rank (None: on all), if it was different before."""
        spreads = dict(window.values(f"{name}.spread"))
        both = [(step, (mean, spreads[step])) for step, mean in window.values(f"{name}.mean") if step in spreads]
        told: list[tuple[int, object]] = [(step, one if rank is None else _own(one, rank)) for step, one in both]
        of = [(step, one) for step, one in told if one is not None]
        others = itertools.dropwhile(lambda at: of[at][1] == of[-1][1], reversed(range(len(of))))
        run = [step for step, _ in of[next(others, -1) + 1 :]]
        before = {known for _, known in of[: len(of) - len(run)][-self.min_others :]}
        return run if len(run) >= self.min_same and len(before) >= self.min_others else []

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


def _inputs(entry: StepNumbers) -> dict[str, tuple[Spread, Spread]]:
    """Return mean and spread of every tensor that models were given and that varies within itself on some rank."""
    found = {}
    for name, spread in entry.numbers.items():
        leaf = name.removesuffix(".spread")
        if name.startswith("batch.") and leaf != name and spread.high > 0 and f"{leaf}.mean" in entry.numbers:
            found[leaf] = entry.numbers[f"{leaf}.mean"], spread
    return found


def _own(pair: tuple[Spread, Spread], rank: int) -> tuple[float, ...] | None:
    """Return one rank's own mean and spread, known if it is the lowest or the highest; None if unknown or without variation."""
    own = [
        one.low if rank == one.low_rank or one.low == one.high else one.high if rank == one.high_rank else None
        for one in pair
    ]
    return tuple(value for value in own if value is not None) if None not in own and own[1] else None


def _of_same_batch(window: Window) -> list[int]:
    """Return the ranks whose newest two batches are the same."""
    views = [view for view in window.steps[-3:] if view.batches][-2:]
    if len(views) < 2:  # noqa: PLR2004 - a pair
        return []
    before, now = views
    same = [set(ranks) & set(before.batches[sign]) for sign, ranks in now.batches.items() if sign in before.batches]
    return sorted(set[int]().union(*same))


def _stuck_finding(stuck: dict[int, list[int]]) -> Finding:
    ranks, runs = tuple(stuck), list(stuck.values())
    first, last = min(run[0] for run in runs), max(run[-1] for run in runs)
    return Finding(
        detector=EpochOrder.name,
        severity="warning",
        first_step=first,
        detected_step=last,
        ranks=ranks,
        summary=f"{ranks_text(ranks).capitalize()} has been training on one batch since step {first}."
        if len(ranks) == 1
        else f"{ranks_text(ranks).capitalize()} have been training each on one batch since step {first}.",
        facts={"is_order_repeated": True, "is_one_batch": True, "takes_epoch": None, "is_epoch_told": False},
        evidence=tuple(
            Evidence(
                kind="batch",
                summary=f"rank {rank}: the batch of step {run[0]} came again at each of the {len(run)} steps seen since, to step {run[-1]}; before it no two were alike",
                values={"rank": rank, "first_step": run[0], "num_steps": len(run)},
            )
            for rank, run in list(stuck.items())[:MAX_SHOWN]
        ),
    )


def _repeated(of_rank: Sequence[LoaderPass]) -> list[LoaderPass]:
    """Return the newest passes that follow each other and are alike, oldest first; empty if there are not two.

    Passes between the first and the newest are not kept, but if those two are alike, so were these.
    """
    ordered = sorted(of_rank, key=lambda one: one.begin.epoch)
    run = ordered[-1:]
    for one in reversed(ordered[:-1]):
        if _key(one) != _key(run[0]) or (len(run) == 1 and run[0].begin.epoch - one.begin.epoch != 1):
            break
        run.insert(0, one)
    return run if len(run) > 1 else []


def _is_one_batch(window: Window) -> bool:
    """Whether all batches are the same, as far as their signatures are known."""
    views = [view for view in window.steps if view.batches]
    return len(views) > 1 and all(
        len(view.batches) == 1 and view.batches.keys() == views[0].batches.keys() for view in views
    )


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
    step = min(of_rank[0].end_step or 0 for of_rank in found.values())
    epochs = [one.begin.epoch for one in run]
    is_whole = len(epochs) > MAX_SHOWN and epochs[-1] - epochs[0] == len(epochs) - 1
    shown = f"{epochs[0]} to {epochs[-1]}" if is_whole else listed(map(str, epochs))
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
