"""When replicas parted, and in which tensors: roots compared first, tables of fingerprints where roots differ."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holter.detectors.window import Window

Groups = tuple[tuple[int, ...], ...]
"""Ranks with equal roots, the largest group first."""


@dataclass(frozen=True)
class Parting:
    """The first step at which ranks differed in one class of tensors."""

    tensor_class: str
    step: int
    groups: Groups

    @property
    def ranks(self) -> tuple[int, ...]:
        """Everyone who was compared."""
        return tuple(sorted(rank for group in self.groups for rank in group))

    @property
    def minority(self) -> tuple[int, ...]:
        """Everyone outside the group that holds more than half of the ranks; empty if there is none such."""
        largest, *others = self.groups
        return tuple(sorted(rank for group in others for rank in group)) if 2 * len(largest) > len(self.ranks) else ()


@dataclass(frozen=True)
class Difference:
    """Which tensors of a class differ, from the tables that could be had."""

    tensors: tuple[str, ...] = ()
    num_tensors: int = 0
    is_all: bool | None = None
    """None: no tables. A tensor that is zero on every rank cannot differ and does not count."""
    odd_ranks: tuple[int, ...] = ()
    """Ranks with an implausible norm in a tensor that differs."""
    odd_text: str = ""
    has_norms: bool = False


def find_parting(window: Window, tensor_class: str) -> Parting | None:
    """The first step at which ranks differed in this class; None if they never did, or the step is forgotten."""
    history = window.classes.get(tensor_class)
    if history is None or history.first_unequal_step is None:
        return None
    step = history.first_unequal_step
    view = window.step(step)
    by_root = view.roots.get(tensor_class, {}) if view else {}
    if len(by_root) < 2:  # noqa: PLR2004 - one root is agreement
        return None
    groups = sorted((tuple(sorted(ranks)) for ranks in by_root.values()), key=lambda group: (-len(group), group))
    return Parting(tensor_class, step, tuple(groups))


def find_difference(
    window: Window, parting: Parting | None, *, nearly_all: float, implausible_ratio: float
) -> Difference:
    """Which tensors differ at a parting, as far as tables of both sides are there."""
    if parting is None:
        return Difference()
    keys = {rank: (parting.tensor_class, parting.step, rank) for rank in parting.ranks}
    tables = {rank: window.tables[key] for rank, key in keys.items() if key in window.tables}
    if len({table.root for table in tables.values()}) < 2:  # noqa: PLR2004 - tables of one side show no difference
        return Difference()
    prints = {rank: dict(zip(table.names, table.fingerprints, strict=True)) for rank, table in tables.items()}
    norms = {rank: dict(zip(table.names, table.norms, strict=True)) for rank, table in tables.items() if table.norms}
    names = tuple(dict.fromkeys(name for table in tables.values() for name in table.names))
    differing = tuple(name for name in names if len({of_rank.get(name) for of_rank in prints.values()}) > 1)
    idle = {
        name
        for name in names
        if len(norms) == len(tables) and all(of_rank.get(name) == 0 for of_rank in norms.values())
    }
    odd_ranks, odd_text = _implausible(differing, norms, parting.groups, implausible_ratio)
    return Difference(
        tensors=differing,
        num_tensors=len(names),
        is_all=len(differing) >= nearly_all * len(set(names) - (idle - set(differing))),
        odd_ranks=odd_ranks,
        odd_text=odd_text,
        has_norms=bool(norms),
    )


def _implausible(
    names: Iterable[str], norms: Mapping[int, Mapping[str, float]], groups: Groups, ratio: float
) -> tuple[tuple[int, ...], str]:
    """Ranks whose norm is NaN, Inf or far above their peers'. A far smaller one is no proof: it may be the sound side."""
    for name in names:
        of_rank = {rank: values[name] for rank, values in norms.items() if name in values}
        finite = {rank: norm for rank, norm in of_rank.items() if math.isfinite(norm)}
        odd = set(of_rank) - set(finite)
        if not odd and finite and min(finite.values()) > 0:
            odd = {rank for rank, norm in finite.items() if norm > ratio * min(finite.values())}
        if odd and odd != set(of_rank):
            shown = ", ".join(f"{norm:.4g} on rank {rank}" for rank, norm in sorted(of_rank.items()))
            return tuple(
                sorted(rank for group in groups if odd & set(group) for rank in group)
            ), f"norm of {name}: {shown}"
    return (), ""
