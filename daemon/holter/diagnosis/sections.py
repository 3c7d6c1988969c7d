"""What a report says, before any format: headings, and what stands under each. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from holter.diagnosis import blocks, plots
from holter.diagnosis.blocks import Block
from holter.records import Cause, Diagnosis, Evidence

MAX_NAMES = 12
"""Tensors and ranks listed before the rest is counted; the JSON has all."""


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it, before any format."""

    title: str
    paragraphs: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    plots: tuple[Evidence, ...] = ()
    blocks: tuple[Block, ...] = ()


def sections(diagnosis: Diagnosis) -> Iterator[Section]:
    """In the order in which a person wants to know."""
    cause, *others = diagnosis.causes
    if diagnosis.closed_at:
        over = f"Closed {diagnosis.closed_at}: it passed, or the run was started again. What follows is how it was."
        yield Section("It is over", paragraphs=(over,))
    doubts = _of_kind(cause, "strikes")
    if doubts:
        yield Section("Seen before", paragraphs=doubts)
    yield Section("Where", pairs=tuple(_scope(diagnosis, cause)))
    yield Section("What to do", paragraphs=(cause.fix.do,))
    yield Section("Why we think so", items=_proofs(cause))
    if shown := tuple(block for evidence in cause.evidence if (block := blocks.block(evidence)) is not None):
        yield Section("What the ranks were doing", blocks=shown)
    if drawn := tuple(evidence for evidence in cause.evidence if evidence.kind == plots.KIND):
        yield Section("What it looked like", plots=drawn)
    if gaps := _of_kind(cause, "missing"):
        yield Section("Missing evidence", items=gaps)
    if brought := _of_kind(cause, "consequence"):
        yield Section("What it brought about", items=brought)
    yield Section("How it comes about", paragraphs=(cause.mechanism,))
    yield Section("What would refute it", paragraphs=(cause.would_refute,))
    yield Section("About the fix", pairs=_fix(cause))
    if others:
        yield Section("What else it could be", items=tuple(_alternative(other) for other in others))
    yield Section(
        "What holter did",
        paragraphs=(f"{diagnosis.action.directive}: {diagnosis.action.reason}.",),
        pairs=tuple(_record(diagnosis)),
    )


def _of_kind(cause: Cause, kind: str) -> tuple[str, ...]:
    return tuple(_sentence(evidence.summary) for evidence in cause.evidence if evidence.kind == kind)


def _proofs(cause: Cause) -> tuple[str, ...]:
    def is_proof(evidence: Evidence) -> bool:
        return evidence.kind not in {"missing", "consequence", "strikes", plots.KIND, blocks.LAST_COLLECTIVES}

    return tuple(_sentence(evidence.summary) for evidence in cause.evidence if is_proof(evidence))


def _scope(diagnosis: Diagnosis, cause: Cause) -> Iterator[tuple[str, str]]:
    if cause.ranks:
        yield "Ranks", ", ".join(shortened(tuple(map(str, cause.ranks))))
    if diagnosis.first_step >= 0:
        yield "Since step", str(diagnosis.first_step)
    if cause.modules:
        yield "Modules", ", ".join(shortened(cause.modules))
    if cause.tensors:
        yield "Tensors", ", ".join(shortened(cause.tensors))
    if cause.collective:
        yield "Collective", f"{cause.collective.operation} #{cause.collective.sequence} of {cause.collective.group}"
    yield "Confidence", f"{cause.confidence:.2f}, by {cause.basis}"


def _fix(cause: Cause) -> tuple[tuple[str, str], ...]:
    fix = cause.fix
    return (
        ("It changes", fix.changes),
        ("Does not fix", fix.does_not_fix),
        ("Expect", fix.expect),
        ("Verify", fix.verify),
        ("Otherwise", fix.otherwise),
    )


def _alternative(cause: Cause) -> str:
    gap = next((evidence.summary for evidence in reversed(cause.evidence) if evidence.kind == "missing"), "")
    text = (
        f"{cause.cause} ({cause.confidence:.2f}, by {cause.basis}). It would be refuted by this: {cause.would_refute}"
    )
    return f"{text} Missing: {gap}." if gap and cause.confidence < 0.70 else text  # noqa: PLR2004 - the public bound of INTERFACE


def _record(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    if diagnosis.action.checkpoint:
        yield "Checkpoint", diagnosis.action.checkpoint
    if healthy := diagnosis.action.last_healthy:
        yield "Last healthy", f"checkpoint of step {healthy.step}: {healthy.path}"
    if diagnosis.action.exit_code is not None:
        yield (
            "To go on",
            "deal with the cause, then `holter resume RUN`: it says how to load what was kept, and lets the run start",
        )
    yield "Incident", f"{diagnosis.id} of run {diagnosis.run_id}"
    yield "Opened", f"{diagnosis.opened_at}, {diagnosis.detected_after_s:.1f} s after it happened"


def ranks_text(ranks: tuple[int, ...]) -> str:
    """`rank 1`, `ranks 0, 3`, with the rest of very many counted."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(shortened(tuple(map(str, ranks))))


def shortened(names: tuple[str, ...]) -> list[str]:
    """The first few, and how many more there are."""
    more = len(names) - MAX_NAMES
    return [*names[:MAX_NAMES], f"and {more} more"] if more > 0 else list(names)


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."
