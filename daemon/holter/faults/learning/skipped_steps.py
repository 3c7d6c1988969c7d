"""Skipped steps: the loss scaler lets no step happen.

What it detects
    Steps that the loss scaler skips one after the other, without a single one between them that it lets pass, while its scale
    collapses.

Why it matters
    The job runs at full speed, logs a loss, and its weights do not change. Below a scale of one the gradients are worse off than
    without a scaler, so it does not recover by itself.

False positives
    A scaler that begins far too high skips its first steps until the scale fits: that is what it is for. As long as no step has
    passed and the scale is still large, twice as many skips are needed. One step that passes begins the count again.

What to do
    Find what is not finite in every step (`holter explain every_step_skipped`): a batch, a loss, an overflow in the forward pass. The
    scale is not the cause.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.overflow import is_overflown
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import listed, ranks_text
from holter.faults.window import Note, Window
from holter.records import Evidence, Finding, Origin, Skipped

HEADROOM = 16.0
"""The finite values in an overflown output come within this factor of the dtype's largest number."""


@dataclass(frozen=True)
class SkippedSteps:
    """Judges how many steps in a row a scaler skipped."""

    name: ClassVar[str] = "skipped_steps"

    in_a_row: int = threshold(16, at_least="in_a_row_when_low")
    """Number of skips in a row that are no search for a scale."""
    in_a_row_when_low: int = 12
    """The same, once the scale is below one."""
    searching_scale: float = 4096.0
    """Above this scale, and before any step has passed, a scaler may still be searching for its scale."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the first run of skips that is long enough."""
        by_rank: dict[int, list[tuple[Note, Skipped]]] = {}
        for note, skipped in window.notes_of(Skipped):
            by_rank.setdefault(note.rank, []).append((note, skipped))
        found = {rank: place for rank, said in by_rank.items() if (place := self._first(said)) is not None}
        if not found:
            return
        leader = min(found, key=lambda rank: (by_rank[rank][found[rank]][0].step, rank))
        # A rank that is one skip behind is affected too.
        ranks = tuple(
            sorted(rank for rank, said in by_rank.items() if said[-1][1].in_a_row >= self.in_a_row_when_low - 1)
        )
        origin = next((seen for (rank, _), seen in sorted(window.tensors.origins.items()) if rank in by_rank), None)
        yield _finding(by_rank[leader], found[leader], tuple(sorted({*found, *ranks})), origin)

    def _first(self, said: list[tuple[Note, Skipped]]) -> int | None:
        return next((place for place, (_, skipped) in enumerate(said) if self._is_stuck(skipped)), None)

    def _is_stuck(self, skipped: Skipped) -> bool:
        if skipped.scale < 1 and skipped.in_a_row >= self.in_a_row_when_low:
            return True
        is_searching = skipped.num_taken == 0 and skipped.scale > self.searching_scale
        return skipped.in_a_row >= (2 * self.in_a_row if is_searching else self.in_a_row)


def _finding(
    said: list[tuple[Note, Skipped]], place: int, ranks: tuple[int, ...], origin: Origin | None = None
) -> Finding:
    note, skipped = said[place]
    is_overflow = is_overflown(origin, HEADROOM)
    first_step = _first_of_run(said, place).step
    places = sorted({entry.where for entry in skipped.nonfinite})
    return Finding(
        detector=SkippedSteps.name,
        severity="critical",
        first_step=first_step,
        detected_step=note.step,
        ranks=ranks,
        tensors=() if is_overflow else tuple(dict.fromkeys(entry.name for entry in skipped.nonfinite)),
        modules=(origin.module,) if origin and is_overflow else (),
        summary=f"The loss scaler skips every step since step {first_step}: its scale fell from {skipped.first_scale:g} to {skipped.scale:g}, and no weight changes.",
        facts={
            "is_every_step_skipped": True,
            "has_collapsed_scale": skipped.scale < 1,
            "has_passed_step": skipped.num_taken > 0,
            "has_nonfinite_input": "input" in places if skipped.nonfinite else None,
            "is_overflow": is_overflow,
        },
        evidence=(
            *(_overflow_evidence(origin) if origin and is_overflow else ()),
            *_evidence(note, skipped, ranks, places),
        ),
    )


def _overflow_evidence(origin: Origin) -> Iterator[Evidence]:
    yield Evidence(
        kind="replay",
        summary=f"{origin.module} ({origin.module_class}) was run once more on the batch of a skipped step: of finite inputs, up to {origin.input_absmax:.3g}, "
        f"and weights up to {origin.weight_absmax:.3g} it made {origin.output_infs} values beyond {origin.dtype_max:.4g}, the largest number of its dtype",
        values={"module": origin.module, "input_absmax": origin.input_absmax, "weight_absmax": origin.weight_absmax},
    )


def _first_of_run(said: list[tuple[Note, Skipped]], place: int) -> Note:
    """Return the first step of a run of skips: not every skip is reported, and the count falls when a step was taken."""
    while place and said[place - 1][1].in_a_row and said[place - 1][1].in_a_row < said[place][1].in_a_row:
        place -= 1
    return said[place][0]


def _evidence(note: Note, skipped: Skipped, ranks: tuple[int, ...], places: Sequence[str]) -> Iterator[Evidence]:
    yield Evidence(
        kind="scaler",
        summary=f"{ranks_text(ranks)}: {skipped.in_a_row} steps were skipped in a row, none passed between them; {skipped.num_taken} had passed before",
        values={"in_a_row": skipped.in_a_row, "num_taken": skipped.num_taken, "step": note.step},
    )
    yield Evidence(
        kind="scaler",
        summary=f"the scale is {skipped.scale:g}; it began at {skipped.first_scale:g}, its lowest was {skipped.lowest_scale:g}",
        values={"scale": skipped.scale, "first_scale": skipped.first_scale, "lowest_scale": skipped.lowest_scale},
    )
    if places:
        names = listed(dict.fromkeys(f"{entry.where} {entry.name}" for entry in skipped.nonfinite[:4]))
        yield Evidence(
            kind="nonfinite",
            summary=f"rank {note.rank}: NaN or Inf was in {names} at the last one",
            values={"where": list(places), "loss": skipped.loss},
        )
