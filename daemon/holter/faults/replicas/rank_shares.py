"""Rank shares: ranks whose losses are joined into one gradient put in parts of very different weight.

What it detects
    One rank whose loss is twenty times the others' or more, or a twentieth, at twelve steps in a row, always the same rank, while the
    others are not yet near zero; or as many times the others' as there are micro-batches, where it alone does not divide by their
    number. A rank whose loss was like the others', rose at once and has been a third above them or more at each of sixteen steps since;
    or one that learns nothing while the others' loss comes down. And ranks that make their steps of different numbers of micro-batches,
    each always of its own number, at twelve steps in a row. And one rank that left out an optimizer step, or took one too many: it made the
    passes of two steps in one, or none, and its collectives have been a round off the others' since.

Why it matters
    Gradients are averaged over ranks: the one that sums its loss where the others average it, or lives in another world (other labels,
    garbage inputs, weights that are not the others'), drowns them. Ranks with half the micro-batches count each sample twice.

False positives
    Losses of ranks differ by a factor of a few where data differ, and by more when they come near zero: then nothing is said, as long
    as each comes down. A rank that gets harder data at once than the others is told: its part in the gradient is another. Numbers of
    micro-batches that change from step to step, as with batches of equal tokens, are silent; so are a pipeline's stages, of which one
    has a loss.

What to do
    Print reduction, labels and the divisor of the loss on the named rank (`holter explain gradient_scale_mismatch`,
    `corrupt_labels_or_range`).
"""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.mismatched_calls import behind
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Spread, Window
from holter.records import Evidence, Finding

SHOWN = 3
TWO = 2
"""With two ranks there is no minority: the higher loss is the odd one."""
CONVERGED = 0.02
"""Share of its first value below which a loss is near zero, where ratios mean nothing."""
NUM_BEFORE = 10
"""Number of steps before a parting that must have been ordinary."""
UNLEARNT, LEARNT = 0.95, 0.7
"""Shares of the first loss: a rank that stays above the first while the others are below the second learns nothing."""
STEADY = 1.5
"""A factor whose largest value is less than this times its smallest is steady: a sum against a mean, not different data."""
NOISY = 8.0
"""The same for a factor of about the number of samples."""


@dataclass(frozen=True)
class RankShares:
    """Compares the ranks' parts in one gradient."""

    name: ClassVar[str] = "rank_shares"

    ratio: float = threshold(20.0, above=1)
    """Ratio between one rank's loss and the nearest that is known of the others'."""
    min_steps: int = threshold(12, at_least=3)
    """Number of steps in a row."""
    parted: float = threshold(1.3, above=1)
    """Ratio between one rank's loss and the others', at each of `min_parted` steps."""
    min_parted: int = threshold(16, at_least=8)
    """Number of steps in a row with a loss that has parted; twice as many for a rank that learns nothing."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most two findings."""
        losses = [(step, loss) for step, loss in window.values("loss") if loss.num > 1]
        run = self._apart(losses) or self._undivided(window, losses)
        if run:
            yield _loss_finding(run, run[self.min_steps - 1][0], _num_samples(window))
        elif (parting := self._parted(losses)) is not None:
            yield parting
        counts = self._uneven([(step, count) for step, count in window.values("micro_steps") if count.num > 1])
        # A stage of a pipeline counts its passes in its own way, and has no loss.
        if counts and losses and losses[-1][1].num == counts[-1][1].num:
            yield _count_finding(counts, counts[self.min_steps - 1][0])
        elif (apart := _out_of_step(window)) is not None:
            yield apart

    def _parted(self, losses: Sequence[tuple[int, Spread]]) -> Finding | None:
        """Find a rank whose loss has recently risen above the others', or that learns nothing while they do."""
        rank = losses[-1][1].high_rank if losses else -1
        above = [
            loss.high_rank == rank and loss.low > 0 and not loss.num_nonfinite and loss.high > self.parted * _rest(loss)
            for _, loss in losses
        ]
        num = next((i for i, is_above in enumerate(reversed(above)) if not is_above), len(above))
        if num < self.min_parted:
            return None
        first = len(losses) - num
        run, before = losses[first:], losses[max(0, first - NUM_BEFORE) : first]
        own, others = statistics.median(loss.high for _, loss in run), statistics.median(_rest(loss) for _, loss in run)
        is_found = False
        if len(before) == NUM_BEFORE:
            was = statistics.median(loss.mean for _, loss in before)
            was_apart = statistics.median(loss.high / loss.low for _, loss in before if loss.low > 0) > self.parted
            is_found = not was_apart and own > self.parted * was and own > CONVERGED * losses[0][1].mean
        if not is_found and num >= 2 * self.min_parted:
            low, high = (statistics.median(getattr(loss, end) for _, loss in losses[:SHOWN]) for end in ("low", "high"))
            newest = [loss for _, loss in run[-NUM_BEFORE:]]
            num_unlearnt = sum(loss.high > UNLEARNT * high for loss in newest)
            is_found = num_unlearnt >= NUM_BEFORE - 1 and statistics.median(map(_rest, newest)) < LEARNT * low
        return _parting(run, rank, own, others, run[self.min_parted - 1][0]) if is_found else None

    def _uneven(self, counts: Sequence[tuple[int, Spread]]) -> list[tuple[int, Spread]]:
        """Return the steps in a row, until now, at which the ranks had different numbers of micro-batches.

        These must be the same numbers at each step.
        """
        if not counts or not 0 < counts[-1][1].low < counts[-1][1].high:
            return []
        now = counts[-1][1]
        run = list(itertools.takewhile(lambda told: _pair(told[1]) == _pair(now), reversed(counts)))[::-1]
        return run if len(run) >= self.min_steps else []

    def _undivided(self, window: Window, losses: Sequence[tuple[int, Spread]]) -> list[tuple[int, Spread, int, float]]:
        """Return the steps in a row, until now, at which one rank alone did not divide its loss, or alone did.

        A loss is divided by the number of micro-batches.
        """
        divided = dict(window.values("loss.is_divided"))
        counts = {step: count.low for step, count in window.values("micro_steps") if count.low == count.high}
        run: list[tuple[int, Spread, int, float]] = []
        for step, loss in reversed(losses):
            told, num = divided.get(step), counts.get(step, 1)
            if told is None or num < TWO or told.num < loss.num or (told.low, told.high) != (0, 1):
                break
            rank = told.low_rank if told.mean >= 1 / TWO else told.high_rank
            is_high = rank == told.low_rank
            if rank != (loss.high_rank if is_high else loss.low_rank) or loss.low <= 0 or loss.num_nonfinite:
                break
            own = loss.high if is_high else loss.low
            rest = (loss.mean * loss.num - own) / (loss.num - 1)
            factor = own / rest if is_high else rest / own
            if not num / STEADY <= factor <= num * STEADY or (run and run[0][2] != rank):
                break
            run.insert(0, (step, loss, rank, factor))
        return run if len(run) >= self.min_steps else []

    def _apart(self, losses: Sequence[tuple[int, Spread]]) -> list[tuple[int, Spread, int, float]]:
        """Return the steps in a row, until now, at which one rank's loss was far from the others'."""
        first = next((loss.low for _, loss in losses if loss.low > 0), 0.0)
        run: list[tuple[int, Spread, int, float]] = []
        for step, loss in reversed(losses):
            if loss.num_nonfinite or loss.low <= 0 or loss.high < self.ratio * loss.low:
                break
            rest = (loss.mean * loss.num - loss.high) / (loss.num - 1)
            is_high = loss.num == TWO or loss.high >= self.ratio * rest
            rank = loss.high_rank if is_high else loss.low_rank
            near_zero = loss.low < CONVERGED * first and is_high
            if near_zero or (run and run[0][2] != rank):
                break
            run.insert(0, (step, loss, rank, loss.high / (rest if is_high else loss.low)))
        return run if len(run) >= self.min_steps else []


def _out_of_step(window: Window) -> Finding | None:
    """Find a rank that once made the passes of two steps in one, or none, and is a round of calls off since.

    A rank with one more micro-batch, and no collective in it, makes no more calls; if all ranks skip a step together, all count
    alike.
    """
    counts = [(step, count) for step, count in window.values("micro_steps") if count.num > 1]
    for (_, before), (step, count) in itertools.pairwise(counts):
        usual, total = before.high, count.mean * count.num
        if not 0 < usual == before.low or count.num != before.num or count.low == count.high:
            continue
        if (count.low, count.high) == (usual, 2 * usual) and round(total) == usual * (count.num + 1):
            rank, is_left_out = count.high_rank, True
        elif (count.low, count.high) == (0, usual) and round(total) == usual * (count.num - 1):
            rank, is_left_out = count.low_rank, False
        else:
            continue
        for told in window.calls.counts.values():
            others = {each for pace in told for some in pace.lasts.values() for each in some} - {rank}
            found = behind(told, others if is_left_out else (rank,), (rank,) if is_left_out else others)
            if others and found is not None and abs(found.step - step) <= 1:
                return _step_finding(step, rank, count, is_left_out=is_left_out)
    return None


def _step_finding(step: int, rank: int, count: Spread, *, is_left_out: bool) -> Finding:
    what = "left out an optimizer step" if is_left_out else "took an optimizer step too many"
    passes = count.high if is_left_out else count.low
    return Finding(
        detector=RankShares.name,
        severity="warning",
        first_step=step,
        detected_step=step + SHOWN,
        ranks=(rank,),
        summary=f"Rank {rank} {what} at step {step}: it counts one {'less' if is_left_out else 'more'} than the others since.",
        facts={"is_step_apart": True, "is_loss_apart": False, "is_count_apart": False, "is_scale_one": True},
        evidence=(
            Evidence(
                kind="micro_batches",
                summary=f"step {step}: {passes:.0f} backward passes on rank {rank}, {count.low if is_left_out else count.high:.0f} on the others, and since then its calls are a round off theirs",
                values={"step": step, "own": passes, "is_left_out": is_left_out},
            ),
        ),
    )


def _rest(loss: Spread) -> float:
    """Return the mean of all ranks but the highest."""
    return (loss.mean * loss.num - loss.high) / (loss.num - 1)


def _parting(run: Sequence[tuple[int, Spread]], rank: int, own: float, others: float, known: int) -> Finding:
    first = run[0][0]
    return Finding(
        detector=RankShares.name,
        severity="warning",
        first_step=first,
        detected_step=known,
        ranks=(rank,),
        summary=f"The loss of rank {rank} has been above the others' at every step since {first}: {own:.4g} against {others:.4g}.",
        facts={
            "is_parted": True,
            "is_loss_apart": False,
            "is_count_apart": False,
            "is_scale_one": False,
            "series": ["loss"],
        },
        evidence=tuple(
            Evidence(
                kind="loss",
                summary=f"step {step}: {loss.high:.4g} on rank {rank}, {_rest(loss):.4g} on the others",
                values={"step": step, "own": loss.high, "others": _rest(loss)},
            )
            for step, loss in (*run[:1], *run[-SHOWN + 1 :])
        ),
    )


def _pair(count: Spread) -> tuple[float, int, float, int]:
    return count.low, count.low_rank, count.high, count.high_rank


def _num_samples(window: Window) -> float:
    told = [num.mean for _, num in window.values("batch.num_samples")]
    return statistics.median(told) if told else 0.0


def _loss_finding(run: list[tuple[int, Spread, int, float]], detected_step: int, num_samples: float) -> Finding:
    rank, factors = run[0][2], [factor for *_, factor in run]
    middle, last = statistics.median(factors), run[-1]
    # A mean over few samples is noisy, and so is the factor; a factor of about the number of samples is a sum nevertheless.
    is_sum = num_samples > 1 and num_samples / STEADY < middle < num_samples * STEADY
    is_steady = max(factors) < (NOISY if is_sum else STEADY * STEADY) * min(factors)
    return Finding(
        detector=RankShares.name,
        severity="warning",
        first_step=run[0][0],
        detected_step=detected_step,
        ranks=(rank,),
        summary=f"The loss of rank {rank} has been {middle:.3g} times away from the others' since step {run[0][0]}: {last[1].high:.4g} on rank {last[1].high_rank}, {last[1].low:.4g} on rank {last[1].low_rank}.",
        facts={
            "is_factor_steady": is_steady,
            "is_loss_apart": True,
            "is_count_apart": False,
            "is_scale_one": False,
            "series": ["loss"],
        },
        evidence=tuple(
            Evidence(
                kind="loss",
                summary=f"step {step}: {loss.low:.4g} on rank {loss.low_rank}, {loss.high:.4g} on rank {loss.high_rank}, {loss.mean:.4g} on average",
                values={"step": step, "low": loss.low, "high": loss.high, "factor": factor},
            )
            for step, loss, _, factor in (run[:1] + run[-SHOWN + 1 :])
        ),
    )


def _count_finding(counts: list[tuple[int, Spread]], detected_step: int) -> Finding:
    _, count = counts[-1]
    middle = (count.low + count.high) / 2
    # Of more than two ranks, the one that is alone; of two it is unknown which is wrong.
    ranks = [count.low_rank if count.mean > middle else count.high_rank]
    if count.num == TWO:
        ranks = [count.low_rank, count.high_rank]
    return Finding(
        detector=RankShares.name,
        severity="warning",
        first_step=counts[0][0],
        detected_step=detected_step,
        ranks=tuple(sorted(ranks)),
        summary=f"Ranks make their steps of different numbers of micro-batches: {count.low:.0f} on rank {count.low_rank}, {count.high:.0f} on rank {count.high_rank}.",
        facts={"is_factor_steady": True, "is_loss_apart": False, "is_count_apart": True, "is_scale_one": False},
        evidence=(
            Evidence(
                kind="micro_batches",
                summary=f"at {len(counts)} steps in a row: {count.low:.0f} backward passes on rank {count.low_rank}, {count.high:.0f} on rank {count.high_rank}",
                values={"low": count.low, "high": count.high},
            ),
        ),
    )
