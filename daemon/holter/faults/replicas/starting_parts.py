"""Starting parts: a rank holds another's part of the model where it should hold its own.

What it detects
    Shards and pipeline stages that are, bit for bit, what another rank holds in their place, when they are first compared: at least two
    tensors that are not constant, and three quarters of all that the rank has. Stages count only where they were loaded: layers that
    are initialised from one seed may be the same; for shards that is information. Weights that a stage shares with another stage's
    embedding at the start, and that part afterwards: nobody adds up their gradients. Files: each rank has loaded one with its own
    number in the name, and a few have another's.

Why it matters
    Shapes fit, nothing raises, and the loss falls: part of the trained model is lost, and another part is there twice.

False positives
    Constant tensors (norms at one, biases at zero) and modules called `expert` do not count: experts may be copies on purpose. A model
    whose shards are the same by construction (a matrix that repeats its rows) would be reported if nearly all of it is so, and one that
    was made deeper by copies of its layers is a warning: it is critical only where the files' numbers say it too.

What to do
    Load on each rank the file or the layers of its own place in the mesh; give each shard a seed of its own. Start again.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import PurePath
from typing import Any, ClassVar, NamedTuple

from holter.faults.shared.parting import request
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import modules_of, named, ranks_text
from holter.faults.window import OWN_START, Note, StepView, Window
from holter.records import Evidence, Finding, Loaded, Mark, Table, TensorEntry
from holter.records.rank import OWN

MAX_RANKS = 8
"""Number of ranks whose tables are asked for."""
MIN_TENSORS, MIN_RANKS = 2, 3
"""Number of tensors that must be the same; number of ranks from which on numbers in file names follow a rule."""


Pairs = Mapping[tuple[int, int], tuple[str, ...]]
"""(rank, rank) -> tensors of the second that are also the first's."""


class Tie(NamedTuple):
    """Two tensors of two stages that began equal, one of them an embedding's."""

    ranks: tuple[int, int]
    names: tuple[str, str]


@dataclass(frozen=True)
class StartingParts:
    """Judges what ranks began with."""

    name: ClassVar[str] = "starting_parts"

    share: float = threshold(0.75, above=0)
    """Share of a rank's non-constant tensors that must be another rank's."""
    after_steps: int = threshold(2, at_least=1)
    """Number of steps after which weights that two stages share are looked at again."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield findings on equal parts first, then on files, then on shared weights that came to differ."""
        loaded = {note.rank: (note, told) for note, told in window.notes_of(Loaded)}
        first = next((view for view in window.steps if OWN_START in view.roots), None)
        found = list(self._equal(window, first, loaded)) if first is not None else []
        yield from found or _files(window, loaded)
        if first is not None and not found:
            yield from self._ties(window, first)

    def _equal(self, window: Window, first: StepView, loaded: Mapping[int, tuple[Note, Loaded]]) -> Iterator[Finding]:
        equal = [ranks for ranks in first.roots[OWN_START].values() if len(ranks) > 1]
        asked = tuple(
            sorted({*(equal[0][:MAX_RANKS] if equal else ()), *(_some(first) if _has_stages(window) else ())})
        )
        needs = tuple(one for one in [request(window, OWN_START, first.step, asked)] if one is not None)
        if needs:
            yield _finding(first.step, (), (), "Parts of ranks are the same.", needs=needs)
            return
        tables = {rank: window.tensors.tables.get((OWN_START, first.step, rank)) for rank in asked}
        parts = {rank: _varied(table) for rank, table in tables.items() if table is not None}
        pairs: dict[tuple[int, int], tuple[str, ...]] = {}
        for one, two in combinations(sorted(parts), 2):
            same = _same(parts[one], parts[two])
            is_loaded = all(_is_loaded(window, rank, same, loaded) for rank in (one, two))
            is_shard = all(_is_sharded(window, rank, same) for rank in (one, two))
            is_own = is_loaded and all(
                (paths := loaded[rank][1].files) and _is_own_file(window, rank, paths[-1]) for rank in (one, two)
            )
            if (is_shard or is_loaded) and not is_own and self._is_all(same, parts[one], parts[two]):
                pairs[one, two] = same
        if pairs:
            names = max(pairs.values(), key=len)
            was_loaded = all(_is_loaded(window, rank, names, loaded) for pair in pairs for rank in pair)
            files = {rank: told.files[-1] for rank, (_, told) in loaded.items() if told.files} if was_loaded else {}
            yield _twins(window, first.step, pairs, files, was_loaded=was_loaded)

    def _is_all(self, same: tuple[str, ...], *parts: Mapping[str, int]) -> bool:
        return len(same) >= MIN_TENSORS and len(same) >= self.share * min(map(len, parts))

    def _ties(self, window: Window, first: StepView) -> Iterator[Finding]:
        ties = list(_tied(window, first)) if _has_stages(window) else []
        ranks = {rank for tie in ties for rank in tie.ranks}
        step = next((view.step for view in window.steps if self._is_later(view, ranks)), None) if ties else None
        if step is None:
            return
        if (asked := request(window, OWN_START, step, ranks)) is not None:
            yield _finding(step, (), (), "Weights of two stages began the same.", needs=(asked,))
            return
        for tie in ties:
            now = [
                _value(window.tensors.tables.get((OWN_START, step, rank)), name)
                for rank, name in zip(*tie, strict=True)
            ]
            if None not in now and now[0] != now[1]:
                yield _parted(first.step, step, tie)
                return

    def _is_later(self, view: StepView, ranks: Iterable[int]) -> bool:
        """Whether these ranks' own parts were read before this step, some steps after the first."""
        return view.step >= self.after_steps and {*view.kept_history, *view.broke_history}.issuperset(ranks)


def _some(view: StepView) -> tuple[int, ...]:
    return tuple(sorted(rank for ranks in view.roots[OWN_START].values() for rank in ranks))[:MAX_RANKS]


def _entries(window: Window, rank: int) -> dict[str, TensorEntry]:
    census = window.models.census.get(rank)
    return {entry.name: entry for entry in census.entries} if census else {}


def _is_loaded(window: Window, rank: int, names: tuple[str, ...], loaded: Mapping[int, tuple[Note, Loaded]]) -> bool:
    """Whether what this rank loaded may contain these tensors: a small model that it loaded besides does not count."""
    entries = _entries(window, rank)
    sizes = [
        math.prod(entry.shape) / (window.world_size if entry.is_sharded else 1)
        for name in names
        if (entry := entries.get(name)) is not None
    ]
    return rank in loaded and 2 * loaded[rank][1].num_elements >= sum(sizes) > 0


def _stages(window: Window, rank: int) -> list[int]:
    census = window.models.census.get(rank)
    return census.stages if census is not None else []


def _is_own_file(window: Window, rank: int, path: str) -> bool:
    """Whether the file that it loaded last has its own number, or its stage's, in its name."""
    return bool({rank, *_stages(window, rank)} & set(_numbers(PurePath(path).name)[1]))


def _has_stages(window: Window) -> bool:
    """Whether some rank has whole tensors of its own."""
    return any(
        entry.axis == OWN and not entry.is_sharded and not entry.is_buffer
        for census in {id(one): one for one in window.models.census.values()}.values()
        for entry in census.entries
    )


def _varied(table: Table) -> dict[str, int]:
    """Return fingerprints of tensors that are not constant and belong to no expert."""
    marks = table.marks or [0] * len(table.names)
    return {
        name: fingerprint
        for name, fingerprint, mark in zip(table.names, table.fingerprints, marks, strict=True)
        if fingerprint and not mark & (Mark.CONSTANT | Mark.ZERO) and "expert" not in name.lower()
    }


def _same(one: Mapping[str, int], two: Mapping[str, int]) -> tuple[str, ...]:
    """Return the second rank's tensors whose content the first has too, under whatever name."""
    known = set(one.values())
    return tuple(name for name, fingerprint in two.items() if fingerprint in known)


def _is_sharded(window: Window, rank: int, names: tuple[str, ...]) -> bool:
    entries = _entries(window, rank)
    return bool(names) and all(name in entries and entries[name].is_sharded for name in names)


def _value(table: Table | None, name: str) -> int | None:
    return dict(zip(table.names, table.fingerprints, strict=True)).get(name) if table is not None else None


def _tied(window: Window, first: StepView) -> Iterator[Tie]:
    """Yield whole weights of two ranks that began equal, one of them an embedding's."""
    tables = {rank: window.tensors.tables.get((OWN_START, first.step, rank)) for rank in _some(first)}
    parts = {rank: _varied(table) for rank, table in tables.items() if table is not None}
    for one, two in combinations(sorted(parts), 2):
        here, there = _entries(window, one), _entries(window, two)
        for name, fingerprint in parts[one].items():
            for other, value in parts[two].items():
                pair = [entry for entry in (here.get(name), there.get(other)) if entry and not entry.is_sharded]
                is_embedding = len(pair) > 1 and any("Embedding" in entry.module_class for entry in pair)
                if fingerprint == value and is_embedding:
                    yield Tie((one, two), (name, other))


def _files(window: Window, loaded: Mapping[int, tuple[Note, Loaded]]) -> Iterator[Finding]:
    """Find a few ranks that loaded files with another rank's number in the name, while all others loaded their own."""
    named_by = {rank: _numbers(told.files[-1]) for rank, (_, told) in loaded.items() if told.files}
    shapes = {shape for shape, _ in named_by.values()}
    if len(named_by) < max(MIN_RANKS, window.world_size) or len(shapes) != 1:
        return
    for place in range(len(next(iter(named_by.values()))[1])):
        told = {rank: numbers[place] for rank, (_, numbers) in named_by.items()}
        if len(set(told.values())) > 1 and (odd := _odd(window, told)):
            step = max(note.step for note, _ in loaded.values())
            files = {rank: loaded[rank][1].files[-1] for rank in odd}
            shown = "; ".join(f"rank {rank} loaded {PurePath(files[rank]).name}" for rank in odd)
            yield _finding(
                step,
                odd,
                (),
                f"{ranks_text(odd).capitalize()} loaded another's file: {shown}, while all others loaded that of their own number.",
                facts={"is_file_of_another": True},
                evidence=(Evidence(kind="file", summary=shown, values={"files": files}),),
                severity="warning",
            )
            return


def _numbers(path: str) -> tuple[str, tuple[int, ...]]:
    """Return a path without its numbers, and the numbers."""
    return re.sub(r"\d+", "#", path), tuple(int(number) for number in re.findall(r"\d+", path))


def _odd(window: Window, told: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks whose number does not follow the rule that nearly all others follow; none if there is no rule."""
    ranks = len(told)
    stages = {rank: next(iter(_stages(window, rank)), -1) for rank in told}
    # Place on one axis of a mesh: its sizes divide the number of ranks.
    sizes = [size for size in range(2, ranks) if ranks % size == 0]
    rules = [{rank: rank for rank in told}, stages]
    rules += [{rank: rank % size for rank in told} for size in sizes]
    rules += [{rank: rank // size for rank in told} for size in sizes]
    best: tuple[int, ...] | None = None
    for rule in rules:
        for base in (0, 1):
            odd = tuple(sorted(rank for rank, number in told.items() if number != rule[rank] + base))
            best = odd if best is None or len(odd) < len(best) else best
    return best if best and 2 * len(best) <= ranks else ()


def _twins(window: Window, step: int, pairs: Pairs, files: Mapping[int, str], *, was_loaded: bool) -> Finding:
    names = max(pairs.values(), key=len)
    everyone = tuple(sorted({rank for pair in pairs for rank in pair}))
    # A number in a file that every rank has read is no rank's number.
    has_own = was_loaded and len(set(files.values())) > 1
    files = {rank: files[rank] for rank in everyone if rank in files}
    strangers = _by_number(window, everyone, files) if has_own else ()
    odd = strangers or (tuple(sorted({two for _, two in pairs})) if was_loaded else everyone)
    from_files = "; ".join(f"rank {rank} loaded {PurePath(path).name}" for rank, path in files.items())
    what = f"{len(names)} tensors of {ranks_text(everyone)} are the same bit for bit ({named(names)})"
    values = {"pairs": [list(pair) for pair in pairs], "tensors": list(names[:20]), "axis": OWN}
    return _finding(
        step,
        odd,
        names,
        f"{ranks_text(odd).capitalize()} began with another's part of the model: {what}, where each should hold a part of its own"
        + (f"; {from_files}." if files else "."),
        facts={"are_parts_equal": True, "was_loaded": was_loaded, "compared_ranks": list(everyone)},
        evidence=(
            Evidence(kind="fingerprint", summary=what, values=values),
            *([Evidence(kind="file", summary=from_files, values={"files": files})] if files else ()),
        ),
        # Parts made from one seed learn the same until the data differ, which may be intended; or a model was deepened by copying layers.
        severity="critical" if strangers else "warning" if was_loaded else "info",
    )


def _by_number(window: Window, everyone: tuple[int, ...], files: Mapping[int, str]) -> tuple[int, ...]:
    """Return, of ranks that hold the same, those whose file has another's number; none if that does not tell them apart."""
    found = tuple(rank for rank in everyone if rank not in files or not _is_own_file(window, rank, files[rank]))
    return found if len(found) < len(everyone) else ()


def _parted(first_step: int, step: int, tie: Tie) -> Finding:
    one, two = (f"{name} of rank {rank}" for rank, name in zip(*tie, strict=True))
    return _finding(
        first_step,
        tie.ranks,
        tie.names,
        f"{one} and {two} began the same, as tied weights do, and are no more: nobody adds up their gradients.",
        facts={"are_ties_parted": True, "compared_ranks": list(tie.ranks)},
        evidence=(
            Evidence(
                kind="fingerprint",
                summary=f"equal before step {first_step}, different after step {step}",
                values={"ranks": list(tie.ranks), "tensors": list(tie.names), "axis": "stages"},
            ),
        ),
        severity="warning",
    )


def _finding(step: int, ranks: tuple[int, ...], tensors: tuple[str, ...], summary: str, **more: Any) -> Finding:
    return Finding(
        detector=StartingParts.name,
        severity=more.pop("severity", "critical"),
        first_step=step,
        detected_step=step,
        ranks=ranks,
        tensors=tensors,
        modules=modules_of(tensors),
        summary=summary,
        **more,
    )
