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


def scaled(*factors: tuple[float, float]) -> list[Finding]:
    series = tuple(StepNumbers(step, 0, {"clip.factor": spread(*pair)}) for step, pair in enumerate(factors))
    return list(ShardClipping().judge(made_window(series=series)))


def test_factors_that_follow_each_shard_s_norm_are_a_local_clip_though_no_call_was_seen() -> None:
    (finding,) = scaled((0.2, 0.4), (0.3, 0.35), (0.25, 0.5), (0.2, 0.3))
    assert (0, 1) == finding.ranks
    assert rank_causes(finding)[0].cause == "clip_on_local_shard"


def test_a_factor_that_one_rank_applies_at_every_step_is_its_own_doing() -> None:
    (finding,) = scaled(*[(0.5, 1.0)] * 4)
    assert (0,) == finding.ranks
    assert rank_causes(finding)[0].cause == "uneven_clipping"


def test_one_factor_for_all_ranks_raises_nothing() -> None:
    assert scaled((0.2, 0.2), (0.3, 0.3), (0.25, 0.25), (1.0, 1.0)) == []
