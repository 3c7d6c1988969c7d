"""When replicas first differed, in which tensors, and the evidence: roots are compared first, then tables of fingerprints where roots differ."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from holter.faults.shared.wording import named, ranks_text
from holter.faults.window import ClassHistory, StepView, Window
from holter.records import Evidence, Mark, Table, TableRequest

RankGroups = tuple[tuple[int, ...], ...]
"""Groups of ranks with equal roots, the largest group first."""
MATRIX = 2
"""Number of dimensions from which on two tensors are not equal by chance."""
MIN_ROUNDED = 16
"""Number of elements from which on a rank marks a tensor as rounded."""
RANKS_PER_GROUP = 2
"""Number of ranks with equal roots whose tables are asked for."""
WORDS = {
    "parameters_before": "parameters before the optimizer's step",
    "gradients_reduced": "reduced gradients",
    "gradients": "gradients as the optimizer is given them",
    "hyperparameters": "the optimizers' settings",
    "parameters_after": "parameters after the optimizer's step",
    "optimizer_state": "the optimizers' state",
}
"""Class of tensors -> words for it, in the order in which a step reads them."""
ALWAYS_TOLD = ("parameters_before", "gradients", "parameters_after")
"""Classes that are worth a line of evidence even if they were never compared."""


@dataclass(frozen=True)
class Parting:
    """The first step at which ranks differed in one class of tensors."""

    tensor_class: str
    step: int
    groups: RankGroups

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that was compared."""
        return tuple(sorted(rank for group in self.groups for rank in group))

    @property
    def minority(self) -> tuple[int, ...]:
        """Ranks outside the group that holds more than half of them; empty if there is no such group."""
        largest, *others = self.groups
        return tuple(sorted(rank for group in others for rank in group)) if 2 * len(largest) > len(self.ranks) else ()

    def group_of(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return those ranks and all that agree with one of them."""
        chosen = set(ranks)
        return tuple(sorted(rank for group in self.groups if chosen & set(group) for rank in group))

    def asked(self, max_ranks: int, per_group: int = RANKS_PER_GROUP) -> list[int]:
        """Return the ranks whose tables will show the difference: some of each group, in turn."""
        rounds = (group[turn] for turn in range(per_group) for group in self.groups if turn < len(group))
        return [rank for rank, _ in zip(rounds, range(max_ranks), strict=False)]


@dataclass(frozen=True)
class Difference:
    """Which tensors of a class differ, from the tables that could be had."""

    tensors: tuple[str, ...] = ()
    num_tensors: int = 0
    is_all: bool | None = None
    """Whether all tensors differ; None if there are no tables. A tensor that is zero on every rank cannot differ and is
    not counted."""
    odd_ranks: tuple[int, ...] = ()
    """Ranks with an implausible norm in a tensor that differs."""
    odd_text: str = ""
    has_norms: bool = False
    distance: float | None = None
    """Largest relative distance of a tensor between ranks, estimated from sums and norms; None if those were not taken."""
    rounded_ranks: tuple[int, ...] = ()
    """Ranks whose differing tensors have no low mantissa bits, while those of the others do."""


def find_parting(window: Window, tensor_class: str) -> Parting | None:
    """Return the first step at which ranks differed in this class; None if they never did, or the step is not remembered."""
    history = window.tensors.classes.get(tensor_class)
    if history is None or history.first_unequal_step is None:
        return None
    step = history.first_unequal_step
    view = window.step(step)
    if view is None or len(view.roots.get(tensor_class, {})) < 2:  # noqa: PLR2004 - one root is agreement
        return None
    return parting_at(view, tensor_class)


def agreed_since(window: Window, tensor_class: str, step: int) -> bool | None:
    """Whether a later comparison found all ranks equal; None if there was no later one."""
    later = [
        view.roots[tensor_class]
        for view in window.steps
        if view.step > step and tensor_class in view.roots and not view.missing
    ]
    # A rank that checks at other steps than the rest is compared with no other.
    compared = [by_root for by_root in later if sum(map(len, by_root.values())) > 1]
    return any(len(by_root) == 1 for by_root in compared) if compared else None


def parting_at(view: StepView, tensor_class: str) -> Parting:
    """Return how ranks differ at one step in this class."""
    by_root = view.roots[tensor_class].values()
    groups = sorted((tuple(sorted(ranks)) for ranks in by_root), key=lambda group: (-len(group), group))
    return Parting(tensor_class, view.step, tuple(groups))


def request(window: Window, tensor_class: str, step: int, ranks: Iterable[int]) -> TableRequest | None:
    """Return the request for those of these ranks' tables that are neither there nor unavailable.

    None if no such table is left.
    """
    keys = {rank: (tensor_class, step, rank) for rank in ranks}
    wanted = sorted(
        rank for rank, key in keys.items() if key not in window.tensors.tables and key not in window.tensors.unavailable
    )
    return TableRequest(tensor_class, step, tuple(wanted)) if wanted else None


def tables_at(window: Window, tensor_class: str, step: int, ranks: Iterable[int]) -> dict[int, Table]:
    """Return those of these ranks' tables that are there."""
    keys = {rank: (tensor_class, step, rank) for rank in ranks}
    return {rank: window.tensors.tables[key] for rank, key in keys.items() if key in window.tensors.tables}


def column(table: Table, values: list[float] | list[int]) -> dict[str, float]:
    """Return one column of a table by tensor name, without tensors that were not read; empty if the column was not taken."""
    if len(values) != len(table.names):
        return {}
    rows = zip(table.names, table.fingerprints, values, strict=True)
    return {name: value for name, fingerprint, value in rows if fingerprint}


def changed_alone(window: Window, parting: Parting, before_step: int, tensors: Iterable[str]) -> tuple[int, ...]:
    """Return the ranks whose values of these tensors have changed since an earlier step, if those of others have not."""
    now = tables_at(window, parting.tensor_class, parting.step, parting.ranks)
    then = tables_at(window, parting.tensor_class, before_step, parting.ranks)
    names, moved, looked = set(tensors), set(), set()
    for rank in set(now) & set(then):
        new, old = column(now[rank], now[rank].fingerprints), column(then[rank], then[rank].fingerprints)
        common = names & set(new) & set(old)
        if common:
            looked.add(rank)
        if any(new[name] != old[name] for name in common):
            moved.add(rank)
    return parting.group_of(moved) if moved and moved != looked else ()


def find_difference(
    window: Window,
    parting: Parting | None,
    *,
    nearly_all: float = 0.9,
    implausible_ratio: float = 100.0,
    is_common_only: bool = False,
) -> Difference:
    """Find which tensors differ at a parting, as far as tables of both sides are there.

    A tensor that only one side has differs too, unless `is_common_only`.
    """
    if parting is None:
        return Difference()
    tables = tables_at(window, parting.tensor_class, parting.step, parting.ranks)
    if len({table.root for table in tables.values()}) < 2:  # noqa: PLR2004 - tables of one side show no difference
        return Difference()
    prints = {rank: column(table, table.fingerprints) for rank, table in tables.items()}
    norms = {rank: column(table, table.norms) for rank, table in tables.items() if table.norms}
    names = tuple(
        name
        for name in dict.fromkeys(name for table in tables.values() for name in table.names)
        if (all if is_common_only else any)(name in of_rank for of_rank in prints.values())
    )
    differing = tuple(name for name in names if len({of_rank.get(name) for of_rank in prints.values()}) > 1)
    odd_ranks, odd_text = _implausible(differing, norms, parting, implausible_ratio)
    return Difference(
        tensors=differing,
        num_tensors=len(names),
        is_all=_is_all(window, names, differing, norms if len(norms) == len(tables) else {}, nearly_all),
        odd_ranks=odd_ranks,
        odd_text=odd_text,
        has_norms=bool(norms),
        distance=_distance(differing, tables),
        rounded_ranks=_rounded(_large_enough(window, differing), tables, parting, nearly_all),
    )


def _is_all(
    window: Window,
    names: tuple[str, ...],
    differing: tuple[str, ...],
    norms: Mapping[int, Mapping[str, float]],
    nearly_all: float,
) -> bool:
    idle = {name for name in names if norms and all(of_rank.get(name) == 0 for of_rank in norms.values())}
    agreeing = set(names) - set(differing) - idle
    if len(differing) < nearly_all * (len(differing) + len(agreeing)):
        return False
    census = next(iter(window.models.census.values()), None)
    return not (agreeing and census and any(e.name in agreeing and len(e.shape) >= MATRIX for e in census.entries))


def _implausible(
    names: Iterable[str], norms: Mapping[int, Mapping[str, float]], parting: Parting, ratio: float
) -> tuple[tuple[int, ...], str]:
    """Return the ranks whose norm is NaN, Inf or far above their peers'.

    A far smaller one is no proof: that may be the sound side.
    """
    for name in names:
        of_rank = {rank: values[name] for rank, values in norms.items() if name in values}
        finite = {rank: norm for rank, norm in of_rank.items() if math.isfinite(norm)}
        odd = set(of_rank) - set(finite)
        if not odd and finite and min(finite.values()) > 0:
            odd = {rank for rank, norm in finite.items() if norm > ratio * min(finite.values())}
        if odd and odd != set(of_rank):
            shown = ", ".join(f"{norm:.4g} on rank {rank}" for rank, norm in sorted(of_rank.items()))
            return parting.group_of(odd), f"norm of {name}: {shown}"
    return (), ""


def _distance(names: Iterable[str], tables: Mapping[int, Table]) -> float | None:
    """Estimate the largest relative distance of these tensors; None if a norm or sum is missing.

    A difference with random signs has a sum about as large as its norm; one that scales a tensor shows in the norm.
    """
    norms = [column(table, table.norms) for table in tables.values()]
    sums = [column(table, table.sums) for table in tables.values()]
    found = []
    for name in names:
        of_norms = [of_rank.get(name, math.nan) for of_rank in norms]
        of_sums = [of_rank.get(name, math.nan) for of_rank in sums]
        if not all(map(math.isfinite, (*of_norms, *of_sums))) or max(of_norms) <= 0:
            return None
        found.append(max(max(of_norms) - min(of_norms), max(of_sums) - min(of_sums)) / max(of_norms))
    return max(found, default=None)


def _large_enough(window: Window, names: Iterable[str]) -> Iterator[str]:
    """Leave out tensors with so few elements that ranks do not mark them as rounded: they may be so by chance."""
    census = next(iter(window.models.census.values()), None)
    small = {e.name for e in census.entries if math.prod(e.shape) < MIN_ROUNDED} if census else set[str]()
    return (name for name in names if name not in small)


def _rounded(names: Iterable[str], tables: Mapping[int, Table], parting: Parting, nearly_all: float) -> tuple[int, ...]:
    """Return the ranks on whose side nearly every differing tensor has been rounded, if on another side almost none was."""
    marks = {rank: column(table, table.marks) for rank, table in tables.items()}
    flat = Mark.CONSTANT | Mark.ZERO
    telling = [
        name for name in names if all(name in of and not int(of[name]) & flat for of in marks.values())
    ]  # fmt: skip
    if not telling:
        return ()
    share = {
        rank: sum(bool(int(of[name]) & Mark.ROUNDED) for name in telling) / len(telling) for rank, of in marks.items()
    }
    rounded = [rank for rank, part in share.items() if part >= nearly_all]
    return parting.group_of(rounded) if min(share.values()) <= 1 - nearly_all else ()


def history_evidence(classes: Mapping[str, ClassHistory]) -> Iterator[Evidence]:
    """Yield one line per class: since when its comparisons differ, and how many."""
    for name, words in WORDS.items():
        history = classes.get(name)
        if history is None:
            if name in ALWAYS_TOLD:
                yield Evidence(
                    kind="missing", summary=f"{words} were never compared between ranks", values={"class": name}
                )
            continue
        yield Evidence(
            kind="fingerprint",
            summary=f"{words} {_when(history)}",
            values={
                "class": name,
                "last_equal_step": history.last_equal_step,
                "first_unequal_step": history.first_unequal_step,
                "num_equal": history.num_equal,
                "num_unequal": history.num_unequal,
            },
        )


def _when(history: ClassHistory) -> str:
    compared = history.num_equal + history.num_unequal
    if history.first_unequal_step is None:
        return f"agreed at all {compared} steps compared, {history.first_step} to {history.last_equal_step}"
    if history.last_equal_step is None:
        return (
            f"differed at the first comparison, step {history.first_unequal_step}, and at {history.num_unequal} of "
            f"{compared} compared steps in all"
        )
    return (
        f"agreed from step {history.first_step} to step {history.last_equal_step}, first differed at step "
        f"{history.first_unequal_step}, and at {history.num_unequal} of {compared} compared steps in all"
    )


def tensor_evidence(parting: Parting | None, difference: Difference) -> Iterator[Evidence]:
    """Yield which tensors of a class differ, and how far apart they are."""
    if parting is None:
        return
    what = f"{WORDS.get(parting.tensor_class, parting.tensor_class)}, step {parting.step}"
    values = {"class": parting.tensor_class, "step": parting.step, "groups": [list(group) for group in parting.groups]}
    if not difference.num_tensors:
        summary = f"{what}: the ranks' tables could not be had, so the tensors that differ are not known"
        yield Evidence(kind="missing", summary=summary, values=values)
        return
    summary = (
        f"{what}: {len(difference.tensors)} of {difference.num_tensors} tensors differ ({named(difference.tensors)})"
    )
    if difference.distance is not None:
        summary += f", by about {difference.distance:.2g} of their norm at most"
        values["distance"] = difference.distance
    counts = {"num_differing": len(difference.tensors), "num_tensors": difference.num_tensors}
    yield Evidence(kind="fingerprint", summary=summary, values=values | counts)


def majority_evidence(first: Parting) -> Evidence:
    """Return whether more than half of the ranks agree."""
    if not first.minority:
        return Evidence(
            kind="majority",
            summary=f"there is no majority among {ranks_text(first.ranks)}",
            values={"groups": [list(group) for group in first.groups]},
        )
    return Evidence(
        kind="majority",
        summary=f"{len(first.groups[0])} of {len(first.ranks)} ranks agree; {ranks_text(first.minority)} differ from them",
        values={"minority": list(first.minority), "num_ranks": len(first.ranks)},
    )
