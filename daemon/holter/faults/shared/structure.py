"""Compares the structure of the ranks' models: names, whole shapes, order, dtypes and frozenness of what all of them hold, replicas or shards.

Equal censuses are one object, so comparing 16,000 healthy ranks compares none.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from holter.faults.shared.wording import modules_of
from holter.faults.window import Window
from holter.records import Census, Component, TensorEntry

MAX_DISTINCT = 64
"""Number of different censuses that are compared; the rest are ignored."""


@dataclass(frozen=True)
class StructureDifference:
    """Names of tensors by how they differ, and ranks by what they have."""

    groups: tuple[tuple[int, ...], ...]
    """Ranks with equal structure, the largest group first."""
    presence: tuple[str, ...] = ()
    """Tensors that only some ranks have."""
    shapes: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    """Tensors of the same names in another order."""
    frozen: tuple[str, ...] = ()
    """Tensors that are frozen on some ranks and trained on others."""
    dtypes: tuple[str, ...] = ()
    words: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name of a tensor -> what it is in the first group, and in the first group that differs from it."""

    @property
    def is_any(self) -> bool:
        """Whether there is any difference."""
        return bool(self.presence or self.shapes or self.order or self.frozen or self.dtypes)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors that differ."""
        return tuple(dict.fromkeys((*self.presence, *self.shapes, *self.order, *self.frozen, *self.dtypes)))


def distinct_censuses(window: Window, limit: int | None = MAX_DISTINCT) -> list[Census]:
    """Return the ranks' censuses, equal ones once; at most `limit`, so that looking at all entries stays cheap."""
    return list({id(census): census for census in window.models.census.values()}.values())[:limit]


def compare_structures(window: Window) -> StructureDifference | None:
    """Return how the attached ranks' models differ; None if they are equal, or while a rank's census is missing."""
    if not window.attached or any(rank not in window.models.census for rank in window.attached):
        return None
    holders: dict[int, list[int]] = {}
    for rank in sorted(window.attached):
        holders.setdefault(id(window.models.census[rank]), []).append(rank)
    if len(holders) < 2:  # noqa: PLR2004 - one census is agreement
        return None
    structures: dict[tuple[TensorEntry, ...], list[int]] = {}
    for ranks in list(holders.values())[:MAX_DISTINCT]:
        structures.setdefault(_structure(window.models.census[ranks[0]], window.world_size), []).extend(ranks)
    groups = sorted(structures.items(), key=lambda item: (-len(item[1]), item[1]))
    if len(groups) < 2:  # noqa: PLR2004 - as above
        return None
    found = _merged(tuple(tuple(ranks) for _, ranks in groups), [entries for entries, _ in groups])
    return found if found.is_any else None


def _structure(census: Census, world_size: int) -> tuple[TensorEntry, ...]:
    """Return what must be equal on all ranks, without what may differ: values, buffers, shards, component."""
    return tuple(
        TensorEntry(
            entry.name,
            entry.shape,
            f"{entry.dtype} cast to {entry.policy}" if entry.policy else entry.dtype,
            entry.requires_grad,
            False,
            -1,
            entry.is_replicated or bool(entry.placements),
        )
        for entry in replicated_entries(census, world_size)
    )


def replicated_entries(census: Census, world_size: int) -> Iterator[TensorEntry]:
    """Yield the parameters of components that all ranks hold, whole or in known parts; a shard has the shape of the whole."""
    whole = [_is_over_all(census, place, world_size) for place in range(max(1, len(census.components)))]
    for entry in census.entries:
        is_whole = whole[entry.component] if entry.component < len(whole) else False
        if is_whole and not entry.is_buffer and (entry.placements or not entry.is_sharded):
            yield entry


def _is_over_all(census: Census, place: int, world_size: int) -> bool:
    if not census.components:
        return census.is_replicated
    component: Component = census.components[place]
    if component.num_replicas:
        return component.num_replicas == world_size
    own = [entry for entry in census.entries if entry.component == place and not entry.is_buffer]
    return bool(own) and all(entry.is_replicated for entry in own)


def _merged(groups: tuple[tuple[int, ...], ...], structures: list[tuple[TensorEntry, ...]]) -> StructureDifference:
    """Compare each group with the first."""
    found: dict[str, dict[str, None]] = {what: {} for what in ("presence", "shapes", "order", "frozen", "dtypes")}
    words: dict[str, tuple[str, str]] = {}
    first = structures[0]
    for other in structures[1:]:
        for what, name, one, two in _compared(first, other):
            found[what][name] = None
            words.setdefault(name, (one, two))
    return StructureDifference(groups, **{what: tuple(names) for what, names in found.items()}, words=words)


def _compared(first: tuple[TensorEntry, ...], other: tuple[TensorEntry, ...]) -> Iterator[tuple[str, str, str, str]]:
    mine, theirs = {entry.name: entry for entry in first}, {entry.name: entry for entry in other}
    # A component that one side does not hold replicated at all cannot be compared; a single tensor of one can.
    for name, entry in mine.items():
        if name not in theirs and entry.is_replicated and theirs:
            yield "presence", name, "there", "not there"
    for name, entry in theirs.items():
        if name not in mine and entry.is_replicated and mine:
            yield "presence", name, "not there", "there"
    common = [(mine[name], theirs[name]) for name in mine if name in theirs]
    for one, two in common:
        is_replicated = one.is_replicated and two.is_replicated
        if one.shape != two.shape and is_replicated:
            yield "shapes", one.name, str(list(one.shape)), str(list(two.shape))
        if one.dtype != two.dtype and is_replicated:
            yield "dtypes", one.name, one.dtype, two.dtype
        if one.requires_grad != two.requires_grad and (one.is_replicated or two.is_replicated):
            yield "frozen", one.name, _frozenness(one), _frozenness(two)
    if len(common) == len(mine) == len(theirs):
        yield from _order(list(mine), list(theirs))


def _order(mine: list[str], theirs: list[str]) -> Iterator[tuple[str, str, str, str]]:
    for place, (one, two) in enumerate(zip(mine, theirs, strict=True)):
        if one != two:
            yield "order", one, f"at place {place}", f"at place {theirs.index(one)}"


def _frozenness(entry: TensorEntry) -> str:
    return "trained" if entry.requires_grad else "frozen"


def common_module(tensors: tuple[str, ...]) -> tuple[str, ...]:
    """Return the innermost module that holds all of them, if there is one, then each tensor's own module."""
    own = modules_of(tensors)
    if not own:
        return ()
    shared = own[0].split(".")
    for module in own[1:]:
        words = module.split(".")
        same = [a == b for a, b in zip(shared, words, strict=False)]
        shared = shared[: same.index(False)] if False in same else shared[: len(same)]
    return tuple(dict.fromkeys((".".join(shared), *own))) if shared else own
