"""Rollout weights: the weights that a script generates with are not those that it trains.

What it detects
    What `watch.log(rollout=...)` was given, tensor by tensor against the live weights: some tensors are the live ones and others
    are not, at two logs in a row (a push that leaves some out); trained tensors are missing in it; none has been renewed for two
    logs or more while the live ones moved; all are something else altogether. That they are the live ones in another dtype is
    information.

Why it matters
    The policy is judged by samples of another one. Rewards look plausible, ratios drift, and what is learned is an echo of old
    weights.

False positives
    A sampler that is one update behind on purpose (asynchronous rollouts) is renewed at every log, and silent. Engines that run in
    bf16 while the trainer keeps fp32 are how it is done. Adapters that are merged when they are pushed make other tensors of those
    they change: then nothing is said about either. An engine with names of its own cannot be compared.

What to do
    Push all weights from the module that the optimizer holds, and compare after the push (`holter explain stale_rollout_weights`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import named, ranks_text
from holter.faults.window import Note, Window
from holter.records import Evidence, Finding, Rollout

ADAPTER = ("lora_", "adapter", "ia3_")
"""Words in the names of tensors that are merged into others."""


@dataclass(frozen=True)
class RolloutWeights:
    """Compares the weights that generate with those that train."""

    name: ClassVar[str] = "rollout_weights"

    min_logs: int = threshold(2, at_least=1)
    """Number of logs in a row that must show it."""
    max_behind: int = threshold(1, at_least=0)
    """Number of logs that the generating weights may be behind; asynchronous rollouts are one behind."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding, for all ranks that show it, with the evidence of the first."""
        told: dict[int, list[tuple[Note, Rollout]]] = {}
        for note, rollout in window.notes_of(Rollout):
            told.setdefault(note.rank, []).append((note, rollout))
        shown = {rank: run for rank, notes in told.items() if (run := self._run(notes))}
        if shown:
            rank = min(shown, key=lambda one: (shown[one][0][0].step, one))
            yield _finding(tuple(sorted(shown)), shown[rank])
        elif told:
            yield from _cast(told)

    def _run(self, notes: list[tuple[Note, Rollout]]) -> list[tuple[Note, Rollout]]:
        """Return the newest logs that show it, if they are enough."""
        run: list[tuple[Note, Rollout]] = []
        for note, rollout in reversed(notes):
            if not self._is_wrong(rollout):
                break
            run.insert(0, (note, rollout))
        return run if len(run) >= self.min_logs else []

    def _is_wrong(self, rollout: Rollout) -> bool:
        if _is_merged(rollout):
            return False
        num_current = rollout.num_equal + rollout.cast.count
        is_partly = num_current > 0 and rollout.num_moved > 0 and bool(rollout.stale.count or rollout.other.count)
        is_old = rollout.behind > self.max_behind
        is_another = num_current == 0 and rollout.stale.count == 0 and rollout.other.count > 0
        return bool(rollout.missing.count) or is_partly or is_old or is_another


def _is_merged(rollout: Rollout) -> bool:
    """Whether adapters are missing because they are merged into other tensors, as many or fewer."""
    are_adapters = bool(rollout.missing.names) and all(
        any(word in name for word in ADAPTER) for name in rollout.missing.names
    )
    return are_adapters and 0 < rollout.other.count <= rollout.missing.count


def _finding(ranks: tuple[int, ...], run: list[tuple[Note, Rollout]]) -> Finding:
    (first, _), (last, newest) = run[0], run[-1]
    wrong = {"missing": newest.missing, "as they were before": newest.stale, "something else": newest.other}
    known = {what: names for what, names in wrong.items() if names.count}
    num_current = newest.num_equal + newest.cast.count
    said = "; ".join(f"{names.count} {what} ({named(names.names)})" for what, names in known.items())
    age = f", up to {newest.behind} logs old" if newest.behind else ""
    tensors = tuple(dict.fromkeys(name for names in known.values() for name in names.names))
    return Finding(
        detector=RolloutWeights.name,
        severity="warning",
        first_step=first.step,
        detected_step=last.step,
        ranks=ranks,
        tensors=tensors,
        summary=f"The weights that {ranks_text(ranks)} {'generates' if len(ranks) == 1 else 'generate'} with are not those that are trained: of {num_current + sum(names.count for names in known.values())} tensors {said}{age}.",
        facts={
            "is_compared": True,
            "is_ever_one": False,
        },
        evidence=(
            Evidence(
                kind="rollout_weights",
                summary=f"rank {last.rank} at steps {first.step} to {last.step}, {len(run)} logs in a row: {num_current} current, {said}{age}",
                values={
                    "num_current": num_current,
                    "missing": newest.missing.count,
                    "stale": newest.stale.count,
                    "other": newest.other.count,
                    "behind": newest.behind,
                },
            ),
        ),
    )


def _cast(told: dict[int, list[tuple[Note, Rollout]]]) -> Iterator[Finding]:
    newest = {rank: notes[-1] for rank, notes in told.items() if notes[-1][1].cast.count and len(notes) > 1}
    if not newest:
        return
    rank = min(newest)
    note, rollout = newest[rank]
    yield Finding(
        detector=RolloutWeights.name,
        severity="info",
        first_step=told[rank][0][0].step,
        detected_step=note.step,
        ranks=tuple(sorted(newest)),
        tensors=tuple(rollout.cast.names),
        summary=f"{rollout.cast.count} tensors are generated with in {rollout.cast_to}, and trained in another dtype: log-probabilities of both differ a little.",
        facts={"is_compared": True, "is_cast": True, "is_ever_one": None},
        evidence=(
            Evidence(
                kind="rollout_weights",
                summary=f"rank {rank}: {rollout.cast.count} tensors are the live ones as {rollout.cast_to}, {rollout.num_equal} are the same bits",
                values={"cast": rollout.cast.count, "to": rollout.cast_to},
            ),
        ),
    )
