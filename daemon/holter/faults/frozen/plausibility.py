"""Whether values can be weights that somebody trained or loaded, and whose cannot."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holter.faults.shared.parting import Parting, column, tables_at
from holter.faults.shared.wording import ranks_text
from holter.faults.window import Window
from holter.records import Census, Evidence, Mark

MATRIX = 2
"""Dimensions from which on a weight is neither zero nor constant by design."""
SMALLEST, LARGEST = 1e-6, 1e3
"""Root mean squares between which weights lie."""
MAX_SHOWN = 4
MIN_EMPTY = 2
"""So many matrices of a trained model must be zero, and all that are frozen, to be a lost component; one may be meant so."""


@dataclass(frozen=True)
class Doubt:
    """The side that cannot be right."""

    ranks: tuple[int, ...] = ()
    word: str = ""
    evidence: tuple[Evidence, ...] = ()


def doubts(window: Window, parting: Parting, names: Iterable[str], ratio: float) -> Doubt:
    """Who holds implausible values in tensors that differ, if not everyone does; matrices tell more than vectors."""
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
        shown += (
            [
                Evidence(
                    kind="implausible", summary=f"{name}: {_side_by_side(of_marks, of_norms)}", values={"name": name}
                )
            ]
            if odd
            else []
        )
    tally = votes[True] or votes[False]
    worst = max(tally.values(), default=0)
    ranks = parting.group_of(rank for rank, count in tally.items() if count == worst)
    if not ranks or set(ranks) == set(parting.ranks):
        return Doubt()
    return Doubt(ranks, "cannot be right", tuple(shown[:MAX_SHOWN]))


def _odd(marks: Mapping[int, int], norms: Mapping[int, float], numel: int, ratio: float) -> set[int]:
    """Some of the ranks, never all: what all have alike is by design."""
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
        words = describe(marks.get(rank, 0))
        norm = f"norm {norms[rank]:.4g}" if rank in norms else ""
        parts.append(f"{', '.join(filter(None, (words, norm)))} on {ranks_text([rank])}")
    return "; ".join(parts)


def describe(marks: int) -> str:
    """What is odd, in words."""
    if marks & Mark.NONFINITE:
        return "not finite"
    if marks & Mark.ZERO:
        return "all zero"
    if marks & Mark.CONSTANT:
        return "constant"
    return "huge or subnormal" if marks & Mark.HUGE else ""


def empty_components(census: Census) -> dict[str, str]:
    """Frozen parameters that hold no weights, with what they hold: any that are not finite, and components of zeros alone."""
    frozen = [
        entry for entry in census.entries if not entry.requires_grad and not entry.is_buffer and not entry.is_sharded
    ]
    found = {entry.name: describe(entry.marks) for entry in frozen if entry.marks & Mark.NONFINITE}
    matrices: dict[int, list[bool]] = {}
    for entry in frozen:
        if len(entry.shape) >= MATRIX:
            matrices.setdefault(entry.component, []).append(bool(entry.marks & Mark.ZERO))
    trained = {entry.component for entry in census.entries if entry.requires_grad}
    for entry in frozen:
        zeros = matrices.get(entry.component, [])
        is_empty = bool(zeros) and all(zeros) and (entry.component not in trained or len(zeros) >= MIN_EMPTY)
        if is_empty and entry.marks & Mark.ZERO:
            found.setdefault(entry.name, describe(entry.marks))
    return found


def common_module(tensors: tuple[str, ...]) -> tuple[str, ...]:
    """The module that holds all of them, if there is one, then each one's own."""
    own = tuple(dict.fromkeys(module for name in tensors if (module := name.rpartition(".")[0])))
    if not own:
        return ()
    shared = own[0].split(".")
    for module in own[1:]:
        words = module.split(".")
        same = [a == b for a, b in zip(shared, words, strict=False)]
        shared = shared[: same.index(False)] if False in same else shared[: len(same)]
    return tuple(dict.fromkeys((".".join(shared), *own))) if shared else own


def _shapes(window: Window) -> dict[str, tuple[int, ...]]:
    census = next(iter(window.models.census.values()), None)
    return {entry.name: entry.shape for entry in census.entries} if census else {}
