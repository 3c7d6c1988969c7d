"""Codebook usage: a quantiser sends nearly everything to a few of its codes.

What it detects
    A codebook whose share of used codes is under a tenth, or whose perplexity is close to one code or under a fiftieth of its size, log
    after log, without recovering.

Why it matters
    A code that no input chooses gets no gradient and is never chosen again. What is left of the codebook carries a fraction of the bits
    that it was built for; the decoder learns to do without it, and the loss settles at blur.

False positives
    The perplexity of a language model says nothing about a codebook: a plain `perplexity` counts only where a codebook is logged or the
    model has one. At the start few codes are used, and more at each step: a usage that rises is left alone. Codebooks of fewer than 16
    codes are not judged.

What to do
    Revive dead codes, and look at the commitment term (`holter explain codebook_collapse`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.logged_series import LoggedPoint, halves, logged, plain, trailing
from holter.faults.shared.structure import distinct_censuses
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding

CODEBOOK = re.compile(r"codebook|(^|[._])vq|vector_?quant|quanti[sz]")
USAGE = re.compile(r"usage|utili[sz]ation|active_ratio|used_ratio")
PERPLEXITY = re.compile(r"perplexity|(^|_)ppl($|_)")
SIZE = re.compile(r"(codebook|vq|quanti[sz]er?)[._]?(size|num_codes|num_embeddings)")
AMBIGUOUS = "code_perplexity"
MIN_SIZE = 16


@dataclass(frozen=True)
class CodebookUsage:
    """Judges how many codes a quantiser still uses."""

    name: ClassVar[str] = "codebook_usage"

    min_logs: int = threshold(8, at_least=2)  # A trend needs two.
    """Number of logs in a row that must show it."""
    min_usage: float = 0.1
    """A smaller share of used codes is a collapse."""
    min_perplexity: float = 2.0
    """A smaller perplexity is a collapse, whatever the size."""
    min_perplexity_share: float = 0.02
    """A perplexity under this share of the codebook's size is a collapse too."""
    recovery: float = 1.2
    """A number that grows by this factor from the first half of the logs to the second is recovering."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the codebook that collapsed first."""
        found = logged(window, lambda name: bool(USAGE.search(name) or PERPLEXITY.search(name) or SIZE.search(name)))
        if not found:
            return
        books = _books(window)
        ours = _of_codebooks(found, has_books=bool(books))
        size = _size(found, books)
        collapsed = {name: run for name, points in ours.items() if (run := self._collapsed(name, points, size))}
        # A small batch may use few codes of a healthy codebook, but then evenly.
        perplexities = [name for name in ours if PERPLEXITY.search(plain(name))]
        is_uneven = not perplexities or any(name in collapsed for name in perplexities)
        if collapsed and is_uneven and (size is None or size >= MIN_SIZE):
            enough = max(run[self.min_logs - 1][0] for run in collapsed.values())
            yield _finding(window, collapsed, size, books, enough)

    def _collapsed(self, name: str, points: Sequence[LoggedPoint], size: float | None) -> Sequence[LoggedPoint]:
        if PERPLEXITY.search(plain(name)):
            limit = max(self.min_perplexity, self.min_perplexity_share * (size or 0))
            run = trailing(points, lambda value: 0 < value < limit)
        else:
            run = trailing(_shares(points, size), lambda value: 0 <= value < self.min_usage)
        if len(run) < self.min_logs:
            return ()
        before, after = halves(run)
        return () if after > self.recovery * before else run


def _of_codebooks(found: dict[str, list[LoggedPoint]], *, has_books: bool) -> dict[str, list[LoggedPoint]]:
    """Return the usages and perplexities of a codebook: by name, or any perplexity if the model is known to have a codebook."""
    names = {name: plain(name) for name in found}
    if AMBIGUOUS in names.values():
        # It is logged a second time under the codebook's name, and may also be a language model's for source code.
        names = {name: bare for name, bare in names.items() if bare != "codebook_perplexity"}
    is_known = has_books or any(CODEBOOK.search(bare) for bare in names.values())
    return {
        name: found[name]
        for name, bare in names.items()
        if not SIZE.search(bare) and (CODEBOOK.search(bare) or (is_known and PERPLEXITY.search(bare)))
    }


def _shares(points: Sequence[LoggedPoint], size: float | None) -> Sequence[LoggedPoint]:
    """Convert to shares of the codebook: values above 1 are counts of codes, which become shares only if the size is known."""
    if max((value for _, value in points), default=0) <= 1:
        return points
    return [(step, value / size) for step, value in points] if size else ()


def _books(window: Window) -> dict[str, int]:
    """Return the numbers of codes of the model's codebooks, by name."""
    return {
        entry.name: entry.shape[-2]
        for census in distinct_censuses(window, None)
        for entry in census.entries
        if len(entry.shape) > 1
        and entry.shape[-2] >= MIN_SIZE
        and CODEBOOK.search(f"{entry.name}.{entry.module_class}".lower())
        and re.search(r"embed|codebook|weight$|codes$", entry.name.lower())
        and not re.search(r"proj|linear|conv", f"{entry.name}.{entry.module_class}".lower())
    }


def _size(found: dict[str, list[LoggedPoint]], books: dict[str, int]) -> float | None:
    """Return the number of codes in the codebook: as logged, or of the model's smallest one."""
    for name, points in found.items():
        if SIZE.search(plain(name)) and points:
            return points[-1][1]
    return min(books.values(), default=None)


def _finding(
    window: Window, collapsed: dict[str, Sequence[LoggedPoint]], size: float | None, books: dict[str, int], enough: int
) -> Finding:
    first = min(run[0][0] for run in collapsed.values())
    of_size = f" of {size:g} codes" if size else ""
    name, run = min(collapsed.items(), key=lambda item: (item[1][0][0], item[0]))
    return Finding(
        detector=CodebookUsage.name,
        severity="warning",
        first_step=first,
        detected_step=enough,
        ranks=tuple(sorted(window.attached)),
        tensors=tuple(sorted(books)),
        modules=tuple(dict.fromkeys(book.rpartition(".")[0] for book in sorted(books))),
        summary=f"{name.removeprefix('log.')} has been {run[-1][1]:.3g} or about that{of_size} since step {first}: few codes of the codebook are used.",
        facts={
            "has_low_usage": True,
            "is_recovering": False,
            "is_size_known": size is not None,
            "series": sorted(collapsed),
        },
        evidence=tuple(
            Evidence(
                kind="series",
                summary=f"{one.removeprefix('log.')}: {points[-1][1]:.3g}{of_size}, low at {len(points)} logs in a row since step {points[0][0]}",
                values={"name": one, "last": points[-1][1], "num_logs": len(points), "size": size},
            )
            for one, points in sorted(collapsed.items())
        ),
    )
