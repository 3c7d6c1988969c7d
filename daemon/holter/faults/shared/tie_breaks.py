"""Who left, where a majority does not tell: a rank's own past, and what it did to its gradients."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holter.faults.shared.parting import Parting, column, tables_at
from holter.faults.shared.wording import ranks_text
from holter.faults.window import Window
from holter.records import Evidence, Table

SAME = 1e-3
"""Two factors this close, relatively, are the same: norms travel as float32."""
FAR = 20.0
"""So many times the way that a peer's tensor went is no training."""
KEPT = 3
"""Steps at which weights were seen to stay between steps, before one at which they did not says something."""
ROUND = 1e-5
"""A factor this close to a multiple of a twentieth was written by hand; no clip arrives at one."""


@dataclass(frozen=True)
class HistoryBreak:
    """Whose weights changed between two steps, with no optimizer step between."""

    step: int | None = None
    ranks: tuple[int, ...] = ()
    """Some, not all."""
    unseen: tuple[int, ...] = ()
    """Of whom that step was not read: that theirs did not is inferred from all the steps before, at which nobody's did."""
    is_on_all: bool | None = None
    """None: nobody looked, or not at enough ranks."""


def history_break(window: Window, weights: Parting | None) -> HistoryBreak:
    """Between the last comparison at which the weights agreed and the first at which they did not.

    A busy rank leaves readings out, so that a break may be seen on one rank where the others were not looked at. A script that changes weights
    between steps does so again and again, on every rank.
    """
    if weights is None:
        return HistoryBreak()
    before = window.tensors.classes.get("parameters_before")
    since = -1 if before is None or before.last_equal_step is None else before.last_equal_step
    looked = [
        view for view in window.steps if since < view.step <= weights.step and (view.broke_history or view.kept_history)
    ]
    for view in looked:
        if view.broke_history and view.kept_history:
            return HistoryBreak(view.step, tuple(sorted(view.broke_history)), is_on_all=False)
    broken = [view for view in looked if view.broke_history]
    broke = {rank for view in broken for rank in view.broke_history}
    if not broke or broke.issuperset(weights.ranks):
        return HistoryBreak(is_on_all=bool(broke) if looked else None)
    earlier = [view for view in window.steps if view.step <= since]
    num_kept = sum(bool(view.kept_history) for view in earlier)
    if len(broken) > 1 or num_kept < KEPT or any(view.broke_history for view in earlier):
        return HistoryBreak()
    unseen = tuple(rank for rank in weights.ranks if rank not in broke)
    return HistoryBreak(broken[0].step, tuple(sorted(broke)), unseen, is_on_all=False)


@dataclass(frozen=True)
class Factors:
    """What one rank multiplied its reduced gradients with before the optimizer got them."""

    inside: tuple[float, float]
    """Smallest and largest, of the tensors that differ between ranks."""
    outside: tuple[float, float] | None
    """Of those that agree; None: there are none."""

    @property
    def is_uneven(self) -> bool:
        """Whether it treats the two kinds differently, and each alike within itself: a clip by value spreads by its nature."""
        if self.outside is None or not _is_same(*self.inside):
            return False
        return not (_is_same(self.inside[0], self.outside[0]) and _is_same(self.inside[1], self.outside[1]))

    @property
    def is_untouched(self) -> bool:
        """Whether it left those that differ as the reduction made them."""
        return _is_same(self.inside[0], 1.0) and _is_same(self.inside[1], 1.0)

    @property
    def is_odd(self) -> bool:
        """Whether no clip can have made this factor: it enlarges, or is a round number."""
        low, high = self.inside
        return high > 1 + SAME or (not self.is_untouched and abs(low * 20 - round(low * 20)) < 20 * ROUND)


def factors(window: Window, parting: Parting, tensors: Iterable[str]) -> dict[int, Factors]:
    """By rank, where its gradients' norms are known from before and after."""
    reduced = tables_at(window, "gradients_reduced", parting.step, parting.ranks)
    given = tables_at(window, parting.tensor_class, parting.step, parting.ranks)
    differing, found = set(tensors), {}
    for rank in sorted(set(reduced) & set(given)):
        before, after = column(reduced[rank], reduced[rank].norms), column(given[rank], given[rank].norms)
        ratios = {
            name: after[name] / norm
            for name, norm in before.items()
            if name in after and 0 < norm < math.inf and math.isfinite(after[name])
        }
        inside = [ratio for name, ratio in ratios.items() if name in differing]
        outside = [ratio for name, ratio in ratios.items() if name not in differing]
        if inside:
            found[rank] = Factors((min(inside), max(inside)), (min(outside), max(outside)) if outside else None)
    return found


def uneven_clippers(parting: Parting, of_rank: Mapping[int, Factors]) -> tuple[int, ...]:
    """Who treats some tensors otherwise than the rest; else the minority; else who left out what its peers do."""
    uneven = [rank for rank, own in of_rank.items() if own.is_uneven]
    if uneven and len(uneven) < len(of_rank):
        return parting.group_of(uneven)
    if parting.minority:
        return parting.minority
    odd = [rank for rank, own in of_rank.items() if own.is_odd]
    untouched = [rank for rank, own in of_rank.items() if own.is_untouched]
    for suspects in (odd, untouched):
        if suspects and len(suspects) < len(of_rank):
            return parting.group_of(suspects)
    return ()


def clipping_evidence(of_rank: Mapping[int, Factors], step: int) -> Evidence | None:
    """The factors side by side."""
    if not of_rank:
        return None
    shown = []
    for rank, own in of_rank.items():
        rest = "" if own.outside is None else f", the others by {_range(*own.outside)}"
        shown.append(f"rank {rank} multiplied the tensors that differ by {_range(*own.inside)}{rest}")
    return Evidence(
        kind="clipping",
        summary=f"step {step}, between the reduction and the optimizer: {'; '.join(shown)}",
        values={str(rank): list(own.inside) for rank, own in of_rank.items()},
    )


def settings_evidence(window: Window, parting: Parting, tensors: Iterable[str]) -> list[Evidence]:
    """Each setting that differs, with its value on each side."""
    now = tables_at(window, parting.tensor_class, parting.step, parting.ranks)
    # Of a setting nothing is unread: 0 is its value.
    values = {rank: dict(zip(table.names, table.norms, strict=True)) for rank, table in now.items() if table.norms}
    lines = []
    for name in tensors:
        of_rank = {rank: of[name] for rank, of in values.items() if name in of}
        shown = " and ".join(
            f"{value:.6g} on {ranks_text(parting.group_of([rank]))}"
            for rank, value in sorted(of_rank.items())
            if rank == min(other for other in of_rank if other in parting.group_of([rank]))
        )
        if shown:
            lines.append(
                Evidence(
                    kind="setting",
                    summary=f"{name} is {shown} at step {parting.step}",
                    values={str(rank): value for rank, value in of_rank.items()},
                )
            )
    return lines


def changed_alone(window: Window, parting: Parting, before_step: int, tensors: Iterable[str]) -> tuple[int, ...]:
    """Ranks whose values of these tensors are not what they were at an earlier step, if others' still are."""
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


def left_schedule(window: Window, parting: Parting, past: tuple[int, ...], tensors: Iterable[str]) -> tuple[int, ...]:
    """Ranks whose setting did not go on as all ranks' did before, if others' did: a schedule adds or multiplies."""
    tables = [tables_at(window, parting.tensor_class, step, parting.ranks) for step in (parting.step, *past)]
    if len(tables) != 3 or past[0] != parting.step - 1:  # noqa: PLR2004 - now, the step before, and the one before that
        return ()
    for name in tensors:
        off = {}
        for rank in set.intersection(*(set(of_rank) for of_rank in tables)):
            values = [dict(zip(of[rank].names, of[rank].norms, strict=False)).get(name) for of in tables]
            if None not in values:
                off[rank] = _strayed(*(value for value in values if value is not None))
        far = [rank for rank, way in off.items() if way > SAME]
        if far and len(far) < len(off):
            return parting.group_of(far)
    return ()


def _strayed(now: float, last: float, before: float) -> float:
    """How far a value is from where its schedule was going, over its last step; 0: right there."""
    usual = abs(last - before)
    expected = [2 * last - before, *([last * last / before] if before else [])]
    # A schedule that bends a little from step to step is still one.
    return max(0.0, min(abs(now - value) for value in expected) - usual / 4) / max(abs(last), abs(now), 1e-30)


def jumped_alone(
    window: Window, parting: Parting, before_step: int, tensors: Iterable[str]
) -> tuple[tuple[int, ...], str]:
    """Ranks on which a tensor went much farther since an earlier step than on the others, and the sentence that says so."""
    now = tables_at(window, parting.tensor_class, parting.step, parting.ranks)
    then = tables_at(window, parting.tensor_class, before_step, parting.ranks)
    for name in tensors:
        gone = {rank: _way(then[rank], now[rank], name) for rank in sorted(set(now) & set(then))}
        known = {rank: way for rank, way in gone.items() if math.isfinite(way)}
        least = min(known.values(), default=0.0)
        far = [rank for rank, way in known.items() if way > FAR * least and way > 0]
        if len(known) > 1 and far and len(far) < len(known):
            shown = ", ".join(f"{way:.3g} on rank {rank}" for rank, way in known.items())
            return parting.group_of(
                far
            ), f"from step {before_step} to step {parting.step} the sum of {name} moved by {shown}"
    return (), ""


def _way(then: Table, now: Table, name: str) -> float:
    """How far a tensor's sum went; NaN where that is not known."""
    return abs(column(now, now.sums).get(name, math.nan) - column(then, then.sums).get(name, math.nan))


def _is_same(one: float, other: float) -> bool:
    return abs(one - other) <= SAME * max(abs(one), abs(other))


def _range(low: float, high: float) -> str:
    return f"{low:.4g}" if _is_same(low, high) else f"{low:.4g} to {high:.4g}"
