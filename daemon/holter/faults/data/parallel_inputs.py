"""Parallel inputs: ranks that compute parts of one result are fed different batches.

What it detects
    Ranks of a tensor-parallel group (they hold cut parameters along an axis that no `fully_shard` reduces over) whose models were
    called with batches of other content, at several steps in a row. Ranks that differ on another axis of the mesh are not compared.

Why it matters
    Each rank multiplies its part of a weight with another batch, and the parts are added up as if they belonged together. Nothing
    raises, and the loss often still falls.

False positives
    A script that hands each rank its own part of the sequence, before the model is called, would be reported: let the model cut it, as
    `SequenceParallel` does. Batches without a signature are not compared.

What to do
    Seed the sampler and the augmentation by the data-parallel place of a rank (`mesh["dp"].get_local_rank()`), not by its global rank,
    or broadcast the batch within the group.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import cap, ranks_text
from holter.faults.window import StepView, Window
from holter.records import Evidence, Finding, MeshAxis

SHOWN = 3


@dataclass(frozen=True)
class ParallelInputs:
    """Compares the batches of ranks that must be fed the same."""

    name: ClassVar[str] = "parallel_inputs"

    min_steps: int = threshold(3, at_least=2)  # Once is a coincidence of clocks or a skipped batch.
    """Number of steps in a row at which the ranks of a group must have had different batches."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding."""
        census = next(iter(window.models.census.values()), None)
        axes = [axis for axis in census.axes if axis.kind == "tensor" and axis.size > 1] if census else []
        if not axes:
            return
        looked = [(view, _parted(view, axes)) for view in window.steps if view.batches and not view.missing]
        run: list[tuple[StepView, list[tuple[int, ...]]]] = []
        for view, groups in reversed(looked):
            if not groups:
                break
            run.insert(0, (view, groups))
        if len(run) >= self.min_steps:
            yield _finding(run, axes)


def _parted(view: StepView, axes: list[MeshAxis]) -> list[tuple[int, ...]]:
    """Return the groups in which every rank's batch has a signature, and not all have the same one."""
    signature_of = {rank: signature for signature, ranks in view.batches.items() for rank in ranks}
    groups: dict[int, list[int]] = {}
    for rank in sorted(signature_of):
        groups.setdefault(_origin(rank, axes), []).append(rank)
    size = 1
    for axis in axes:
        size *= axis.size
    return [
        tuple(ranks) for ranks in groups.values() if len(ranks) == size and len({signature_of[r] for r in ranks}) > 1
    ]


def _origin(rank: int, axes: list[MeshAxis]) -> int:
    """Return the first rank of this rank's group."""
    for axis in axes:
        rank -= rank // axis.stride % axis.size * axis.stride
    return rank


def _odd(view: StepView, group: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that differ from the majority of their group; all of them if there is no majority."""
    shares: Mapping[int, list[int]] = {
        signature: [rank for rank in ranks if rank in group] for signature, ranks in view.batches.items()
    }
    largest = max(shares.values(), key=len)
    return tuple(rank for rank in group if rank not in largest) if 2 * len(largest) > len(group) else group


def _finding(run: list[tuple[StepView, list[tuple[int, ...]]]], axes: list[MeshAxis]) -> Finding:
    (first, groups), last = run[0], run[-1][0]
    names = "+".join(axis.name for axis in axes)
    ranks = tuple(sorted({rank for group in groups for rank in _odd(first, group)}))
    shown = ", ".join(ranks_text(group) for group in groups[:SHOWN])
    return Finding(
        detector=ParallelInputs.name,
        severity="warning",
        first_step=first.step,
        detected_step=last.step,
        ranks=ranks,
        summary=f"{cap(ranks_text(ranks))} compute parts of one result along the axis {names} and have been fed different batches since step {first.step}.",
        facts={"are_inputs_different": True, "is_repeated": True},
        evidence=(
            Evidence(
                kind="batches",
                summary=f"at {len(run)} steps in a row, {first.step} to {last.step}, the batches of {shown} were not the same, though these ranks "
                f"compute parts of one result along the axis {names}",
                values={"axis": names, "subgroups": [list(group) for group in groups[:SHOWN]], "num_steps": len(run)},
            ),
        ),
    )
