"""Structure mismatch: ranks that should hold the same model hold models of another shape.

What it detects
    Replicas whose parameters differ between ranks in name, shape, order, dtype or frozenness, from each rank's own census. A wrapper
    compares shapes at most: ranks that freeze different layers of the same shape pass, and reduce one layer into the other.

Why it matters
    A reduction goes by position, not by name. Ranks with different names, order or frozen parameters add the gradient of one tensor to
    another one, and nothing raises.

False positives
    Only components that are replicated over all ranks are compared; shards, stages of a pipeline, experts and what the wrapper was told
    to ignore are not. When all ranks freeze or unfreeze a layer at one step, one rank reports it earlier than another: this detector
    waits until all have passed that step.

What to do
    Build the model by the same code on every rank, without a branch on the rank, and freeze before wrapping. Restart: what was trained so
    far is mixed up.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.structure import StructureDifference, compare_structures
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import modules_of, named, ranks_text
from holter.faults.window import Window
from holter.records import Evidence, Finding

MAX_SHOWN = 4
"""Number of tensors with a line of evidence of their own."""


@dataclass(frozen=True)
class StructureMismatch:
    """Compares the ranks' censuses."""

    name: ClassVar[str] = "structure_mismatch"

    patience_s: float = threshold(2.0, at_least=0)
    """Seconds to wait for ranks whose new census may be on its way."""
    patience_steps: int = 2
    """Number of steps that all ranks must have completed since the last change of a census."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding."""
        found = compare_structures(window)
        if found is None:
            return
        began = _began(window, found)
        # A rank that was heard late reports its present structure, not its earlier one.
        told = max((window.models.census_steps.get(rank, 0) for rank in window.attached), default=0)
        if self._is_settled(window, max(began, told)):
            newest = max((view.step for view in window.steps), default=began)
            yield _finding(found, began, min(newest, max(began, told) + self.patience_steps))

    def _is_settled(self, window: Window, began: int) -> bool:
        """Whether all ranks have reported their structure since the step at which one last changed or first reported."""
        if any(exit_.rank in window.attached for exit_ in window.processes.exits):
            return True
        later = [view for view in window.steps if view.step >= began]
        is_past = any(not view.missing and view.step >= began + self.patience_steps for view in later)
        if is_past:
            return True
        return bool(later) and window.now_ns - later[0].first_seen_ns > 5 * self.patience_s * 1e9


def _began(window: Window, found: StructureDifference) -> int:
    """Return the step of the last change to a tensor that differs; 0 if none ever changed."""
    names = set(found.tensors)
    return max((change.step for change in window.models.changes if change.name in names), default=0)


def _finding(found: StructureDifference, began: int, enough: int) -> Finding:
    largest, *others = found.groups
    everyone = tuple(sorted(rank for group in found.groups for rank in group))
    has_majority = 2 * len(largest) > len(everyone)
    ranks = tuple(sorted(rank for group in others for rank in group)) if has_majority else everyone
    structural = tuple(dict.fromkeys((*found.presence, *found.shapes, *found.order)))
    tensors = structural or found.frozen or found.dtypes
    what = _what(found)
    return Finding(
        detector=StructureMismatch.name,
        severity="critical",
        first_step=began,
        detected_step=enough,
        ranks=ranks,
        tensors=tensors,
        modules=modules_of(tensors),
        summary=f"The replicas of {ranks_text(everyone)} {what}: {named(tensors)}.",
        facts={
            "first_class": "census",
            "compared_ranks": list(everyone),
            "is_structure_different": bool(structural),
            "are_frozen_sets_different": bool(found.frozen),
            "are_dtypes_different": bool(found.dtypes),
            "has_majority": has_majority,
        },
        evidence=(*_lines(found, tensors), _majority(found, has_majority=has_majority)),
    )


def _what(found: StructureDifference) -> str:
    if found.presence:
        return "do not have the same parameters"
    if found.shapes:
        return "have parameters of other shapes"
    if found.order:
        return "have their parameters in another order"
    return "do not train the same parameters" if found.frozen else "hold parameters in other dtypes"


def _lines(found: StructureDifference, tensors: tuple[str, ...]) -> Iterator[Evidence]:
    for name in tensors[:MAX_SHOWN]:
        one, two = found.words[name]
        yield Evidence(
            kind="census",
            summary=f"{name} is {one} on {ranks_text(found.groups[0])} and {two} on {ranks_text(found.groups[1])}",
            values={"name": name},
        )
    if len(tensors) > MAX_SHOWN:
        yield Evidence(kind="census", summary=f"{len(tensors)} tensors differ in all", values={"num": len(tensors)})


def _majority(found: StructureDifference, *, has_majority: bool) -> Evidence:
    sizes = " against ".join(str(len(group)) for group in found.groups[:MAX_SHOWN])
    text = (
        "the larger group is taken for the sound one" if has_majority else "there is no majority, so that all are named"
    )
    return Evidence(
        kind="majority", summary=f"{sizes} ranks: {text}", values={"groups": [list(g) for g in found.groups]}
    )
