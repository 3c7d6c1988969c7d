"""Variance of nothing: a variance or deviation was taken over one sample or none.

What it detects
    torch's warning that the degrees of freedom of a `var` or `std` are zero or less, with the file and line that called it and the module
    whose forward pass was running.

Why it matters
    The unbiased variance of one value is 0 / 0. What is normalised by it becomes NaN, and what only compares with it (a halting rule, a
    weight by uncertainty) silently takes one side for ever.

False positives
    A last batch of one sample may bring it once an epoch: it is reported then too, because the NaN is real. Code that masks the result
    is reported; silence the warning there, or pass `correction=0`.

What to do
    Go to the named line (`holter explain variance_without_samples`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.wording import ranks_text
from holter.faults.window import Note, Window
from holter.records import Evidence, Finding, ScriptWarning


@dataclass(frozen=True)
class VarianceOfNothing:
    """Reads torch's own warning."""

    name: ClassVar[str] = "variance_of_nothing"

    text: str = "degrees of freedom is <= 0"
    """Part of the warning's text."""

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: all places in the code that caused it."""
        notes = [(note, warning) for note, warning in window.notes_of(ScriptWarning) if self.text in warning.text]
        if notes:
            yield _finding(notes)


def _finding(notes: list[tuple[Note, ScriptWarning]]) -> Finding:
    ranks = tuple(sorted({note.rank for note, _ in notes if note.rank >= 0}))
    step = min(note.step for note, _ in notes)
    modules = tuple(sorted({warning.module for _, warning in notes if warning.module}))
    places = sorted({warning.where for _, warning in notes})
    inside = f" in module {modules[0]!r}" if modules else ""
    where = f"{places[0]} and {len(places) - 1} more places" if len(places) > 1 else places[0]
    return Finding(
        detector=VarianceOfNothing.name,
        severity="warning",
        first_step=step,
        detected_step=step,
        ranks=ranks,
        modules=modules,
        summary=f"A variance was taken over one sample or none at {where}{inside}{_at(step, ranks)}.",
        facts={"is_warned": True, "is_module_known": bool(modules), "has_samples": False, "where": places},
        evidence=tuple(
            Evidence(
                kind="warning",
                summary=f"{_at(note.step, (note.rank,) if note.rank >= 0 else ()).removeprefix(', ') or 'the log'}: {warning.text.strip().splitlines()[0][:200]}",
                values={"rank": note.rank, "step": note.step, "where": warning.where, "module": warning.module},
            )
            for note, warning in notes[:4]
        ),
    )


def _at(step: int, ranks: tuple[int, ...]) -> str:
    """Return step and ranks in words, as far as they are known."""
    return (f", step {step}" if step >= 0 else "") + (f", on {ranks_text(ranks)}" if ranks else "")
