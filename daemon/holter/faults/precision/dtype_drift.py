"""Dtype drift: a tensor's dtype is not what it was earlier in the run.

What it detects
    Parameters and buffers whose dtype changed after the first step, from the ranks' own census, on which ranks and at which step.

Why it matters
    A cast in the middle of a run changes what every later step can represent. The optimizer's state keeps its own dtype, a
    checkpoint saves the new one, and a resumed run differs from the one that wrote it.

False positives
    A conversion before the first step is set-up and raises nothing. A script that changes precision on purpose in mid-run is
    reported.

What to do
    Find the cast: `.half()`, `.to(...)` for an evaluation or an export that worked on the live model, a checkpoint loaded with
    `assign=True` (`holter explain dtype_changed`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import names_text, ranks_text
from holter.faults.window import CensusChange, Window
from holter.records import Evidence, Finding

MAX_TENSORS = 64
"""Number of tensors that a finding names; the rest are counted."""
BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7, "float8_e4m3fn": 3, "float8_e5m2": 2}
"""Number of bits of the mantissa."""


@dataclass(frozen=True)
class DtypeDrift:
    """Judges changes of dtypes in the census."""

    name: ClassVar[str] = "dtype_drift"

    min_step: int = threshold(1, at_least=0)
    """Changes before this step belong to the setup."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the first step at which a dtype changed."""
        changes = [c for c in window.models.changes if c.what == "dtype" and c.step >= self.min_step]
        if changes:
            step = min(change.step for change in changes)
            yield _finding(window, [change for change in changes if change.step == step])


def _finding(window: Window, changes: list[CensusChange]) -> Finding:
    step = changes[0].step
    ranks = tuple(sorted({change.rank for change in changes}))
    names = list(dict.fromkeys(change.name for change in changes))
    kinds = sorted({(change.before, change.after) for change in changes})
    casts = names_text(f"{before} to {after}" for before, after in kinds)
    is_narrower = any(BITS.get(after, 0) < BITS.get(before, 0) for before, after in kinds)
    others = sorted(window.attached - set(ranks))
    evidence = [
        Evidence(
            kind="census",
            summary=f"{ranks_text(ranks)}, step {step}: {len(names)} tensors went from {casts}: {names_text(names)}",
            values={"step": step, "num_tensors": len(names), "casts": [list(kind) for kind in kinds]},
        )
    ]
    if others:
        evidence.append(
            Evidence(
                kind="comparison",
                summary=f"{ranks_text(others)} reported no such change at this step",
                values={"ranks": others},
            )
        )
    return Finding(
        detector=DtypeDrift.name,
        severity="warning",
        first_step=step,
        detected_step=step,
        ranks=ranks,
        tensors=tuple(names[:MAX_TENSORS]),
        summary=f"{len(names)} tensors changed their dtype at step {step} ({casts}) on {ranks_text(ranks)}.",
        facts={
            "has_dtype_changed": True,
            "is_before_first_step": step == 0,
            "is_narrower": is_narrower,
            "is_on_all_ranks": not others,
        },
        evidence=tuple(evidence),
    )
