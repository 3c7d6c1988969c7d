"""Buffer values: a table that the model computes with is empty, constant, or too coarse.

What it detects
    Buffers that hold frequencies or positions (a geometric or arithmetic progression, or by name) in bf16 or fp16; and buffers that
    by their name or module must vary and are zero, constant, not finite, or garbage, on every rank.

Why it matters
    Buffers are not trained, so nothing corrects them. Rotary frequencies in bf16 make distant positions alike; a table that was
    lost in loading makes all of them alike. The loss falls nevertheless, as far as a model without positions can take it.

False positives
    Statistics of normalisation layers, masks, counters, caches and token types are constant or narrow by nature and raise nothing. Tables
    of sines and cosines lose little in bf16 once they are made, and raise nothing. A buffer that is wrong on some ranks only is found by
    `buffer_divergence`.

What to do
    Keep such buffers in fp32 through every cast, and compute anew those that no state dict holds after `to_empty` (`holter explain
    buffer_precision_loss`, `lost_buffer`).
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.structure import distinct_censuses
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import listed, names_text, ranks_text
from holter.faults.window import Window
from holter.records import Evidence, Finding, Mark, TensorEntry

SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11}
NUM_POSITIONS = 2048
FINE = re.compile(r"(^|_)(inv_?freqs?|freqs?|frequenc(y|ies)|thetas?|timesteps?|positions?|alphas_cumprod|sigmas)$")
"""Last words of names whose values need range or resolution."""
VARIED = re.compile(
    r"(^|_)(inv_?freqs?|freqs?|freqs_cis|frequenc(y|ies)|position_ids|positions?|cos|sin|cos_cached|sin_cached|timesteps?|pos_emb|pe)$"
)
"""Last words of names whose values cannot be equal."""
PLAIN = re.compile(r"running_|num_batches|mask|token_type|cache$|_ids_mask|bias$|slopes?$|alibi|scale$|step$|count")
"""Names of buffers that are constant, masked or exact by nature."""
POSITIONAL_CLASS = re.compile(r"rotary|rope|position|sinusoid|timestep", re.IGNORECASE)
TABLES = re.compile(r"(^|_)(cos|sin)(_cached)?$")
"""Tables that may be constant: with a single position, all cosines are one and all sines zero."""
WORDS = {
    Mark.ZERO: "all zero",
    Mark.CONSTANT: "all equal",
    Mark.NONFINITE: "not finite",
    Mark.HUGE: "beyond all measure",
}


@dataclass(frozen=True)
class BufferValues:
    """Judges the buffers of the census."""

    name: ClassVar[str] = "buffer_values"

    min_numel: int = threshold(2, at_least=2)  # One value cannot vary.
    """Number of elements below which a buffer holds no progression."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: lost tables before coarse ones."""
        is_everyone_here = len(window.attached) >= window.world_size or bool(window.steps)
        if not is_everyone_here or not set(window.models.census) >= window.attached - {
            ended.rank for ended in window.processes.exits
        }:
            return
        lost = self._on_all(window, _is_lost)
        if lost:
            yield _finding(window, lost, is_lost=True)
            return
        coarse = self._on_all(window, _is_coarse)
        if coarse:
            yield _finding(window, coarse, is_lost=False)

    def _on_all(self, window: Window, is_bad: Callable[[TensorEntry], bool]) -> list[TensorEntry]:
        """Return buffers that are bad in every census, as the first one has them."""
        distinct = distinct_censuses(window, None)
        found: list[TensorEntry] = []
        for number, census in enumerate(distinct):
            bad = [e for e in census.entries if e.is_buffer and math.prod(e.shape) >= self.min_numel and is_bad(e)]
            names = {entry.name for entry in bad}
            found = bad if number == 0 else [entry for entry in found if entry.name in names]
        return found


def _last_word(entry: TensorEntry) -> str:
    return entry.name.rpartition(".")[2].lower()


def _is_coarse(entry: TensorEntry) -> bool:
    name = _last_word(entry)
    if entry.dtype not in SIGNIFICANT_BITS or PLAIN.search(name):
        return False
    is_repeating = 0 <= entry.num_distinct < math.prod(entry.shape)
    return entry.pattern == "geometric" or (entry.pattern == "arithmetic" and is_repeating) or bool(FINE.search(name))


def _is_lost(entry: TensorEntry) -> bool:
    name = _last_word(entry)
    marks = Mark(entry.marks) & (Mark.CONSTANT | Mark.ZERO | Mark.NONFINITE | Mark.HUGE)
    if not marks or entry.dtype == "bool" or PLAIN.search(name):
        return False
    if TABLES.search(name) and math.prod(entry.shape[:-1]) < 2:  # noqa: PLR2004 - one position
        return False
    is_computed = not entry.is_persistent and bool(POSITIONAL_CLASS.search(entry.module_class))
    return bool(VARIED.search(name)) or is_computed


def num_told_apart(dtype: str, num_positions: int = NUM_POSITIONS) -> int:
    """Return how many of the positions 0, 1, 2 ... the dtype can distinguish: 641 of 2048 in bfloat16."""
    return len({_rounded(float(position), SIGNIFICANT_BITS[dtype]) for position in range(num_positions)})


def _rounded(value: float, bits: int) -> float:
    """Return the nearest number with so many significant bits; ties go to even, as in Python's own rounding."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)


def _finding(window: Window, entries: list[TensorEntry], *, is_lost: bool) -> Finding:
    names = tuple(entry.name for entry in entries)
    step = window.steps[0].step if window.steps else 0
    dtypes = sorted({entry.dtype for entry in entries})
    what = "lost its values" if is_lost else f"is held in {listed(dtypes)}, which is too coarse for it"
    proofs = _lost_evidence(entries) if is_lost else _coarse_evidence(entries, dtypes)
    return Finding(
        detector=BufferValues.name,
        severity="warning",
        first_step=step,
        detected_step=step,
        ranks=tuple(sorted(window.models.census)),
        tensors=names,
        summary=f"{names_text(names)} {what}.",
        facts={
            "is_narrow": None if is_lost else True,
            "is_progression": None if is_lost else any(entry.pattern for entry in entries),
            "is_named_so": any((VARIED if is_lost else FINE).search(_last_word(entry)) for entry in entries),
            "is_implausible": is_lost,
            "is_in_state_dict": all(entry.is_persistent for entry in entries),
            "is_on_all_ranks": True,
        },
        evidence=(*proofs, _everywhere(window)),
    )


def _lost_evidence(entries: list[TensorEntry]) -> Iterator[Evidence]:
    for entry in entries[:4]:
        marks = listed(words for mark, words in WORDS.items() if entry.marks & mark)
        kept = "" if entry.is_persistent else "; no state dict holds it"
        yield Evidence(
            kind="census",
            summary=f"{entry.name} ({entry.module_class or 'buffer'}, {math.prod(entry.shape)} values of {entry.dtype}) is {marks}{kept}",
            values={"name": entry.name, "marks": entry.marks, "is_persistent": entry.is_persistent},
        )


def _coarse_evidence(entries: list[TensorEntry], dtypes: list[str]) -> Iterator[Evidence]:
    for entry in entries[:4]:
        numel = math.prod(entry.shape)
        kind = f"a progression ({entry.pattern})" if entry.pattern else "a table by its name"
        distinct = f", {entry.num_distinct} of them different" if entry.num_distinct >= 0 else ""
        yield Evidence(
            kind="census",
            summary=f"{entry.name} is {kind} of {numel} values in {entry.dtype}{distinct}",
            values={"name": entry.name, "dtype": entry.dtype, "numel": numel, "num_distinct": entry.num_distinct},
        )
    for dtype in dtypes:
        apart, bits = num_told_apart(dtype), SIGNIFICANT_BITS[dtype]
        radians = NUM_POSITIONS * 2.0 ** -(bits + 1)
        yield Evidence(
            kind="precision",
            summary=f"{dtype} has {bits} significant bits: it tells {apart} of the positions 0 to {NUM_POSITIONS - 1} apart, and an angle at the last of them is off by up to {radians:.2g} radians",
            values={"dtype": dtype, "num_told_apart": apart, "num_positions": NUM_POSITIONS},
        )


def _everywhere(window: Window) -> Evidence:
    ranks = sorted(window.models.census)
    return Evidence(kind="comparison", summary=f"the same on {ranks_text(ranks)}", values={"ranks": ranks[:64]})
