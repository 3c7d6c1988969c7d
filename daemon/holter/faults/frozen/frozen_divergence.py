"""Frozen divergence: weights that nobody trains are not the same on all ranks, or not weights at all.

What it detects
    Frozen parameters whose fingerprints differ between ranks; which side is implausible (all zero, constant where the other varies, NaN,
    huge, subnormal garbage, a norm far off), if one is; whether one side has only lost its low bits; whether they agreed before. Also
    frozen components that are all zero, or not finite, on every rank alike.

Why it matters
    A frozen encoder or reference model that was never loaded on a rank feeds that rank's training with noise. No gradient, no wrapper and
    no loss curve shows it, because nothing ever compares what is not trained.

False positives
    Only tensors that both sides hold whole are compared, by name: shards and stages are not. Plausible weights that differ are reported
    only where the trained model is replicated over all ranks. Averages of weights that have parted follow those, and so do frozen layers
    of a model that was never synchronised: both are left to `replica_divergence`. A single matrix of zeros, as adapters have, is no
    lost component.

What to do
    Load the named component on the named ranks from the same checkpoint as on the others, after `to_empty`, and compare before training.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.axes import first_view
from holter.faults.shared.parting import (
    Difference,
    Parting,
    changed_alone,
    column,
    find_difference,
    find_parting,
    majority_evidence,
    parting_at,
    request,
    tables_at,
    tensor_evidence,
)
from holter.faults.shared.structure import common_module, compare_structures, distinct_censuses
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import named, ranks_text
from holter.faults.window import Window
from holter.records import Census, Evidence, Finding, Mark, Severity, TableRequest
from holter.records.rank import OWN

TRAINED = ("parameters_before", "gradients_reduced", "gradients", "parameters_after")
MATRIX = 2
"""Number of dimensions from which on a weight is neither zero nor constant by design."""
SMALLEST, LARGEST = 1e-6, 1e3
"""Root mean squares between which weights lie."""
MAX_SHOWN = 4
MIN_EMPTY = 2
"""Number of matrices of a trained component that must be zero, as all its frozen ones, for it to be lost; a single one
may be intended."""


@dataclass(frozen=True)
class Doubt:
    """The ranks that cannot be right."""

    ranks: tuple[int, ...] = ()
    word: str = ""
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True)
class FrozenDivergence:
    """Judges frozen parameters across ranks."""

    name: ClassVar[str] = "frozen_divergence"

    patience_s: float = 2.0
    """Seconds to wait for ranks that have not reported the step, because they may make the majority."""
    max_ranks_asked: int = threshold(8, at_least=2)  # A comparison needs two.
    """Number of ranks that are asked for their table of fingerprints."""
    implausible_ratio: float = 100.0
    """A norm this many times its peers' is the implausible side."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: what differs between all ranks or along an axis, or else what is wrong on all of them."""
        if not any(
            known.first_unequal_step is not None
            for name, known in window.tensors.classes.items()
            if name.startswith("frozen")
        ):
            yield from _wrong_everywhere(window) or _wrong_shards(window)
            return
        yield from first_view(window, lambda view: self._judge_view(view.window))

    def _judge_view(self, window: Window) -> Iterator[Finding]:
        first = find_parting(window, "frozen")
        if first is None:
            return
        view = window.step(first.step)
        if view and view.missing and window.now_ns - view.first_seen_ns < self.patience_s * 1e9:
            return
        if compare_structures(window):
            return
        for parting in (first, *_later(window, first, self.max_ranks_asked)):
            needs = tuple(self._requests(window, parting, first))
            if needs:
                yield _asking(parting, needs)
                return
            difference = _whole(window, find_difference(window, parting, is_common_only=True))
            if difference.tensors:
                yield from self._explained(window, parting, difference)
                return

    def _requests(self, window: Window, parting: Parting, first: Parting) -> Iterator[TableRequest]:
        ranks = parting.asked(self.max_ranks_asked)
        before = window.tensors.classes["frozen"].last_equal_step if parting is first else None
        for step in (parting.step, before):
            if step is not None and (asked := request(window, "frozen", step, ranks)):
                yield asked

    def _explained(self, window: Window, parting: Parting, difference: Difference) -> Iterator[Finding]:
        doubt = _doubts(window, parting, difference.tensors, self.implausible_ratio)
        before = _agreed_before(window, parting)
        alone = changed_alone(window, parting, before, difference.tensors) if before is not None else ()
        is_plausible = not doubt.ranks and not difference.rounded_ranks
        is_replica = all(_is_replica(census, window.world_size) for census in distinct_censuses(window))
        if is_plausible and (_follows(window, parting) or not is_replica):
            return
        yield _finding(window, parting, difference, doubt, alone)


def _later(window: Window, first: Parting, max_ranks: int) -> Iterator[Parting]:
    """Yield later comparisons at which ranks differed: those that have tables and, less and less often, the last one.

    One rank may have reached a frozen component before another; then the first difference has no tensors in common to compare.
    """
    unequal = [view for view in window.steps if view.step > first.step and len(view.roots.get("frozen", {})) > 1]
    count = window.tensors.classes["frozen"].num_unequal
    for view in unequal:
        parting = parting_at(view, "frozen")
        is_asked = request(window, "frozen", view.step, parting.asked(max_ranks)) is None
        if is_asked or (view is unequal[-1] and count & (count - 1) == 0 and not view.missing):
            yield parting


def _whole(window: Window, difference: Difference) -> Difference:
    """Leave out tensors that are shards or have another shape on some rank."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for census in distinct_censuses(window):
        for entry in census.entries:
            shapes.setdefault(entry.name, set()).add((-1,) if entry.is_sharded and not entry.axis else entry.shape)
    kept = tuple(
        name for name in difference.tensors if len(shapes.get(name, {()})) == 1 and (-1,) not in shapes.get(name, ())
    )
    return difference if kept == difference.tensors else Difference(kept, difference.num_tensors, is_all=False)


def _agreed_before(window: Window, parting: Parting) -> int | None:
    history = window.tensors.classes["frozen"]
    return history.last_equal_step if history.first_unequal_step == parting.step else None


def _follows(window: Window, parting: Parting) -> bool:
    """Whether trained weights differed no later; then frozen ones are averages of them, or were never synchronised either."""
    onsets = (history.first_unequal_step for name in TRAINED if (history := window.tensors.classes.get(name)))
    return any(onset is not None and onset <= parting.step for onset in onsets)


def _is_replica(census: Census, world_size: int) -> bool:
    trained = [component for component in census.components if component.is_trained]
    return (
        bool(trained)
        and all(component.num_replicas == world_size for component in trained)
        and not any(
            (entry.is_sharded and not entry.placements)
            or (entry.requires_grad and entry.optimizer >= 0 and not entry.is_replicated and not entry.placements)
            for entry in census.entries
        )
    )


def _asking(parting: Parting, needs: tuple[TableRequest, ...]) -> Finding:
    return Finding(
        detector=FrozenDivergence.name,
        severity="warning",
        first_step=parting.step,
        detected_step=parting.step,
        ranks=parting.ranks,
        summary=f"Frozen parameters differ between ranks at step {parting.step}.",
        needs=needs,
    )


def _finding(window: Window, parting: Parting, difference: Difference, doubt: Doubt, alone: tuple[int, ...]) -> Finding:
    ranks = doubt.ranks or difference.rounded_ranks or alone or parting.minority or parting.ranks
    dtypes = _dtypes(window, difference.tensors)
    tensors = tuple(dtypes) or difference.tensors
    severity: Severity = "critical" if doubt.ranks else "warning"
    before = _agreed_before(window, parting)
    who = "" if set(ranks) == set(parting.ranks) else f"; {ranks_text(ranks)} {doubt.word or 'parted from the rest'}"
    return Finding(
        detector=FrozenDivergence.name,
        severity=severity,
        first_step=parting.step,
        detected_step=parting.step,
        ranks=ranks,
        tensors=tensors,
        modules=common_module(tensors),
        summary=f"Frozen parameters differ between {ranks_text(parting.ranks)} since step {parting.step}, in {len(tensors)} of "
        f"{difference.num_tensors} tensors{who}.",
        facts={
            "first_class": "frozen",
            "compared_ranks": list(parting.ranks),
            "is_implausible": bool(doubt.ranks),
            "is_implausible_on_all": False,
            "is_one_side_rounded": bool(difference.rounded_ranks),
            "are_dtypes_different": bool(dtypes),
            "did_agree_before": before is not None,
            "own_history_broke_on_some": bool(alone) if before is not None else None,
            "has_majority": bool(parting.minority),
        },
        evidence=(
            *tensor_evidence(parting, difference),
            *doubt.evidence,
            *_past(before, alone),
            *_rounded(difference),
            *dtypes.values(),
            majority_evidence(parting),
        ),
        agreed_steps=_agreed_steps(window, parting, difference.tensors),
    )


def _agreed_steps(window: Window, parting: Parting, tensors: tuple[str, ...]) -> int:
    """Return the last step at which all these tensors were equal, -1 if unknown.

    Large tensors are read in slices, so that each comparison has others.
    """
    before = _agreed_before(window, parting)
    if before is None:
        return -1
    then = [column(table, table.fingerprints) for table in tables_at(window, "frozen", before, parting.ranks).values()]
    return before if len(then) > 1 and all(set(tensors) <= set(read) for read in then) else -1


def _past(before: int | None, alone: tuple[int, ...]) -> Iterator[Evidence]:
    if before is None:
        yield Evidence(
            kind="history", summary="they differed when they were first compared: no rank's own past tells who is right"
        )
    elif alone:
        summary = (
            f"all ranks agreed at step {before}; since then they changed on {ranks_text(alone)} and not on the others"
        )
        yield Evidence(kind="history", summary=summary, values={"ranks": list(alone), "since": before})


def _dtypes(window: Window, tensors: tuple[str, ...]) -> dict[str, Evidence]:
    """Return evidence for the tensors that are held in different dtypes, by name."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank, census in sorted(window.models.census.items()):
        for entry in census.entries:
            if entry.name in tensors:
                found.setdefault(entry.name, {}).setdefault(entry.dtype, []).append(rank)
    return {
        name: Evidence(
            kind="census",
            summary=f"{name} is {' and '.join(f'{dtype} on {ranks_text(ranks)}' for dtype, ranks in held.items())}",
            values={"name": name},
        )
        for name, held in found.items()
        if len(held) > 1
    }


def _rounded(difference: Difference) -> Iterator[Evidence]:
    if difference.rounded_ranks:
        summary = f"the low mantissa bits are all zero on {ranks_text(difference.rounded_ranks)} and not on the others"
        yield Evidence(kind="precision", summary=summary, values={"ranks": list(difference.rounded_ranks)})


def _wrong_shards(window: Window) -> list[Finding]:
    """Find frozen parameters whose shards cannot be weights on some ranks but can on others.

    Shards of zeros count only in several matrices.
    """
    shards = {id(census): _frozen_shards(census) for census in distinct_censuses(window, None)}
    if not any(shards.values()):
        return []
    odd: dict[str, dict[int, int]] = {}
    for rank, census in sorted(window.models.census.items()):
        for name, mark in shards[id(census)]:
            odd.setdefault(name, {})[rank] = mark
    ranks: Counter[int] = Counter()
    shown: dict[str, Evidence] = {}
    for name, marks in odd.items():
        for wrong in (Mark.NONFINITE | Mark.HUGE, Mark.ZERO):
            guilty = [rank for rank, mark in marks.items() if mark & wrong]
            if guilty and len(guilty) < len(marks) == len(window.attached):
                ranks.update(dict.fromkeys(guilty, 1 if wrong == Mark.ZERO else MIN_EMPTY))
                text = (
                    f"{name}: the shard of {ranks_text(guilty)} is {_describe(marks[guilty[0]])}, the others' are not"
                )
                shown[name] = Evidence(kind="implausible", summary=text, values={"name": name, "axis": OWN})
                break
    guilty = [rank for rank, votes in ranks.items() if votes >= MIN_EMPTY]
    if not guilty or compare_structures(window):
        return []
    return [_implausible(window, tuple(shown), tuple(sorted(guilty)), tuple(shown.values()), is_on_all=False)]


def _frozen_shards(census: Census) -> list[tuple[str, int]]:
    """Return names and marks of the frozen matrices of which each rank has its own."""
    return [
        (entry.name, entry.marks)
        for entry in census.entries
        if entry.axis == OWN and not entry.requires_grad and not entry.is_buffer and len(entry.shape) >= MATRIX
    ]


def _wrong_everywhere(window: Window) -> list[Finding]:
    """Find frozen components that no rank has ever loaded."""
    if not window.attached or any(rank not in window.models.census for rank in window.attached):
        return []
    found = [_empty_components(census) for census in distinct_censuses(window)]
    shared = [name for name in found[0] if all(name in other for other in found)] if found else []
    if not shared:
        return []
    evidence = tuple(
        Evidence(kind="implausible", summary=f"{name} is {found[0][name]} on every rank", values={"name": name})
        for name in shared[:5]
    )
    return [_implausible(window, tuple(shared), tuple(sorted(window.attached)), evidence, is_on_all=True)]


def _implausible(
    window: Window, tensors: tuple[str, ...], ranks: tuple[int, ...], evidence: tuple[Evidence, ...], *, is_on_all: bool
) -> Finding:
    where = "on any rank" if is_on_all else f"in the shards of {ranks_text(ranks)}"
    return Finding(
        detector=FrozenDivergence.name,
        severity="critical",
        first_step=0,
        detected_step=max((view.step for view in window.steps), default=0),
        ranks=ranks,
        tensors=tensors,
        modules=common_module(tensors),
        summary=f"{len(tensors)} frozen parameters hold no weights {where}: {named(tensors)}.",
        facts={
            "is_implausible": True,
            "is_implausible_on_all": is_on_all,
            "is_one_side_rounded": False,
            "compared_ranks": sorted(window.attached),
        },
        evidence=evidence[:5],
    )


def _doubts(window: Window, parting: Parting, names: Iterable[str], ratio: float) -> Doubt:
    """Find the ranks with implausible values in tensors that differ, unless all ranks have them.

    Matrices count more than vectors.
    """
    tables = tables_at(window, parting.tensor_class, parting.step, parting.ranks)
    marks = {rank: column(table, table.marks) for rank, table in tables.items()}
    norms = {rank: column(table, table.norms) for rank, table in tables.items()}
    shapes = _shapes(window)
    votes: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    shown: list[Evidence] = []
    for name in names:
        shape = shapes.get(name, (1, 1))
        of_marks = {rank: int(of[name]) for rank, of in marks.items() if name in of}
        of_norms = {rank: of[name] for rank, of in norms.items() if name in of}
        odd = _odd(of_marks, of_norms, math.prod(shape), ratio)
        votes[len(shape) >= MATRIX].update(odd)
        if odd:
            summary = f"{name}: {_side_by_side(of_marks, of_norms)}"
            shown.append(Evidence(kind="implausible", summary=summary, values={"name": name}))
    tally = votes[True] or votes[False]
    worst = max(tally.values(), default=0)
    ranks = parting.group_of(rank for rank, count in tally.items() if count == worst)
    if not ranks or set(ranks) == set(parting.ranks):
        return Doubt()
    return Doubt(ranks, "cannot be right", tuple(shown[:MAX_SHOWN]))


def _odd(marks: Mapping[int, int], norms: Mapping[int, float], numel: int, ratio: float) -> set[int]:
    """Return the ranks with odd values; never all of them, because what all have is by design."""
    for wrong in (Mark.NONFINITE, Mark.HUGE, Mark.ZERO, Mark.CONSTANT):
        odd = {rank for rank, mark in marks.items() if mark & wrong}
        if odd and len(odd) < len(marks):
            return odd
    odd = {rank for rank, norm in norms.items() if not math.isfinite(norm)}
    if odd and len(odd) < len(norms):
        return odd
    size = math.sqrt(max(1, numel))
    odd = {rank for rank, norm in norms.items() if not SMALLEST <= norm / size <= LARGEST}
    if odd and len(odd) < len(norms):
        return odd
    least = min(norms.values(), default=0.0)
    return {rank for rank, norm in norms.items() if least > 0 and norm > ratio * least}


def _side_by_side(marks: Mapping[int, int], norms: Mapping[int, float]) -> str:
    parts = []
    for rank in sorted(set(marks) | set(norms)):
        words = _describe(marks.get(rank, 0))
        norm = f"norm {norms[rank]:.4g}" if rank in norms else ""
        parts.append(f"{', '.join(filter(None, (words, norm)))} on {ranks_text([rank])}")
    return "; ".join(parts)


def _describe(marks: int) -> str:
    """Describe what is odd."""
    if marks & Mark.NONFINITE:
        return "not finite"
    if marks & Mark.ZERO:
        return "all zero"
    if marks & Mark.CONSTANT:
        return "constant"
    return "huge or subnormal" if marks & Mark.HUGE else ""


def _empty_components(census: Census) -> dict[str, str]:
    """Return frozen parameters that hold no weights, with what they hold.

    These are any that are not finite, and components of zeros only.
    """
    frozen = [
        entry for entry in census.entries if not entry.requires_grad and not entry.is_buffer and not entry.is_sharded
    ]
    found = {entry.name: _describe(entry.marks) for entry in frozen if entry.marks & Mark.NONFINITE}
    matrices: dict[int, list[bool]] = {}
    for entry in frozen:
        if len(entry.shape) >= MATRIX:
            matrices.setdefault(entry.component, []).append(bool(entry.marks & Mark.ZERO))
    trained = {entry.component for entry in census.entries if entry.requires_grad}
    for entry in frozen:
        zeros = matrices.get(entry.component, [])
        is_empty = bool(zeros) and all(zeros) and (entry.component not in trained or len(zeros) >= MIN_EMPTY)
        if is_empty and entry.marks & Mark.ZERO:
            found.setdefault(entry.name, _describe(entry.marks))
    return found


def _shapes(window: Window) -> dict[str, tuple[int, ...]]:
    census = next(iter(window.models.census.values()), None)
    return {entry.name: entry.shape for entry in census.entries} if census else {}
