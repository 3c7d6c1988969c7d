"""Initialisation: a weight that should vary has one value everywhere.

What it detects
    Trained matrices all of whose elements are equal and not zero when training begins; and trained matrices that are all zero and
    whose gradient has been exactly zero for many steps, so that they will never be anything else.

Why it matters
    Equal weights make equal outputs, equal outputs get equal gradients: the units of such a layer stay copies of one another, and the layer
    works as if it were one unit wide. The loss falls a little and stays there.

False positives
    Scales, biases and normalisations start at one value by design: tensors with a single long dimension, normalisations by class, and
    gates and scales by name are not judged. A matrix of zeros is an ordinary beginning (the second matrix of an adapter, a zero
    convolution, a token) as long as gradients reach it. What is frozen is not judged. If most matrices of the model start at one value,
    somebody meant it, as tests do: that is a remark, no warning.

What to do
    Look at the code that initialises the named tensors (`holter explain implausible_initialisation`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import listed, modules_of, ranks_text
from holter.faults.window import Window
from holter.records import Census, Evidence, Finding, Mark, TensorEntry, Vitals

ONE_VALUE_BY_DESIGN = re.compile(
    r"norm|gate|scale|gamma|beta|alpha|bias|temperature|mask|token|pos|decay|_log|lora_|momentum"
)
"""Parts of names and classes of tensors that may start at one value."""
MAX_SHOWN = 4
EARLY = 4
"""Number of steps after the first comparison: readings begin when a gradient has been read."""


@dataclass(frozen=True)
class Initialisation:
    """Judges trained weights as they are when training begins."""

    name: ClassVar[str] = "initialisation"

    min_elements: int = 16
    """Number of elements below which a tensor may be constant by chance or design."""
    idle_steps: int = threshold(16, at_least=1)
    """Number of steps for which a matrix of zeros must have had a gradient of exactly zero."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: all tensors that are constant, or else all that are stuck at zero."""
        ranks_of: dict[int, list[int]] = {}
        for rank, census in window.models.census.items():
            ranks_of.setdefault(id(census), []).append(rank)
        constant: dict[str, set[int]] = {}
        zero: dict[str, set[int]] = {}
        stuck = self._stuck(window)
        for ranks in ranks_of.values():
            for entry in self._odd(window.models.census[ranks[0]]):
                is_zero = bool(entry.marks & Mark.ZERO)
                if not is_zero or entry.name in stuck:
                    (zero if is_zero else constant).setdefault(entry.name, set()).update(ranks)
        if constant:
            yield _finding(window, constant, is_zero=False, step=0, is_meant=self._is_meant(window, constant))
        elif zero:
            yield _finding(window, zero, is_zero=True, step=max(0, min(stuck[name] for name in zero)), is_meant=False)

    def _odd(self, census: Census) -> Iterator[TensorEntry]:
        for entry in census.entries:
            has_one_value = bool(entry.marks & (Mark.CONSTANT | Mark.ZERO)) and not entry.marks & Mark.NONFINITE
            if has_one_value and self._is_matrix(entry) and _is_trained_weight(entry):
                yield entry

    def _is_matrix(self, entry: TensorEntry) -> bool:
        return sum(size > 1 for size in entry.shape) > 1 and prod(entry.shape) >= self.min_elements

    def _is_meant(self, window: Window, constant: dict[str, set[int]]) -> bool:
        """Whether most trained matrices are constant on every rank, which is intended."""
        ranks = set.intersection(*constant.values())
        entries = window.models.census[min(window.models.census)].entries
        num_trained = sum(self._is_matrix(entry) and _is_trained_weight(entry) for entry in entries)
        return ranks >= window.attached and 2 * len(constant) > num_trained

    def _stuck(self, window: Window) -> dict[str, int]:
        """Return since which step each tensor's gradient has been exactly zero, if that is long enough and from the beginning.

        A tensor that had a gradient before has left zero: what stopped it later is another matter.
        """
        begin = min((history.first_step for history in window.tensors.classes.values()), default=0)
        return {
            name: note.step - vitals.idle_steps
            for note, vitals in window.notes_of(Vitals)
            if vitals.idle_steps >= self.idle_steps and note.step - vitals.idle_steps <= begin + EARLY
            for name in vitals.zero_gradient.names
        }


def _is_trained_weight(entry: TensorEntry) -> bool:
    names = f"{entry.name.lower()} {entry.module_class.lower()}"
    is_by_design = bool(ONE_VALUE_BY_DESIGN.search(names)) and not entry.marks & Mark.ZERO
    return entry.requires_grad and not entry.is_buffer and not is_by_design


def _finding(window: Window, found: dict[str, set[int]], *, is_zero: bool, step: int, is_meant: bool) -> Finding:
    names = tuple(found)
    ranks = tuple(sorted(set().union(*found.values())))
    shown = listed([*names[:MAX_SHOWN], *([f"{len(names) - MAX_SHOWN} more"] if len(names) > MAX_SHOWN else [])])
    are = "is" if len(names) == 1 else "are"
    what = "all zero and get no gradient" if is_zero else "constant"
    if is_zero and len(names) == 1:
        what = "all zero and gets no gradient"
    entries = {entry.name: entry for entry in window.models.census[ranks[0]].entries}
    return Finding(
        detector=Initialisation.name,
        severity="info" if is_meant else "warning",
        first_step=step,
        detected_step=max((view.step for view in window.steps), default=step),
        ranks=ranks,
        tensors=names,
        modules=modules_of(names),
        summary=f"{shown} {are} {what}: all elements have one value where trained weights should vary.",
        facts={
            "is_constant": not is_zero,
            "is_stuck_at_zero": is_zero,
            "is_varied": False,
            "is_most_of_the_model": is_meant,
        },
        evidence=tuple(
            Evidence(
                kind="census",
                summary=f"{name} ({entries[name].module_class or 'parameter'}), {' x '.join(map(str, entries[name].shape))}: one value in all "
                f"{prod(entries[name].shape):,} elements, {'zero' if is_zero else 'not zero'}, on {ranks_text(found[name])}",
                values={"name": name, "shape": list(entries[name].shape), "is_zero": is_zero},
            )
            for name in names[:MAX_SHOWN]
            if name in entries
        ),
    )
