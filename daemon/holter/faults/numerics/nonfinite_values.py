"""Non-finite values: an optimizer was given gradients that held NaN or Inf.

What it detects
    The first step at which an optimizer was given gradients that held NaN or Inf, and the rank that made them. After a reduction every
    rank holds the same NaN, so only what a rank had before the reduction counts against it: its batch, its loss, its own gradients, in
    this order. Where no such view exists every rank is named, and the finding says so.

Why it matters
    One NaN in one gradient makes every weight NaN on every rank within a step. Nothing raises, the job keeps its machines busy, and
    every checkpoint written from then on is worthless.

False positives
    A step that a loss scaler skipped does not count, and a batch whose non-finite values were there on healthy steps as well (an
    attention mask of -inf) is not held against its rank. A script that steps with NaN gradients on purpose would be reported.

What to do
    Where the action is halt the step is held before it is applied and the run is stopped with a checkpoint from before it: resume
    from that. Else stop the run, which cannot recover by itself, and resume from a checkpoint older than the first step named here.
    In both cases after the fix that the diagnosis gives (`holter explain nonfinite_input`, `nonfinite_forward`,
    `nonfinite_loss_function`, `activation_overflow`, `nonfinite_backward`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from holter.faults.shared.overflow import is_overflown
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import listed, ranks_text, was
from holter.faults.window import StepView, Window
from holter.records import Evidence, Finding, Nonfinite, Origin, Where

LOCAL: tuple[Where, ...] = ("input", "loss", "gradient")
"""Places before the reduction, in the order in which a NaN travels."""

WORDS: dict[Where, str] = {
    "input": "batch",
    "loss": "loss",
    "gradient": "own gradients",
    "reduced_gradient": "reduced gradients",
}
SUBJECTS: dict[Where, str] = {
    "input": "input",
    "gradient": "own gradient of",
    "reduced_gradient": "reduced gradient of",
}
SENT = "what it sent to rank"
"""Begins the name of a pipeline stage's output."""
MAX_ENTRIES = 6
"""Number of evidence lines about single tensors; the rest are counted."""

NonfiniteEntry = tuple[int, Nonfinite]


@dataclass(frozen=True)
class NonfiniteValues:
    """Judges the first step whose gradients were applied while not finite."""

    name: ClassVar[str] = "nonfinite_values"

    patience_s: float = threshold(2.0, at_least=0)
    """Seconds to wait for ranks that have not reported a step, because one of them may be the culprit."""
    headroom: float = threshold(16.0, at_least=1)
    """The finite values in an overflown output come within this factor of the dtype's largest number."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: all later NaNs follow from the first."""
        view = next((view for view in window.steps if _proofs(view)), None)
        if view is None:
            return
        missing = sorted({rank for earlier in window.steps if earlier.step <= view.step for rank in earlier.missing})
        if missing and window.now_ns - view.first_seen_ns < self.patience_s * 1e9:
            return
        yield _finding(window, view, missing, self.headroom)


def _proofs(view: StepView) -> list[NonfiniteEntry]:
    return [(rank, entry) for rank, entry in view.nonfinite if entry.where != "input" or entry.healthy_steps == 0]


def _of_senders(proofs: list[NonfiniteEntry]) -> list[NonfiniteEntry]:
    """Blame what a pipeline's stage received on its sender: receivers are not named for this step, and the first sender made it.

    For the stages before it, what a stage sends on is its loss.
    """
    given = [(rank, entry) for rank, entry in proofs if entry.received_from >= 0]
    receivers = {rank for rank, _ in given}
    stages = {rank: entry.stage for rank, entry in proofs}
    sent = [
        (
            entry.received_from,
            msgspec.structs.replace(
                entry,
                where="loss",
                name=f"{SENT} {rank}",
                received_from=-1,
                is_received=False,
                stage=stages.get(entry.received_from, -1),
            ),
        )
        for rank, entry in given
        if entry.received_from not in receivers
    ]
    # If stages send to each other in a ring, all have received, and nobody is the first.
    return [*((rank, entry) for rank, entry in proofs if rank not in receivers), *sent] if sent else proofs


def _suspects(proofs: list[NonfiniteEntry]) -> tuple[Where, list[int]]:
    """Return the earliest place at which a NaN was met, and the ranks that had it there."""
    proofs = _of_stage(proofs)
    ranks: dict[Where, set[int]] = {where: {rank for rank, entry in proofs if entry.where == where} for where in WORDS}
    # A NaN in a batch that left its rank's own loss and gradients finite did no harm.
    harmed = ranks["loss"] | ranks["gradient"]
    if harmed:
        ranks["input"] &= harmed
    earliest: Where = next((where for where in LOCAL if ranks[where]), "reduced_gradient")
    # Clipping by the norm of all shards gives one rank's NaN to every shard.
    own = {rank for rank, entry in proofs if not entry.is_from_clip}
    return earliest, sorted(ranks[earliest] & own or ranks[earliest])


def _of_stage(proofs: list[NonfiniteEntry]) -> list[NonfiniteEntry]:
    """Keep, in a pipeline, only the entries of the stage that made the NaN.

    Later stages receive it with their inputs, earlier ones with their gradients. So it is the last stage that received nothing
    bad.
    """
    stages = {rank: entry.stage for rank, entry in proofs if entry.stage >= 0}
    sent = {rank for rank, entry in proofs if entry.is_received and entry.healthy_steps == 0}
    makers = {rank: stage for rank, stage in stages.items() if rank not in sent}
    if len(set(stages.values())) < 2 or not makers:  # noqa: PLR2004 - one stage alone received it from nobody
        return proofs
    last = max(makers.values())
    return [(rank, entry) for rank, entry in proofs if makers.get(rank) == last]


def _is_sent_on(proofs: list[NonfiniteEntry], culprits: list[int]) -> bool:
    return any(entry.is_received and rank not in culprits for rank, entry in proofs)


def _stage_evidence(step: int, proofs: list[NonfiniteEntry], culprits: list[int]) -> Iterator[Evidence]:
    stages = {rank: entry.stage for rank, entry in proofs if entry.stage >= 0}
    if len(set(stages.values())) > 1 and culprits:
        received = sorted({rank for rank, entry in proofs if entry.is_received})
        is_sent = any(entry.name.startswith(SENT) for _, entry in proofs)
        text = (
            f"{ranks_text(received)} received it from the stage before"
            if received
            else "the next stage received it"
            if is_sent
            else "no stage received it with its inputs"
        )
        made = stages.get(culprits[0], -1)
        yield Evidence(
            kind="pipeline",
            summary=f"step {step}: stage {made}, on {ranks_text(culprits)}, is the last whose inputs were finite; {text}; earlier stages have it in their gradients",
            values={"axis": "pipeline", "stage": made, "received": received},
        )


def _finding(window: Window, view: StepView, missing: list[int], headroom: float) -> Finding:
    proofs = _of_senders(_proofs(view))
    where, culprits = _suspects(proofs)
    if where == "loss":
        culprits = _first_of_group(window, view.step, culprits)
    of_culprits = [entry for rank, entry in proofs if rank in culprits]
    is_local = where in LOCAL
    origin = _origin(window, view.step, culprits) if where != "input" else None
    is_overflow = is_overflown(origin, headroom)
    # With a finite loss, a non-finite value in the forward pass may be intended, as a mask of -inf; an overflow is not.
    if where != "loss" and not is_overflow:
        origin, is_overflow = None, None
    tensors, modules = _scope(where, of_culprits, origin)
    facts: dict[str, Any] = {
        "has_nonfinite_input": where == "input",
        # What the next stage of a pipeline received is this stage's output, and counts as its loss.
        "has_nonfinite_loss": any(entry.where == "loss" for entry in of_culprits) or _is_sent_on(proofs, culprits),
        # No entry may also mean that nobody looked: not every framework shows gradients from before the reduction.
        "has_nonfinite_gradient": any(entry.where == "gradient" for entry in of_culprits) or None,
        "is_local_view": is_local,
        "has_origin_module": bool(origin.module) if origin and (origin.replayed or origin.is_by_graph) else None,
        "is_origin_input_finite": origin.is_input_finite if origin and origin.module else None,
        "is_overflow": is_overflow,
        "is_outside_modules": is_outside(origin) if where == "loss" else None,
        "missing_ranks": missing,
        "series": ["loss", "gradient_norm"],
    }
    return Finding(
        detector=NonfiniteValues.name,
        severity="critical",
        first_step=view.step,
        detected_step=view.step,
        ranks=tuple(culprits),
        tensors=tensors,
        modules=modules,
        summary=_summary(view.step, where, culprits, origin, proofs),
        facts=facts,
        evidence=(
            *line_evidence(origin),
            *_nonfinite_evidence(view.step, where, proofs, culprits),
            *_comparison(window, view, proofs, culprits),
            *_stage_evidence(view.step, proofs, culprits),
            *outputs_evidence(origin),
            *_origin_evidence(origin),
            *_overflow_evidence(origin, is_overflow=is_overflow),
            *_clip_evidence(view.step, proofs),
            *_missing_evidence(missing),
        ),
    )


def _origin(window: Window, step: int, culprits: list[int]) -> Origin | None:
    return next(
        (window.tensors.origins[rank, step] for rank in culprits if (rank, step) in window.tensors.origins), None
    )


def _first_of_group(window: Window, step: int, culprits: list[int]) -> list[int]:
    """Return those of the ranks that had it first in the order of the forward pass, if they compute parts of one result.

    The others received it in a reduction.
    """
    census = next(iter(window.models.census.values()), None)
    places = {
        rank: window.tensors.origins[rank, step].place for rank in culprits if (rank, step) in window.tensors.origins
    }
    is_joined = census is not None and any(axis.kind == "tensor" and axis.size > 1 for axis in census.axes)
    if not is_joined or len(places) < len(culprits) or min(places.values(), default=-1) < 0:
        return culprits
    return [rank for rank in culprits if places[rank] == min(places.values())]


def is_outside(origin: Origin | None) -> bool | None:
    """Whether code around the models made it, and no module.

    None if nobody saw the models' outputs and the replay does not tell.
    """
    if origin is None:
        return None
    if origin.are_outputs_finite and not origin.module_class:
        return True
    if origin.are_outputs_finite is False:
        # What happened once need not happen again: a replay that finds nothing does not refute what was seen.
        return False
    if not origin.replayed or origin.num_models > 1:
        return None
    return origin.is_loss_alone or not origin.module_class


def line_evidence(origin: Origin | None) -> Iterator[Evidence]:
    """Yield the line of the script that made the loss, which is what somebody has to look at."""
    if origin is None or is_outside(origin) is not True or not (origin.lines or origin.operation):
        return
    place, _, code = origin.lines[0].partition(": ") if origin.lines else ("", "", "")
    file, _, line = place.partition(" in ")[0].rpartition(":")
    what = f": {origin.operation}" if origin.operation else ""
    also = "".join(f"; also {one.partition(': ')[0]}" for one in origin.lines[1:3])
    said = f"the loss was made at {place}: {code}{also}" if place else "the loss's own graph shows it"
    values = {
        "file": file,
        "line": int(line) if line.isdigit() else None,
        "lines": origin.lines,
        "operation": origin.operation,
    }
    yield Evidence(kind="script_line", summary=f"{said}{what}", values=values)


def _scope(where: Where, entries: list[Nonfinite], origin: Origin | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tensors and modules to name: the batch's, the module of the replay, or gradients in backward order."""
    if where == "loss" or origin is not None:
        return (), (origin.module,) if origin and origin.module else ()
    ordered = sorted((entry for entry in entries if entry.where == where), key=lambda entry: entry.order)
    tensors = tuple(dict.fromkeys(entry.name for entry in ordered))
    if where == "input":
        return tensors, ()
    module = tensors[0].rpartition(".")[0]
    return tensors, (module,) if module else ()


def _summary(step: int, where: Where, culprits: list[int], origin: Origin | None, proofs: list[NonfiniteEntry]) -> str:
    is_clipped = any(entry.is_from_clip for _, entry in proofs)
    is_sent = any(rank in culprits and entry.name.startswith(SENT) for rank, entry in proofs)
    applied = f"The optimizer was given NaN or Inf in the gradients of step {step}"
    if where == "reduced_gradient" and is_clipped:
        return f"{applied}; before they were clipped it was in the shards of {ranks_text(culprits)} only."
    if where == "reduced_gradient":
        return f"{applied}; there was no view from before the reduction, so {ranks_text(culprits)} are all named."
    if where == "loss" and is_sent:
        made = f" by module {origin.module!r}" if origin and origin.module else " in its forward pass"
        return f"{applied}; {ranks_text(culprits)} made it{made} and sent it on to the next stage."
    whom = f"{WORDS[where]} of {ranks_text(culprits)}"
    born = f", made by module {origin.module!r}" if origin and origin.module else ""
    if origin and is_outside(origin):
        line = f" at {origin.lines[0].partition(': ')[0]}" if origin.lines else ""
        born = f", made outside the model's modules{line}{f' ({origin.operation})' if origin.operation else ''}"
    return f"{applied}; before the reduction it was in the {whom}{born}."


def _clip_evidence(step: int, proofs: list[NonfiniteEntry]) -> Iterator[Evidence]:
    given = sorted({rank for rank, entry in proofs if entry.is_from_clip})
    if given:
        summary = (
            f"{ranks_text(given)}, step {step}: gradients were finite until they were clipped by the norm of all shards"
        )
        yield Evidence(kind="nonfinite", summary=summary, values={"clipped_ranks": given})


def _nonfinite_evidence(
    step: int, where: Where, proofs: list[NonfiniteEntry], culprits: list[int]
) -> Iterator[Evidence]:
    """Yield the culprits' tensors where it was first seen, and the loss; tensors that only carried it on are counted."""
    order = tuple(WORDS)
    own = sorted(
        ((rank, entry) for rank, entry in proofs if rank in culprits),
        key=lambda proof: (order.index(proof[1].where), proof[1].order, proof[0]),
    )
    shown = [(rank, entry) for rank, entry in own if entry.where in {where, "loss"}]
    for rank, entry in shown[:MAX_ENTRIES]:
        yield _entry_evidence(step, rank, entry)
    if (num_more := len(shown) - MAX_ENTRIES) > 0:
        summary = f"and {num_more} more tensors of {ranks_text(culprits)} at step {step}"
        yield Evidence(kind="nonfinite", summary=summary, values={"num_more": num_more})
    num_carried = len({entry.name for _, entry in own if entry.where == "gradient"})
    if where in {"input", "loss"} and num_carried:
        summary = (
            f"{ranks_text(culprits)}, step {step}: it reached {num_carried} of the gradients from before the reduction"
        )
        yield Evidence(kind="nonfinite", summary=summary, values={"num_gradients": num_carried})


def _entry_evidence(step: int, rank: int, entry: Nonfinite) -> Evidence:
    held = [f"{count} {kind}" for count, kind in ((entry.nans, "NaN"), (entry.infs, "Inf")) if count]
    counts = listed(held or ["NaN or Inf"])
    is_first = entry.where == "gradient" and entry.order == 0
    first = ", the first gradient that the backward pass makes" if is_first else ""
    loss = entry.name if entry.name.startswith(SENT) else "the loss"
    subject = loss if entry.where == "loss" else f"{SUBJECTS[entry.where]} {entry.name}"
    amount = "was not finite" if entry.where == "loss" else f"held {counts} in {entry.numel} values"
    return Evidence(
        kind="nonfinite",
        summary=f"rank {rank}, step {step}: {subject} {amount}{first}",
        values={
            "rank": rank,
            "step": step,
            "where": entry.where,
            "name": entry.name,
            "nans": entry.nans,
            "infs": entry.infs,
            "numel": entry.numel,
            "order": entry.order,
        },
    )


def _comparison(
    window: Window, view: StepView, proofs: list[NonfiniteEntry], culprits: list[int]
) -> Iterator[Evidence]:
    """Yield what the other ranks had, which is why they are not named."""
    local = {rank for rank, entry in proofs if entry.where in LOCAL}
    others = sorted(window.attached - set(culprits) - set(view.missing))
    finite = [rank for rank in others if rank not in local]
    spread = [rank for rank in others if rank in local]
    if finite and local:
        yield Evidence(
            kind="comparison",
            summary=f"{ranks_text(finite)} had nothing of the kind in batch, loss or own gradients at step {view.step}",
            values={"ranks": finite},
        )
    if spread:
        yield Evidence(
            kind="comparison",
            summary=f"{ranks_text(spread)} had it later in the step than {ranks_text(culprits)}, which {was(culprits)} first",
            values={"ranks": spread},
        )


def _missing_evidence(missing: list[int]) -> Iterator[Evidence]:
    if missing:
        summary = f"{ranks_text(missing)} had not reported by the time this was judged, and may hold an earlier NaN"
        yield Evidence(kind="missing", summary=summary, values={"ranks": missing})


def outputs_evidence(origin: Origin | None) -> Iterator[Evidence]:
    """Yield whether the models' outputs were finite."""
    if origin is not None and origin.are_outputs_finite is not None:
        how = "was finite" if origin.are_outputs_finite else "was not finite itself"
        summary = f"what the model gave back {how} when the backward pass began"
        yield Evidence(kind="outputs", summary=summary, values={"are_outputs_finite": origin.are_outputs_finite})


def _origin_evidence(origin: Origin | None) -> Iterator[Evidence]:
    if origin is None or (not origin.replayed and origin.are_outputs_finite):
        return
    kind, inputs = "origin", "inputs that were not finite"
    if origin.is_input_finite:
        inputs = f"finite inputs of up to {origin.input_absmax:.3g}"
    summary = (
        f"replaying the batch, {origin.module} ({origin.module_class}) was the first to make NaN or Inf, from {inputs}"
    )
    if origin.is_by_graph:
        summary = f"{origin.reason} ({inputs})"
    elif not origin.replayed:
        kind, summary = "missing", f"the step's batch could not be replayed: {origin.reason}"
    elif not origin.module:
        summary = f"replaying the batch made no NaN inside the model: {origin.reason}"
    yield Evidence(
        kind=kind,
        summary=summary,
        values={
            "module": origin.module,
            "module_class": origin.module_class,
            "is_input_finite": origin.is_input_finite,
            "input_absmax": origin.input_absmax,
            "replayed": origin.replayed,
        },
    )


def _overflow_evidence(origin: Origin | None, *, is_overflow: bool | None) -> Iterator[Evidence]:
    if origin is None or is_overflow is None:
        return
    ratio = origin.output_absmax / origin.dtype_max
    held = f"its output held {origin.output_infs} Inf and {origin.output_nans} NaN; the rest reached {origin.output_absmax:.3g}"
    limits = f"{ratio:.2g} of the largest {origin.dtype} ({origin.dtype_max:.4g})"
    sizes = f"input up to {origin.input_absmax:.3g}, weights up to {origin.weight_absmax:.3g}"
    yield Evidence(
        kind="range",
        summary=f"{origin.module}: {held}, {limits}; {sizes}",
        values={
            "dtype": origin.dtype,
            "dtype_max": origin.dtype_max,
            "output_absmax": origin.output_absmax,
            "output_infs": origin.output_infs,
            "output_nans": origin.output_nans,
            "input_absmax": origin.input_absmax,
            "weight_absmax": origin.weight_absmax,
        },
    )
