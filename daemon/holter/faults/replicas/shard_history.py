"""Shard history: a rank's shard of the weights is not what its last step left.

What it detects
    Weights that no other rank holds (FSDP's and ZeRO's shards, ZeRO's float32 partitions), and what the optimizer remembers of them, that
    changed on some ranks between the end of one step and the start of the next, while the others' did not: which rank, which tensors,
    which part of them, between which steps.

Why it matters
    There is no replica to compare with. A flipped bit, a stray write or a wrong load goes into every forward pass of every rank from
    then on, and the loss hardly shows it.

False positives
    A script that changes weights between steps does so on every rank, or again and again: neither is reported. At least three steps
    must have been seen at which nobody's weights changed. Where steps are compared now and then only, a change at another step is not
    seen; what optimizers remember is read at every fourth comparison where it is more than four megabytes.

What to do
    Resume from a checkpoint older than this step, with the named rank on another host; read that host's memory and device error
    counters.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.axes import part_text
from holter.faults.shared.parting import column, request
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import modules_of, named, ranks_text
from holter.faults.window import StepView, Window
from holter.records import Evidence, Finding, TableRequest

CLASSES = tuple(
    (f"{kind}_after{scope}", f"{kind}_before{scope}")
    for kind, scope in (("parameters", "@own"), ("parameters", "@own.partition"), ("state", "@own"))
)
"""(class that a step left, class that the next step met)"""
STATE = "optimizer: "
"""Prefix of the names of optimizer state."""
MAX_RANKS = 4
"""Number of ranks whose tables are asked for."""


@dataclass(frozen=True)
class ShardHistory:
    """Judges whose shards changed with no step that could have changed them."""

    name: ClassVar[str] = "shard_history"

    min_kept: int = threshold(3, at_least=1)
    """Number of steps at which all weights stayed the same between steps, before a change between steps means anything."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding, the first break, or a request for tables until they are there or cannot be had."""
        broken = [view for view in window.steps if view.broke_history]
        if not broken:
            return
        first = broken[0]
        earlier = sum(bool(view.kept_history) for view in window.steps if view.step < first.step)
        if earlier < self.min_kept or not first.kept_history or len(broken) * 2 > earlier:
            return
        ranks = first.broke_history[:MAX_RANKS]
        needs = tuple(_requests(window, first, ranks))
        if needs:
            yield _finding(window, first, {}, needs)
            return
        changed = {rank: names for rank in ranks if (names := _changed(window, first.step, rank))}
        if changed:
            yield _finding(window, first, changed)


def _requests(window: Window, view: StepView, ranks: tuple[int, ...]) -> Iterator[TableRequest]:
    for after, before in CLASSES:
        for name, step in ((after, view.step - 1), (before, view.step)):
            if asked := request(window, name, step, ranks):
                yield asked


def _changed(window: Window, step: int, rank: int) -> tuple[str, ...]:
    """Return the rank's own tensors that are not what the step before had left."""
    found: list[str] = []
    for after, before in CLASSES:
        left = window.tensors.tables.get((after, step - 1, rank))
        met = window.tensors.tables.get((before, step, rank))
        if left and met:
            then, now = column(left, left.fingerprints), column(met, met.fingerprints)
            found += [name for name in now if name in then and now[name] != then[name]]
    return tuple(found)


def _finding(
    window: Window, view: StepView, changed: dict[int, tuple[str, ...]], needs: tuple[TableRequest, ...] = ()
) -> Finding:
    ranks = tuple(changed) or view.broke_history
    tensors = tuple(dict.fromkeys(name for names in changed.values() for name in names))
    return Finding(
        detector=ShardHistory.name,
        severity="critical",
        first_step=view.step,
        detected_step=view.step,
        ranks=ranks,
        tensors=tensors,
        modules=modules_of(name for name in tensors if not name.startswith(STATE)),
        summary=f"{_what(tensors)} of {ranks_text(ranks)} changed between step {view.step - 1} and step {view.step}, with no optimizer step between.",
        facts={
            "own_history_broke_on_some": True,
            "own_history_broke_on_all": False,
            "first_class": "parameters_before",
        },
        evidence=tuple(_evidence(window, view, changed)),
        needs=needs,
        agreed_steps=view.step - 1,
    )


def _what(tensors: tuple[str, ...]) -> str:
    return (
        "What the optimizer remembers of shards"
        if tensors and all(name.startswith(STATE) for name in tensors)
        else "The shards"
    )


def _evidence(window: Window, view: StepView, changed: dict[int, tuple[str, ...]]) -> Iterator[Evidence]:
    for rank, names in changed.items():
        census = window.models.census.get(rank)
        entries = {entry.name: entry for entry in census.entries} if census else {}
        parts = {
            name: part_text(entries[name], census.axes, rank)
            for name in names[:4]
            if name in entries and census is not None
        }
        where = "".join(f"; rank {rank} holds {text} of {name}" for name, text in parts.items() if text)
        yield Evidence(
            kind="history",
            summary=f"rank {rank}: the fingerprint of {named(names)} before step {view.step} is not the one after step {view.step - 1}{where}",
            values={"rank": rank, "step": view.step, "tensors": list(names[:20]), "parts": parts, "axis": "own"},
        )
    yield Evidence(
        kind="history",
        summary=f"the weights of {ranks_text(view.kept_history)} were the same before this step as after the one before",
        values={"ranks": list(view.kept_history[:20])},
    )
