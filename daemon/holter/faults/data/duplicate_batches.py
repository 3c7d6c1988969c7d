"""Duplicate batches: replicas are fed the same data.

What it detects
    Ranks whose batches have the same signature at every one of several steps in a row, while the batches change from step to step, in
    a job whose model is replicated over all ranks.

Why it matters
    Replicas that read the same batches compute the same gradients; averaging them changes nothing. The job uses as many machines as it
    has ranks and learns at the speed of one; each rank goes through all of the data in an epoch. The loss curve looks ordinary.

False positives
    Ranks that share one model by tensor or pipeline parallelism read the same batch on purpose: unless the wrapper says that the model is
    replicated over all ranks, nothing is said. One batch repeated for ever (synthetic data, overfitting on purpose) proves nothing,
    nor does a coincidence at a single step. A comparison of kernels or seeds that feeds replicas alike on purpose is reported.

What to do
    Give each rank its own part of the data: a DistributedSampler, or accelerate's `prepare` on the loader (`holter explain
    duplicate_data_across_ranks`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from holter.faults.data.loader_passes import is_replicated_everywhere, passes, trained
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import cap, listed, ranks_text
from holter.faults.window import StepView, Window
from holter.records import Evidence, Finding

MAX_GROUPS_SHOWN = 4


@dataclass(frozen=True)
class DuplicateBatches:
    """Judges whether replicas were fed the same batches, step after step."""

    name: ClassVar[str] = "duplicate_batches"

    min_steps: int = threshold(4, at_least=2)  # Once is a coincidence.
    """Number of steps in a row, of those with signatures, at which the same ranks must have shared their batch."""
    min_signatures: int = 3
    """Number of different batches that there must have been among those steps."""
    max_steps: int = 1024
    """Number of newest steps in which the beginning is looked for."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: all groups of ranks that share their batches."""
        views = _comparable(window, self.max_steps)
        if len(views) < self.min_steps or not _shared(views[-1]) or not is_replicated_everywhere(window):
            return
        groups, run = self._alike(views)
        if groups and len({signature for view in run for signature in view.batches}) >= self.min_signatures:
            yield _finding(window, groups, run)

    def _alike(self, views: Sequence[StepView]) -> tuple[list[tuple[int, ...]], list[StepView]]:
        """Return groups of ranks that shared their batch at each of the newest steps, and those steps, oldest first."""
        run = list(views[-self.min_steps :])
        groups = _shared(run[-1])
        for view in run[:-1]:
            groups = _refined(groups, view)
        if not groups:
            return [], []
        for view in reversed(views[: -self.min_steps]):
            if _refined(groups, view) != groups:
                break
            run.insert(0, view)
        return groups, run


def _comparable(window: Window, max_steps: int) -> list[StepView]:
    """Return the newest steps at which all ranks that ever have a signature have one, oldest first."""
    newest = list(islice((view for view in reversed(window.steps) if view.batches and not view.missing), max_steps))
    sizes = [sum(map(len, view.batches.values())) for view in newest]
    most = max(sizes, default=0)
    return [view for view, size in zip(newest, sizes, strict=True) if size == most][::-1]


def _shared(view: StepView) -> list[tuple[int, ...]]:
    return sorted(ranks for ranks in view.batches.values() if len(ranks) > 1)


def _refined(groups: Sequence[tuple[int, ...]], view: StepView) -> list[tuple[int, ...]]:
    """Return what remains of the groups after ranks whose batches differ at this step are separated."""
    signature_of = {rank: signature for signature, ranks in view.batches.items() for rank in ranks}
    left: list[tuple[int, ...]] = []
    for group in groups:
        parts: dict[int, list[int]] = {}
        for rank in group:
            parts.setdefault(signature_of[rank], []).append(rank)
        left += [tuple(part) for part in parts.values() if len(part) > 1]
    return sorted(left)


def _finding(window: Window, groups: Sequence[tuple[int, ...]], run: Sequence[StepView]) -> Finding:
    ranks = tuple(sorted(rank for group in groups for rank in group))
    shards = _shards(window)
    first, last = run[0].step, run[-1].step
    return Finding(
        detector=DuplicateBatches.name,
        severity="warning",
        first_step=first,
        detected_step=last,
        ranks=ranks,
        summary=f"{_groups_text(groups)} trained on the same batches at every step that was compared since step {first}.",
        facts={
            "is_shared_at_every_step": True,
            "is_model_replicated": True,
            "is_loader_cut": max(shards.values()) > 1 if shards else None,
            "compared_ranks": sorted(window.attached),
        },
        evidence=(
            _run_evidence(groups, run),
            Evidence(
                kind="census",
                summary=f"the model that is trained is replicated over all {window.world_size} ranks",
                values={"world_size": window.world_size},
            ),
            *_loader_evidence(window, shards),
        ),
    )


def _shards(window: Window) -> dict[int, int]:
    """Return the number of parts into which each rank's training loader cuts the data."""
    return {one.rank: one.begin.num_shards for one in trained(passes(window))}


def _groups_text(groups: Sequence[tuple[int, ...]]) -> str:
    shown = [ranks_text(group) for group in groups[:MAX_GROUPS_SHOWN]]
    more = [f"{len(groups) - MAX_GROUPS_SHOWN} more groups"] if len(groups) > MAX_GROUPS_SHOWN else []
    text = listed([*shown, *more])
    return cap(text) + (", each group alike," if len(groups) > 1 else "")


def _run_evidence(groups: Sequence[tuple[int, ...]], run: Sequence[StepView]) -> Evidence:
    num = len({signature for view in run for signature in view.batches})
    return Evidence(
        kind="batch",
        summary=(
            f"at {len(run)} steps compared, {run[0].step} to {run[-1].step}, the batches of {ranks_text(groups[0])} had the same "
            f"signature each time; {num} different batches were seen in them"
        ),
        values={
            "steps": [view.step for view in run],
            "num_signatures": num,
            "groups": [list(group) for group in groups],
        },
    )


def _loader_evidence(window: Window, shards: Mapping[int, int]) -> Iterator[Evidence]:
    samplers = {one.rank: one.begin.sampler for one in trained(passes(window))}
    if shards:
        rank = min(shards)
        cut = (
            "does not cut the data set into parts"
            if shards[rank] <= 1
            else f"cuts the data set into {shards[rank]} parts"
        )
        yield Evidence(
            kind="loader",
            summary=f"rank {rank}'s loader ({samplers[rank] or 'no sampler'}) {cut}",
            values={"rank": rank, "num_shards": shards[rank], "sampler": samplers[rank]},
        )
