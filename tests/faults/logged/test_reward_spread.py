"""Fires when no group has any spread for many logs; quiet on some flat groups, contradiction and evaluation."""

from collections.abc import Callable

import pytest

from holter.diagnosis import rank_causes
from holter.faults.logged.reward_spread import RewardSpread
from holter.faults.window import Spread, StepNumbers
from holter.records import Finding
from made_up import made_window

FLAT, GROUPS = "rewards.num_flat_groups", "rewards.num_groups"


def judge(*, logs: int = 20, every: int = 1, **names: Callable[[int], float]) -> list[Finding]:
    series = []
    for step in range(logs * every):
        values = {name.replace("__", "/"): make(step) for name, make in names.items()} if step % every == 0 else {}
        numbers = {name: Spread(value, value, value, 0, 0, 1) for name, value in values.items()}
        series.append(StepNumbers(step, 0, numbers | {"loss": Spread(1, 1, 1, 0, 1, 2)}))
    window = made_window(series=tuple(series))
    return list(RewardSpread().judge(window))


def test_groups_without_any_spread_are_seen_after_eight_logs() -> None:
    flat = {GROUPS: lambda _: 4.0, FLAT: lambda _: 4.0}
    assert judge(logs=7, **flat) == []
    (finding,) = judge(logs=8, **flat)
    assert (finding.severity, finding.first_step, finding.detected_step) == ("warning", 0, 7)
    (cause,) = rank_causes(finding)
    assert (cause.cause, cause.confidence) == ("zero_advantages", 0.95)
    assert FLAT in finding.facts["series"]
    assert any("rewards.num_flat_groups: 4 at 8 logs" in e.summary for e in finding.evidence)


def test_it_says_since_when() -> None:
    (finding,) = judge(**{GROUPS: lambda _: 4.0, FLAT: lambda step: 4.0 if step >= 9 else 1.0}, every=5)
    assert finding.first_step == 10
    assert finding.facts["is_from_start"] is False


@pytest.mark.parametrize("name", ["log.frac_reward_zero_std", "log.train__frac_reward_zero_std"])
def test_the_frameworks_own_figure_is_read(name: str) -> None:
    (finding,) = judge(**{name: lambda _: 1.0, "log.reward": lambda _: 0.0}, every=3)
    assert rank_causes(finding)[0].confidence == 0.90
    assert "log.reward" in finding.facts["series"]


def test_groups_that_differ_from_each_other_do_not_help() -> None:
    (finding,) = judge(**{GROUPS: lambda _: 4.0, FLAT: lambda _: 4.0, "log.rewards_std": lambda _: 0.5})
    assert finding.facts["is_counted"] is True


def test_a_deviation_of_exactly_zero_is_read() -> None:
    assert len(judge(**{"log.reward_std": lambda _: 0.0})) == 1
    assert len(judge(**{"log.advantages_std": lambda _: 0.0})) == 1


@pytest.mark.parametrize(
    "names",
    [
        {GROUPS: lambda _: 4.0, FLAT: lambda _: 3.0},
        {GROUPS: lambda _: 4.0, FLAT: lambda step: 4.0 if step % 7 else 3.0},
        {"log.frac_reward_zero_std": lambda _: 0.9},
        {"log.reward_std": lambda _: 1e-6},
        {"log.reward_std": lambda _: 0.0, "log.advantages_std": lambda _: 0.9},
        {GROUPS: lambda _: 4.0, FLAT: lambda _: 4.0, "log.advantages_std": lambda _: 0.9},
        {"log.eval__reward_std": lambda _: 0.0},
        {"log.rewards__format__std": lambda _: 0.0},
        {"log.reward": lambda _: 0.0},
    ],
    ids=[
        "most",
        "now and then",
        "TRL",
        "tiny",
        "contradiction",
        "returns vary",
        "evaluation",
        "one of several rewards",
        "no reward yet",
    ],
)
def test_healthy_rewards_raise_nothing(names: dict[str, Callable[[int], float]]) -> None:
    assert judge(**names) == []


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"reward_spread\.min_logs must be at least 1, got 0"):
        RewardSpread(min_logs=0)


def test_advantages_without_deviation_beside_rewards_that_differ_are_lost() -> None:
    (finding,) = judge(**{"log.advantages_std": lambda _: 0.0, "log.rewards_std": lambda _: 0.2})
    assert finding.facts["is_lost_after_rewards"]
    assert "zero_advantages" == rank_causes(finding)[0].cause
