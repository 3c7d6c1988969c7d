"""Architecture: one kind of parameters holds most of the model.

What it detects
    A trained model of a hundred thousand parameters or more in which embeddings, or one single tensor, hold over four fifths of all
    parameters. Read from the census, once.

Why it matters
    What computes is small: the layers that should learn have a fifth of the budget, and most memory, communication and optimizer state
    is spent on a table of which each step touches a few rows. Usually a vocabulary that is too large for the model, or a layer count
    or width that was left at a test's value.

False positives
    Recommenders and retrieval models are tables by design, and small language models with a large vocabulary may be meant as they are:
    this is a remark (severity info), never a warning. Frozen models and small ones are not judged; a shard counts for its own size.

What to do
    Compare the configuration with what was intended (`holter explain lopsided_architecture`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from holter.faults.shared.structure import distinct_censuses
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import cap
from holter.faults.window import Window
from holter.records import Census, Evidence, Finding, TensorEntry

MAX_SHOWN = 4


@dataclass(frozen=True)
class Architecture:
    """Judges how a model's parameters are distributed."""

    name: ClassVar[str] = "architecture"

    share: float = threshold(0.8, above=0, below=1)
    """Share of all parameters that embeddings, or one tensor, must hold."""
    min_parameters: int = 100_000
    """Number of parameters below which a model is not judged."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the first model that is lopsided."""
        for census in distinct_censuses(window, None)[:1]:
            for index, component in enumerate(census.components):
                if component.is_trained and (finding := self._component(window, census, index)):
                    yield finding
                    return

    def _component(self, window: Window, census: Census, index: int) -> Finding | None:
        entries = [entry for entry in census.entries if entry.component == index and not entry.is_buffer]
        total = sum(prod(entry.shape) for entry in entries)
        if total < self.min_parameters:
            return None
        embeddings = [entry for entry in entries if "Embedding" in entry.module_class]
        largest = max(entries, key=lambda entry: prod(entry.shape))
        for held, is_embedding in ((embeddings, True), ([largest], False)):
            if sum(prod(entry.shape) for entry in held) > self.share * total:
                return _finding(window, held, total, is_embedding=is_embedding)
        return None


def _finding(window: Window, held: list[TensorEntry], total: int, *, is_embedding: bool) -> Finding:
    part = sum(prod(entry.shape) for entry in held)
    names = tuple(entry.name for entry in sorted(held, key=lambda entry: -prod(entry.shape)))
    whom = "embeddings hold" if is_embedding else f"{names[0]} holds"
    return Finding(
        detector=Architecture.name,
        severity="info",
        first_step=0,
        detected_step=0,
        ranks=tuple(sorted(window.attached)),
        tensors=names,
        modules=tuple(dict.fromkeys(name.rpartition(".")[0] for name in names)),
        summary=f"{cap(whom)} {part / total:.0%} of the model's {total:,} parameters.",
        facts={"is_most_in_embeddings": is_embedding, "is_most_in_one_place": True, "is_spread_out": False},
        evidence=tuple(
            Evidence(
                kind="census",
                summary=f"{entry.name} ({entry.module_class or 'parameter'}), {' x '.join(map(str, entry.shape))}: {prod(entry.shape) / total:.0%} of {total:,}",
                values={
                    "name": entry.name,
                    "shape": list(entry.shape),
                    "num_parameters": prod(entry.shape),
                    "total": total,
                },
            )
            for entry in sorted(held, key=lambda entry: -prod(entry.shape))[:MAX_SHOWN]
        ),
    )
