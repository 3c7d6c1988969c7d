"""Buffer divergence: parameters agree between ranks, buffers do not.

What it detects
    Buffers of a replicated model (running statistics of a normalisation, tables, counters) that differ between ranks at two comparisons
    or more, while parameters and gradients agree. Buffers are compared when the model is called, where DDP has just broadcast them.

Why it matters
    Training looks ordinary, because each rank normalises with its own batch. Evaluation and checkpoints use the running statistics of
    one rank alone, so that the saved model has seen the statistics of a fraction of the data, and ranks evaluate different models.

False positives
    Buffers that are local by intention: leave them out of the replica (DDP ignores what it is told to ignore), or let DDP broadcast them,
    and nothing is reported. Buffers that part because the parameters did are not reported separately.

What to do
    Leave `broadcast_buffers` on, or synchronise the statistics (SyncBatchNorm), or average them before evaluating and saving.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.axes import first_view
from holter.faults.shared.parting import (
    Difference,
    Parting,
    agreed_since,
    changed_alone,
    find_difference,
    find_parting,
    majority_evidence,
    request,
)
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import cap, modules_of, named, ranks_text
from holter.faults.window import ClassHistory, Window
from holter.records import Evidence, Finding

EARLIER = ("parameters_before", "gradients_reduced", "gradients", "parameters_after")
"""Classes whose differences pass into the buffers."""
PARAMETERS = ("parameters_before", "parameters_after")


@dataclass(frozen=True)
class BufferDivergence:
    """Judges buffers that differ again and again."""

    name: ClassVar[str] = "buffer_divergence"

    min_comparisons: int = threshold(2, at_least=1)
    """Number of comparisons at which buffers must differ."""
    max_ranks_asked: int = 8
    """Number of ranks that are asked for their table of fingerprints."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding, or a request for tables until they are there or cannot be had."""
        yield from first_view(window, lambda view: self._judge_view(view.window))

    def _judge_view(self, window: Window) -> Iterator[Finding]:
        history, parting = window.tensors.classes.get("buffers"), find_parting(window, "buffers")
        if history is None or parting is None or history.num_unequal < self.min_comparisons:
            return
        if _has_earlier_cause(window, parting.step) or agreed_since(window, "buffers", parting.step):
            return
        ranks = parting.asked(self.max_ranks_asked)
        steps = [parting.step, *([history.last_equal_step] if history.last_equal_step is not None else [])]
        needs = tuple(asked for step in steps if (asked := request(window, "buffers", step, ranks)))
        if needs:
            yield Finding(
                detector=self.name,
                severity="warning",
                first_step=parting.step,
                detected_step=parting.step,
                ranks=parting.ranks,
                summary=f"Buffers differ between ranks since step {parting.step}.",
                needs=needs,
            )
            return
        difference = find_difference(window, parting)
        if difference.num_tensors and not _without_local(window, difference.tensors):
            return
        yield _finding(window, parting, history, difference)


def _has_earlier_cause(window: Window, step: int) -> bool:
    onsets = (history.first_unequal_step for name in EARLIER if (history := window.tensors.classes.get(name)))
    return any(onset is not None and onset <= step for onset in onsets)


def _without_local(window: Window, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those that are part of a replica, as far as the census tells."""
    census = next(iter(window.models.census.values()), None)
    known = {entry.name: entry for entry in census.entries if entry.is_buffer} if census else {}
    return tuple(name for name in names if name not in known or known[name].is_replicated or known[name].axis)


def _dtypes(window: Window, ranks: Iterable[int], tensors: tuple[str, ...]) -> dict[str, dict[str, list[int]]]:
    """Return buffer -> dtype -> ranks, for buffers whose dtype differs between ranks."""
    found: dict[str, dict[str, list[int]]] = {}
    names = set(tensors)
    for rank in ranks:
        census = window.models.census.get(rank)
        for entry in census.entries if census else ():
            if entry.is_buffer and entry.name in names:
                found.setdefault(entry.name, {}).setdefault(entry.dtype, []).append(rank)
    return {name: by_dtype for name, by_dtype in found.items() if len(by_dtype) > 1}


def _finding(window: Window, parting: Parting, history: ClassHistory, difference: Difference) -> Finding:
    tensors = _without_local(window, difference.tensors)
    agreed = history.last_equal_step
    alone = changed_alone(window, parting, agreed, tensors) if agreed is not None else ()
    ranks = alone or parting.minority or parting.ranks
    dtypes = _dtypes(window, parting.ranks, tensors)
    compared = [known for name in PARAMETERS if (known := window.tensors.classes.get(name))]
    count = f"{len(tensors)} of {difference.num_tensors} buffers" if difference.num_tensors else "buffers"
    return Finding(
        detector=BufferDivergence.name,
        severity="warning",
        first_step=parting.step,
        detected_step=parting.step,
        ranks=ranks,
        tensors=tensors,
        modules=modules_of(tensors),
        summary=f"{cap(count)} differ between {ranks_text(parting.ranks)} since step {parting.step}, while the parameters "
        f"{'agree' if compared else 'were not compared'}.",
        facts={
            "first_class": "buffers",
            "compared_ranks": list(parting.ranks),
            "buffers_differ_repeatedly": history.num_unequal > 1,
            "buffers_agreed_at_first": history.is_equal_at_first,
            "parameters_differ": any(known.num_unequal for known in compared) if compared else None,
            "has_majority": bool(parting.minority),
            "are_dtypes_different": bool(dtypes),
        },
        evidence=(
            *(_dtype_evidence(name, by_dtype) for name, by_dtype in dtypes.items()),
            Evidence(
                kind="fingerprint",
                summary=f"buffers differed at {history.num_unequal} of {history.num_unequal + history.num_equal} comparisons, first at step "
                f"{parting.step}: {named(tensors) or 'which ones is not known'}",
                values={"num_unequal": history.num_unequal, "num_equal": history.num_equal},
            ),
            Evidence(
                kind="fingerprint",
                summary=f"parameters agreed at {sum(known.num_equal for known in compared)} comparisons and differed at "
                f"{sum(known.num_unequal for known in compared)}",
            ),
            *(_history_evidence(alone, agreed) for _ in range(bool(alone))),
            majority_evidence(parting),
        ),
    )


def _history_evidence(alone: tuple[int, ...], agreed: int | None) -> Evidence:
    return Evidence(
        kind="history",
        summary=f"on the other ranks they are what they were at step {agreed}: they changed on {ranks_text(alone)} alone",
        values={"ranks": list(alone), "agreed_step": agreed},
    )


def _dtype_evidence(name: str, by_dtype: dict[str, list[int]]) -> Evidence:
    shown = " and ".join(f"{dtype} on {ranks_text(ranks)}" for dtype, ranks in by_dtype.items())
    return Evidence(kind="census", summary=f"{name} is {shown}", values={"name": name})
