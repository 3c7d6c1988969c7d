"""Sample overlap: samples of the evaluation are trained on.

What it detects
    Samples, by fingerprints of their content, that a rank has evaluated and has trained on: how many of how many that were looked at.
    Each rank remembers its last 65,536 samples of either kind, and looks at a few rows of each batch, so the share is an estimate, and
    a leak that is spread thinly over many ranks is found late.

Why it matters
    The evaluation shows what the model remembers instead of what it has learned. Checkpoints, stopping and hyper-parameters are chosen
    by it.

False positives
    Samples that are the same by chance (short texts, few features) are known by how often two of one pass are the same, and are not
    counted. Epochs that repeat, shuffling and samplers that draw twice concern training alone. Data that is augmented before it is batched
    is not the same any more: there a leak is not seen. Training data that is evaluated on purpose (the same data set, or beside
    another evaluation that is clean) is information, and so is what a script evaluates without a loader. A few duplicates, under one in
    a hundred, are information too.

What to do
    Take the shared samples out of one of the two sets (`holter explain data_leakage`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import ranks_text
from holter.faults.window import Note, Window
from holter.records import Evidence, Finding, Overlap

Told = tuple[Note, Overlap]


@dataclass(frozen=True)
class SampleOverlap:
    """Judges the ranks' reports of samples that they have met twice."""

    name: ClassVar[str] = "sample_overlap"

    min_met: int = threshold(3, at_least=1)
    """Fewer samples than this are the usual duplicates of any data set."""
    chance_factor: float = threshold(4.0, above=1)
    """Samples must have been met at least this many times as often as chance explains."""
    min_share: float = 0.01
    """Share of the evaluated samples below which the finding is only information."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the evaluation with the largest share."""
        newest: dict[tuple[int, int], Told] = {}
        first: dict[int, int] = {}
        for note, overlap in window.notes_of(Overlap):
            newest[note.rank, overlap.loader] = (note, overlap)
            first.setdefault(overlap.loader, note.step)
        sources: dict[int, list[Told]] = {}
        for (_, loader), one in sorted(newest.items()):
            if self._is_beyond_chance(one[1]):
                sources.setdefault(loader, []).append(one)
        found = [(loader, told) for loader, told in sources.items() if _num_met(told) >= self.min_met]
        if found:
            loader, told = max(found, key=lambda one: (_share(one[1]), -one[0]))
            yield self._finding(told, first[loader])

    def _is_beyond_chance(self, overlap: Overlap) -> bool:
        """Whether equal samples between training and evaluation are far more frequent than within one pass."""
        if overlap.is_distinctive:
            return True
        expected = overlap.num_evaluated * overlap.num_trained * (overlap.num_repeats + 1) / max(overlap.num_pairs, 1)
        return overlap.num_met >= self.chance_factor * expected

    def _finding(self, told: Sequence[Told], first_step: int) -> Finding:
        one, share = told[0][1], _share(told)
        is_meant = one.is_same_dataset or one.num_clean > 0 or one.loader < 0
        ranks = tuple(sorted({note.rank for note, _ in told}))
        met, looked = _num_met(told), sum(overlap.num_evaluated for _, overlap in told)
        what = f"the loader of {one.dataset}" if one.loader >= 0 and one.dataset else "the evaluation"
        return Finding(
            detector=self.name,
            severity="info" if is_meant or share < self.min_share else "warning",
            first_step=first_step,
            detected_step=max(note.step for note, _ in told),
            ranks=ranks,
            summary=f"{met} of {looked} samples of {what} that were looked at are trained on.",
            facts={
                "is_trained_on": True,
                "is_same_dataset": one.is_same_dataset,
                "has_clean_evaluation": one.num_clean > 0,
                "is_by_call": one.loader < 0,
                "is_by_chance": False,
            },
            evidence=(
                Evidence(
                    kind="samples",
                    summary=f"{ranks_text(ranks)}: {met} of {looked} evaluated samples ({100 * share:.3g} %) have the fingerprint of a sample that was trained on",
                    values={"num_met": met, "num_evaluated": looked, "loader": one.loader, "dataset": one.dataset},
                ),
                Evidence(
                    kind="samples",
                    summary=(
                        "samples are rows of numbers that are not whole: no two are the same by chance"
                        if one.is_distinctive
                        else f"within one pass {one.num_repeats} of {one.num_pairs} pairs of samples were the same: that is how often chance makes one"
                    ),
                    values={"num_repeats": one.num_repeats, "num_pairs": one.num_pairs},
                ),
                *_meant(one),
            ),
        )


def _num_met(told: Sequence[Told]) -> int:
    return sum(overlap.num_met for _, overlap in told)


def _share(told: Sequence[Told]) -> float:
    return _num_met(told) / max(1, sum(overlap.num_evaluated for _, overlap in told))


def _meant(one: Overlap) -> Iterator[Evidence]:
    if one.is_same_dataset:
        summary = "the loader reads the very data set that is trained on: perhaps on purpose"
        yield Evidence(kind="loader", summary=summary, values={"is_same_dataset": True})
    if one.num_clean:
        summary = f"of {one.num_clean} samples of other evaluations none was trained on: this one may be meant to show the training data"
        yield Evidence(kind="loader", summary=summary, values={"num_clean": one.num_clean})
    if one.loader < 0:
        summary = (
            "the model was called in evaluation mode with tensors that no loader gave: what they are for is not known"
        )
        yield Evidence(kind="loader", summary=summary, values={"is_by_call": True})
