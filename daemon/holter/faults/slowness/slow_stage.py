"""Slow stage: a stage of a pipeline computes longer than it used to, and all others wait for it.

What it detects
    A stage whose own forward and backward passes take, on the host, at least twice what they took before, for twenty-four steps and five
    seconds at least, while the other stages take what they took. If one micro-batch alone has most of it, that one is named.

Why it matters
    Every stage of a pipeline waits for the slowest one, in every micro-batch. Stages have no collective in common at which the late one
    would show.

False positives
    Stages that have more to do from the start are not called slow, nor are steps that became longer on all of them (longer sequences,
    evaluation, a busy host), nor is a stage if layers are trained, or are others, from then on. On a device the host's times say
    nothing, and nothing is judged.

What to do
    Look for what else runs on the named rank's host and for work that its stage alone began at that step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, NamedTuple

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding, StageTimes


class StageReport(NamedTuple):
    """The times of one stage in some steps, and the last of these steps."""

    step: int
    times: StageTimes

    @property
    def passes(self) -> dict[tuple[str, int], float]:
        """Seconds of each (pass, micro-batch)."""
        both = ("forward", self.times.forward_s), ("backward", self.times.backward_s)
        return {(which, number): took for which, every in both for number, took in enumerate(every)}

    @property
    def work_s(self) -> float:
        """Seconds of a whole step."""
        return sum(self.passes.values())


@dataclass(frozen=True)
class SlowStage:
    """Compares the stages' own times with their earlier ones."""

    name: ClassVar[str] = "slow_stage"

    ratio: float = threshold(2.0, above=1)
    """The stage must take this many times its earlier time."""
    others_ratio: float = threshold(1.4, above=1)
    """The other stages count as unchanged up to this many times their earlier time."""
    min_excess_s: float = threshold(0.025, at_least=0)
    min_share_of_step: float = threshold(0.1, at_least=0)
    min_before: int = threshold(2, at_least=1)
    """Number of earlier reports, of eight steps each."""
    min_after: int = threshold(3, at_least=1)
    min_span_s: float = threshold(5.0, at_least=0)
    one_micro_batch: float = 0.7
    """Share of the excess from which on a single micro-batch is responsible."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the stage with the largest excess, if it is late now."""
        told: dict[int, list[StageReport]] = {}
        for note, times in window.notes_of(StageTimes):
            told.setdefault(note.rank, []).append(StageReport(note.step, times))
        step_s = median([spread.mean for _, spread in window.values("seconds")] or [0.0])
        late = {rank: since for rank, reports in told.items() if (since := self._since(reports, step_s)) is not None}
        rank = max(late, key=lambda one: _excess_s(told[one], late[one]), default=None)
        if rank is None or _is_unfrozen(window, told[rank], late[rank]):
            return
        if self._are_others_same(told, rank, late[rank]):
            yield self._finding(rank, told[rank], late[rank], step_s)

    def _since(self, reports: Sequence[StageReport], step_s: float) -> int | None:
        """Return the index of the report since which a stage has been slow without a break until now.

        None if it is not slow, or not surely yet.
        """
        for since in range(self.min_before, len(reports) - self.min_after + 1):
            before_s = median(one.work_s for one in reports[:since])
            later = [one.work_s for one in reports[since:]]
            least_s = max(
                self.ratio * before_s, before_s + self.min_excess_s, before_s + self.min_share_of_step * step_s
            )
            span_s = sum(one.times.num_steps for one in reports[since:]) * step_s
            if min(later) >= least_s:
                return since if span_s >= self.min_span_s else None
        return None

    def _are_others_same(self, told: Mapping[int, list[StageReport]], rank: int, since: int) -> bool:
        begin = told[rank][since].step
        for other, reports in told.items():
            before = [one.work_s for one in reports if one.step < begin]
            later = [one.work_s for one in reports if one.step >= begin]
            if other != rank and before and later:
                limit_s = max(self.others_ratio * median(before), median(before) + self.min_excess_s)
                if median(later) > limit_s and reports[0].times.stage != told[rank][0].times.stage:
                    return False
        return len(told) > 1

    def _finding(self, rank: int, reports: Sequence[StageReport], since: int, step_s: float) -> Finding:
        before, later = reports[:since], reports[since:]
        excess = _excess(before, later)
        whole_s, stage = sum(excess.values()), reports[0].times.stage
        (which, number), most_s = max(excess.items(), key=lambda item: item[1])
        is_one = most_s >= self.one_micro_batch * whole_s and len(excess) > 2  # noqa: PLR2004 - forward and backward of one
        where = f", nearly all of it in the {which} pass of micro-batch {number}" if is_one else ""
        first = before[-1].step + 1
        was_s = median(one.work_s for one in before)
        return Finding(
            detector=SlowStage.name,
            severity="warning",
            first_step=first,
            detected_step=later[-1].step,
            ranks=(rank,),
            summary=(
                f"Stage {stage} of the pipeline (rank {rank}) computes {was_s + whole_s:.3f} s a step since about step {first}, "
                f"{was_s:.3f} s before{where}; all other stages wait for it."
            ),
            facts={"has_other_work": False, "late_ranks": [rank]},
            evidence=(
                Evidence(
                    kind="stage_times",
                    summary=f"stage {stage}: {whole_s * 1e3:.0f} ms a step more than before, of {step_s * 1e3:.0f} ms; the other stages compute as long as they did",
                    values={
                        "stage": stage,
                        "micro_batch": number if is_one else None,
                        "excess_s": {f"{name} {index}": round(took, 4) for (name, index), took in excess.items()},
                        "axis": "stages",
                    },
                ),
            ),
        )


def _is_unfrozen(window: Window, reports: Sequence[StageReport], since: int) -> bool:
    """Whether stages got more to do then: trained layers have a backward pass, and so do the layers behind them."""
    begin = reports[since - 1].step - reports[since - 1].times.num_steps
    near = range(begin, reports[since].step + 1)
    return any(
        change.step in near and change.what in {"requires_grad", "new", "shape", "dtype"}
        for change in window.models.changes
    )


def _excess(before: Sequence[StageReport], later: Sequence[StageReport]) -> dict[tuple[str, int], float]:
    """Return how much longer than before each pass of each micro-batch takes."""
    names = later[-1].passes
    then = {name: median([one.passes[name] for one in before if name in one.passes] or [0.0]) for name in names}
    now = {name: median(one.passes.get(name, 0.0) for one in later) for name in names}
    return {name: now[name] - then[name] for name in names}


def _excess_s(reports: Sequence[StageReport], since: int) -> float:
    return sum(_excess(reports[:since], reports[since:]).values())
