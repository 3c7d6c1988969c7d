"""Fires on shards clipped by their own norms; quiet on one norm for all, on whole gradients, and below the limit."""

from holter.diagnosis import rank_causes
from holter.faults.replicas.shard_clipping import ShardClipping
from holter.faults.window import Spread, StepNumbers
from holter.records import Finding
from made_up import made_window


def spread(low: float, high: float) -> Spread:
    return Spread((low + high) / 2, low, high, 0, 1, 2)


def judge(low: float, high: float, *, limit: float = 1.0, is_sharded: float = 1.0, steps: int = 5) -> list[Finding]:
    numbers = {
        "clip.norm": spread(low, high),
        "clip.limit": spread(limit, limit),
        "clip.is_sharded": spread(is_sharded, is_sharded),
    }
    series = tuple(StepNumbers(step, 0, numbers) for step in range(steps))
    return list(ShardClipping().judge(made_window(series=series)))


def test_shards_that_are_clipped_by_their_own_norms() -> None:
    (finding,) = judge(1.4, 2.1)
    assert (finding.first_step, finding.ranks) == (0, (0, 1))
    assert rank_causes(finding)[0].cause == "clip_on_local_shard"
    assert "1.4 on rank 0 and 2.1 on rank 1, with a limit of 1" in finding.evidence[0].summary


def test_one_norm_for_all_shards_raises_nothing() -> None:
    assert judge(2.1, 2.1 * (1 + 1e-6)) == []


def test_norms_of_whole_gradients_raise_nothing_here() -> None:
    assert judge(1.4, 2.1, is_sharded=0.0) == []


def test_a_limit_that_is_never_reached_changes_nothing() -> None:
    assert judge(1.4, 2.1, limit=5.0) == []


def test_a_few_steps_are_not_enough() -> None:
    assert judge(1.4, 2.1, steps=2) == []
