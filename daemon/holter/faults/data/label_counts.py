"""Label counts: one class has nearly all labels.

What it detects
    A class to which nineteen of twenty labels or more belong that the losses of all ranks were given, in each of several stretches of
    the run, while others occur as well. And one rank whose losses are given one class alone, in a stretch in which other ranks get
    several. It counts the labels of samples, as the loss got them; those of tokens and pixels are uneven by nature.

Why it matters
    What a rank does to its labels after the loader is averaged into all gradients. A model that always answers with this class has a
    small loss and a high accuracy, and has learned nothing of the others.

False positives
    Sorted data shows one class after the other: a class that is rare must have come in three stretches at least. Data that is cut by
    class gives each rank its own from the start, every one of them few: there no rank's labels are mixed. Balanced samplers show a
    class as often as any other. Rare events are rare: so this is information, with counts, and says whether the loss weighs its
    classes.

What to do
    Weigh the classes or sample evenly, and look at a metric by class (`holter explain class_imbalance`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import ranks_text
from holter.faults.window import Window
from holter.records import Evidence, Finding, Labels

SHOWN = 6
NUM_STRETCHES = 1
"""Number of newest reports of a rank that are taken together."""
MIXED = 0.8
"""Share of the commonest class below which a rank's labels are mixed."""


@dataclass(frozen=True)
class LabelCounts:
    """Judges the classes of the labels that losses are given."""

    name: ClassVar[str] = "label_counts"

    max_share: float = threshold(0.95, above=0.5)
    """Share of all labels above which one class has nearly all."""
    min_stretches: int = threshold(3, at_least=2)  # Sorted data shows two classes where one ends.
    """Number of stretches of the run in which the commonest class must have that share while another occurs."""
    min_labels: int = 256
    min_rare: int = 4
    """Number of labels of other classes that there must be."""
    min_one: int = threshold(64, at_least=8)
    """Number of labels of one rank that are all of one class."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding."""
        stretches: dict[int, Counter[int]] = {}
        told: list[Labels] = []
        for note, labels in window.notes_of(Labels):
            stretches.setdefault(note.step, Counter()).update(labels.counts)
            told.append(labels)
        counts = sum(stretches.values(), Counter[int]())
        if (alone := self._alone(window)) is not None:
            yield alone
            return
        if not told or not counts or counts.total() < self.min_labels:
            return
        common, num = counts.most_common(1)[0]
        rare = counts.total() - num
        is_steady = all(one[common] >= (self.max_share - 0.05) * one.total() for one in stretches.values())
        num_with_rare = sum(one.total() > one[common] for one in stretches.values())
        if num < self.max_share * counts.total() or rare < self.min_rare or not is_steady:
            return
        if num_with_rare >= self.min_stretches:
            yield _finding(window, counts, told, max(stretches))

    def _alone(self, window: Window) -> Finding | None:
        """Find ranks whose newest labels are all of one class, while those of the others are of several."""
        newest: dict[int, list[tuple[int, Labels]]] = {}
        for note, labels in window.notes_of(Labels):
            newest.setdefault(note.rank, []).append((note.step, labels))
        last = {rank: told[-NUM_STRETCHES:] for rank, told in newest.items() if len(told) >= NUM_STRETCHES}
        if len(last) < 2:  # noqa: PLR2004 - somebody to compare with
            return None
        sums = {rank: sum((Counter(one.counts) for _, one in told), Counter[int]()) for rank, told in last.items()}
        same = [rank for rank, of in sums.items() if len(of) == 1 and of.total() >= self.min_one]
        others = [of for rank, of in sums.items() if rank not in same]
        # Sorted data gives every rank one class after the other.
        is_odd = 2 * len(same) <= len(sums) and all(of and max(of.values()) < MIXED * of.total() for of in others)
        return _alone_finding(same, sums, last) if same and others and is_odd else None


def _alone_finding(
    ranks: list[int], sums: dict[int, Counter[int]], last: dict[int, list[tuple[int, Labels]]]
) -> Finding:
    rank = ranks[0]
    label, num = sums[rank].most_common(1)[0]
    return Finding(
        detector=LabelCounts.name,
        severity="warning",
        first_step=last[rank][0][1].first_step,
        detected_step=last[rank][-1][0],
        ranks=tuple(sorted(ranks)),
        summary=f"The losses of {ranks_text(ranks)} are given class {label} alone, those of the others several.",
        facts={"is_one_label_alone": True, "is_on_all_ranks": False},
        evidence=tuple(
            Evidence(
                kind="labels",
                summary=f"rank {one}, steps {last[one][0][1].first_step} to {last[one][-1][0]}: "
                + ", ".join(f"class {label}: {times}" for label, times in sums[one].most_common(SHOWN)),
                values={"rank": one, "counts": {str(k): v for k, v in sums[one].most_common(SHOWN)}, "num": num},
            )
            for one in [*ranks[:2], *[one for one in sums if one not in ranks][:2]]
        ),
    )


def _finding(window: Window, counts: Counter[int], told: list[Labels], step: int) -> Finding:
    common, num = counts.most_common(1)[0]
    total, num_classes = counts.total(), max(labels.num_classes for labels in told)
    is_weighted = any(labels.is_weighted for labels in told)
    shown = ", ".join(f"class {label}: {times}" for label, times in counts.most_common(SHOWN))
    unseen = f"; of {num_classes} classes {num_classes - len(counts)} never came" if num_classes > len(counts) else ""
    return Finding(
        detector=LabelCounts.name,
        severity="info",
        first_step=min(labels.first_step for labels in told),
        detected_step=step,
        ranks=tuple(sorted(window.attached)),
        summary=f"Class {common} has {num} of {total} labels ({100 * num / total:.3g} %).",
        facts={"has_one_class_nearly_all": True, "is_evened_out": False},
        evidence=(
            Evidence(
                kind="labels",
                summary=f"labels that the losses of all ranks were given: {shown}{unseen}",
                values={"counts": {str(k): v for k, v in counts.most_common(SHOWN)}, "num_labels": total},
            ),
            Evidence(
                kind="loss",
                summary="the loss weighs its classes" if is_weighted else "the loss does not weigh its classes",
                values={"is_weighted": is_weighted},
            ),
        ),
    )
