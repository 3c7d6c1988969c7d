"""A mesh of ranks as detectors see it: one subgroup along one axis at a time, with class names that they know.

    window                                             seen along `replicate`, from ranks 1 and 3
    gradients@replicate#0   {a: (0, 2)}                gradients   {b: (1,), c: (3,)}
    gradients@replicate#1   {b: (1,), c: (3,)}
    hyperparameters         {d: (0, 1, 2, 3)}          hyperparameters   {d: (1, 3)}

So a detector that compares replicas need not know of meshes. Views are made only where ranks have differed: a healthy mesh
costs nothing.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec

from holter.faults.shared.parting import WORDS
from holter.faults.shared.wording import ranks_text
from holter.faults.window import ClassHistory, StepView, TensorView, Window
from holter.records import Census, Evidence, Finding, MeshAxis, TableRequest, TensorEntry
from holter.records.rank import IGNORED, is_ignored

MAX_SUBGROUPS_SHOWN = 8
PLACES = {name: place for place, name in enumerate(WORDS)}
"""Class of tensors -> its place in the order in which a step reads them."""
Roots = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class AxisView:
    """The window as the ranks of one subgroup show it."""

    window: Window
    axis: str
    """Name of the axis; empty for all ranks, with the window as it is."""
    subgroup: str
    """Suffix of the subgroup's class names: `@replicate#1`."""
    parted: tuple[tuple[int, ...], ...]
    """All subgroups along this axis that differed at the same step, including this one."""
    step: int
    source: Window
    """The window of all ranks."""

    def located(self, finding: Finding, census: Census | None) -> Finding:
        """Return a finding of this view as a finding of the whole job.

        Requests get the full class names; summary and evidence name the axis.
        """
        if not self.axis:
            return finding
        needs = tuple(
            msgspec.structs.replace(need, tensor_class=self._wire(need.tensor_class))
            if isinstance(need, TableRequest)
            else need
            for need in finding.needs
        )
        everyone = tuple(sorted(rank for ranks in self.parted for rank in ranks))
        compared = finding.facts.get("compared_ranks")
        ranks = everyone if compared is not None and set(compared) == set(finding.ranks) else finding.ranks
        # What a wrapper ignores is a part of the model, and the rest is reduced. It may be intended.
        own_facts = {"gradients_differ_in_all_tensors": False} if self.axis == IGNORED else {}
        return msgspec.structs.replace(
            finding,
            needs=needs,
            ranks=ranks,
            severity="warning" if is_ignored(self.axis) else finding.severity,
            summary=f"{finding.summary.removesuffix('.')}, {self._where}.",
            facts=finding.facts
            | ({} if compared is None else {"compared_ranks": list(everyone), "axis": self.axis, **own_facts}),
            evidence=(*finding.evidence, self._evidence(finding, census)),
        )

    @property
    def _where(self) -> str:
        if self.axis == IGNORED:
            return "in what the wrapper was told to ignore, or what the script leaves out of its own reduction"
        if is_ignored(self.axis):
            return f"along the axis {self.axis.partition(':')[2]} of the mesh, over which no wrapper reduces"
        return f"compared along the axis {self.axis} of the mesh"

    def _wire(self, tensor_class: str) -> str:
        return tensor_class + self.subgroup if self.is_along(tensor_class) else tensor_class

    def is_along(self, tensor_class: str) -> bool:
        """Whether this class is compared along the axis, not over all ranks."""
        return any(tensor_class + self.subgroup in view.roots for view in self.source.steps)

    def _evidence(self, finding: Finding, census: Census | None) -> Evidence:
        shown = ", ".join(ranks_text(ranks) for ranks in self.parted[:MAX_SUBGROUPS_SHOWN])
        parts = _parts(finding, census, self.parted[0])
        where = "".join(f"; {name}: {text}" for name, text in parts.items())
        return Evidence(
            kind="mesh",
            summary=f"along the axis {self.axis} these ranks hold the same bytes and differed at step {self.step}: {shown}{where}",
            values={
                "axis": self.axis,
                "subgroups": [list(ranks) for ranks in self.parted[:MAX_SUBGROUPS_SHOWN]],
                "num_subgroups": len(self.parted),
                "parts": parts,
            },
        )


def views(window: Window) -> Iterator[AxisView]:
    """Yield the job as a whole, and for each axis on which ranks differ, the subgroup that differed first."""
    yield AxisView(_with_agreed(window), "", "", (), 0, window)
    axes: dict[str, list[ClassHistory]] = {}
    for name, history in window.tensors.classes.items():
        axis = name.partition("@")[2]
        if axis and history.first_unequal_step is not None:
            axes.setdefault(axis, []).append(history)
    for axis, histories in sorted(axes.items()):
        if not is_ignored(axis) or _were_equal(window, axis):
            step = min(history.first_unequal_step for history in histories if history.first_unequal_step is not None)
            if (found := _view(window, axis, step)) is not None:
                yield found


def _with_agreed(window: Window) -> Window:
    """Return the window of all ranks, with the classes added that agreed along every axis until settings differed.

    Without them, a detector could not see that the optimizers' settings differed first.
    """
    classes = window.tensors.classes
    settings = classes.get("hyperparameters")
    if settings is None or settings.first_unequal_step is None:
        return window
    along: dict[str, list[ClassHistory]] = {}
    for name, history in classes.items():
        base, _, axis = name.partition("@")
        if axis and not is_ignored(axis) and base not in classes:
            along.setdefault(base, []).append(history)
    agreed = {
        base: replace(histories[0], first_unequal_step=None, num_unequal=0)
        for base, histories in along.items()
        if all(h.num_equal and _first_unequal(h) > settings.first_unequal_step for h in histories)
    }
    return replace(window, tensors=replace(window.tensors, classes={**classes, **agreed})) if agreed else window


def _first_unequal(history: ClassHistory) -> float:
    return math.inf if history.first_unequal_step is None else history.first_unequal_step


def _were_equal(window: Window, axis: str) -> bool:
    """Whether what a wrapper ignores was equal on all ranks at first; if not, it is each rank's own, such as an expert."""
    known = [window.tensors.classes.get(f"parameters_{moment}@{axis}") for moment in ("before", "after")]
    return bool(known[0] and known[0].is_equal_at_first)


def first_view(window: Window, judge: "Callable[[AxisView], Iterator[Finding]]") -> Iterator[Finding]:
    """Yield a detector's findings of the view in which something differed first.

    At the same place of a step, an axis comes before all ranks: its view contains the classes that all ranks compare, too.
    """
    found = sorted(views(window), key=_began)
    for view in found:
        said = [view.located(finding, _census(window)) for finding in judge(view)]
        if said:
            yield from said
            return


def _began(view: AxisView) -> tuple[float, int, bool]:
    """Return the step, the place in it, and whether it is the view of all ranks.

    Settings that differ on one rank of a job come first, and are not blamed on the axis along which weights then differ.
    """
    known = {
        name.partition("@")[0]: history.first_unequal_step
        for name, history in view.source.tensors.classes.items()
        if name.partition("@")[2] == view.axis and history.first_unequal_step is not None
    }
    places = ((step, PLACES.get(name, len(PLACES))) for name, step in known.items())
    step, place = min(places, default=(math.inf, 0))
    return step, place, not view.axis


def _census(window: Window) -> Census | None:
    return next(iter(window.models.census.values()), None)


def _view(window: Window, axis: str, step: int) -> AxisView | None:
    at = window.step(step)
    if at is None:
        return None
    marker = f"@{axis}#"
    parted: dict[str, set[int]] = {}
    for name, by_root in at.roots.items():
        if marker in name and len(by_root) > 1:
            parted.setdefault(name.partition("@")[2], set()).update(
                rank for ranks in by_root.values() for rank in ranks
            )
    if not parted:
        return None
    chosen = min(parted, key=lambda name: min(parted[name]))
    members = frozenset(parted[chosen])
    subgroup = "@" + chosen
    groups = tuple(tuple(sorted(ranks)) for _, ranks in sorted(parted.items(), key=lambda item: min(item[1])))
    return AxisView(_along(window, axis, subgroup, members), axis, subgroup, groups, step, window)


def _along(window: Window, axis: str, subgroup: str, members: frozenset[int]) -> Window:
    classes = {name: history for name, history in window.tensors.classes.items() if "@" not in name}
    along = {
        name.partition("@")[0]: known for name, known in window.tensors.classes.items() if name.endswith(f"@{axis}")
    }
    if is_ignored(axis):
        # The reduction that was observed is of other parameters.
        classes.pop("gradients_reduced", None)
    tables = {
        (name.removesuffix(subgroup), step, rank): table
        for (name, step, rank), table in window.tensors.tables.items()
        if rank in members and ("@" not in name or name.endswith(subgroup))
    }
    unavailable = frozenset(
        (name.removesuffix(subgroup), step, rank) for name, step, rank in window.tensors.unavailable if rank in members
    )
    return replace(
        window,
        steps=tuple(replace(view, roots=_roots(view, subgroup, members)) for view in window.steps),
        tensors=TensorView(classes | along, tables, unavailable, window.tensors.origins),
    )


def _roots(view: StepView, subgroup: str, members: frozenset[int]) -> dict[str, Roots]:
    found: dict[str, Roots] = {}
    for name, by_root in view.roots.items():
        if name.endswith(subgroup):
            found[name.removesuffix(subgroup)] = by_root
        elif "@" not in name and name + subgroup not in view.roots:
            kept = {root: tuple(rank for rank in ranks if rank in members) for root, ranks in by_root.items()}
            found[name] = {root: ranks for root, ranks in kept.items() if ranks}
    return found


def _parts(finding: Finding, census: Census | None, ranks: tuple[int, ...]) -> dict[str, str]:
    """Return, for the first tensors, which part of the whole these ranks hold."""
    if census is None or not census.axes:
        return {}
    entries = {entry.name: entry for entry in census.entries}
    found = {name: part_text(entries[name], census.axes, ranks[0]) for name in finding.tensors[:4] if name in entries}
    return {name: text for name, text in found.items() if text}


def part_text(entry: TensorEntry, axes: Iterable[MeshAxis], rank: int) -> str:
    """Return in words which part of a tensor a rank holds; empty if it holds all of it.

    >>> axes = [MeshAxis("replicate", 2, 2), MeshAxis("shard", 2, 1)]
    >>> part_text(TensorEntry("w", (5, 4), "float32", True, False, 0, placements="replicate=R,shard=S(0)"), axes, 3)
    '3:5 of 5 in dimension 0'
    """
    sizes, begins = list(entry.shape), [0] * len(entry.shape)
    known = {axis.name: axis for axis in axes}
    for word in entry.placements.split(",") if entry.placements else ():
        name, _, how = word.partition("=")
        dim = how.removeprefix("S(").removesuffix(")")
        if name not in known or not how.startswith("S(") or not dim.isdigit() or int(dim) >= len(sizes):
            continue
        axis, place = known[name], int(dim)
        step = math.ceil(sizes[place] / axis.size)
        begin = min(rank // max(axis.stride, 1) % axis.size * step, sizes[place])
        begins[place] += begin
        sizes[place] = min(step, sizes[place] - begin)
    return ", ".join(
        f"{begin}:{begin + size} of {whole} in dimension {dim}"
        for dim, (begin, size, whole) in enumerate(zip(begins, sizes, entry.shape, strict=True))
        if size != whole
    )


__all__ = ["AxisView", "first_view", "part_text", "views"]
