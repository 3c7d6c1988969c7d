"""Evaluation mode: modules that behave otherwise in training are trained as if they were evaluated.

What it detects
    A model that is called in evaluation mode, gets its gradients from that call and is stepped, for eight steps or more, although it has
    dropout or normalisation that would do something else in training. And modules that are in another mode on some ranks than on the
    others, for three steps or more.

Why it matters
    Dropout drops nothing and statistics stand still: the model overfits, or is normalised by numbers of another data set. On one rank
    alone, its gradients are those of another model. The loss looks ordinary, often better.

False positives
    Submodules that all ranks alike keep in evaluation mode (normalisation frozen for fine-tuning, a frozen encoder) raise nothing, as
    long as the model itself is in training. Evaluations take no step. A model that is called in both modes before its optimizer steps (one
    of two that train against each other, a consistency loss) counts as trained. Without dropout and running statistics the mode
    makes no difference, and nothing is said.

What to do
    Call `model.train()` after every evaluation and before the first step, on every rank (`holter explain trained_in_evaluation_mode`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import names_text, ranks_text
from holter.faults.window import Note, Window
from holter.records import Evidence, Finding, Modes

Told = tuple[Note, Modes]


@dataclass(frozen=True)
class EvaluationMode:
    """Judges the modes of the modules that are trained."""

    name: ClassVar[str] = "evaluation_mode"

    min_steps: int = threshold(8, at_least=2)
    """Number of steps in a row for which a whole model was trained in evaluation mode."""
    min_apart: int = 3
    """Number of steps in a row for which ranks differed."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: ranks that differ, before a model that is wholly in the wrong mode."""
        if not window.series:
            return
        now = window.series[-1].step
        latest: dict[str, dict[int, Told]] = {}
        for note, modes in window.notes_of(Modes):
            latest.setdefault(modes.model, {})[note.rank] = note, modes
        for told in latest.values():
            evaluating = {rank: one for rank, one in told.items() if one[1].evaluating.count}
            if not evaluating:
                continue
            since = max(note.step for note, _ in told.values())
            others = window.attached - set(evaluating)
            first = min(note.step for note, _ in evaluating.values())
            if _do_differ(evaluating, others):
                if now - since >= self.min_apart:
                    yield _apart(window, evaluating, others, first, since + self.min_apart)
                    return
            elif now - since >= self.min_steps and all(_is_whole(modes) for _, modes in evaluating.values()):
                yield _whole(evaluating, first, since + self.min_steps)
                return


def _is_whole(modes: Modes) -> bool:
    return modes.is_whole and modes.evaluating.count == modes.num_sensitive


def _do_differ(evaluating: Mapping[int, Told], others: frozenset[int]) -> bool:
    """Whether ranks differ in mode; ranks with other modules (stages of a pipeline) are not compared."""
    kinds = {(modes.evaluating.count, *modes.evaluating.names) for _, modes in evaluating.values()}
    return bool(others) or (len(kinds) > 1 and len({modes.num_sensitive for _, modes in evaluating.values()}) == 1)


def _apart(
    window: Window, evaluating: Mapping[int, Told], others: frozenset[int], first: int, detected: int
) -> Finding:
    """Make a finding for ranks in different modes.

    It names the ranks in evaluation mode, or the others if most ranks are; without `others`, the ranks with most modules in it.
    """
    ranks = tuple(sorted(evaluating))
    if not others:
        most = max(modes.evaluating.count for _, modes in evaluating.values())
        ranks = tuple(rank for rank in ranks if evaluating[rank][1].evaluating.count == most)
    elif len(evaluating) > len(others):
        ranks = tuple(sorted(others))
    modes = max((modes for _, modes in evaluating.values()), key=lambda each: each.evaluating.count)
    names = tuple(modes.evaluating.names)
    rest = sorted(window.attached - set(evaluating)) or sorted(set(evaluating) - set(ranks))
    return Finding(
        detector=EvaluationMode.name,
        severity="warning",
        first_step=first,
        detected_step=detected,
        ranks=ranks,
        modules=names,
        summary=f"Ranks train in different modes since step {first}: {names_text(names, modes.evaluating.count)} in evaluation mode on some, in training on others.",
        facts={"do_ranks_differ": True, "is_whole_model": modes.is_whole, "is_stepped": True},
        evidence=(
            *_evidence(evaluating),
            Evidence(
                kind="mode",
                summary=f"{ranks_text(rest)} {'trains' if len(rest) == 1 else 'train'} them in training mode",
                values={"ranks": rest},
            ),
        ),
    )


def _whole(evaluating: Mapping[int, Told], first: int, detected: int) -> Finding:
    modes = next(iter(evaluating.values()))[1]
    return Finding(
        detector=EvaluationMode.name,
        severity="warning",
        first_step=first,
        detected_step=detected,
        ranks=tuple(sorted(evaluating)),
        modules=tuple(modes.evaluating.names),
        summary=f"The model has been trained in evaluation mode since step {first}: none of its {modes.num_sensitive} modules that drop or normalise does what it does in training.",
        facts={"do_ranks_differ": False, "is_whole_model": True, "is_stepped": True},
        evidence=tuple(_evidence(evaluating)),
    )


def _evidence(evaluating: Mapping[int, Told]) -> Iterator[Evidence]:
    """Yield one line per distinct report, with all ranks that made it."""
    kinds: dict[tuple[int, str], list[int]] = {}
    for rank, (note, modes) in sorted(evaluating.items()):
        whole = "the model itself and " if modes.is_whole else ""
        text = f"{whole}{modes.evaluating.count} of {modes.num_sensitive} modules for which the mode makes a difference are in evaluation mode in the calls that are trained: {names_text(modes.evaluating.names, modes.evaluating.count)}"
        kinds.setdefault((note.step, text), []).append(rank)
    for (step, text), ranks in kinds.items():
        yield Evidence(
            kind="mode",
            summary=f"{ranks_text(ranks)}, since step {step}: {text}",
            values={"ranks": ranks, "step": step},
        )
