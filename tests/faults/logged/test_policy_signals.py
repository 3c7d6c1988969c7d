"""What a policy's script logs: terms without gradient, lost advantages, ratios off one, a sudden fall of entropy; and what only looks like it."""

import random
from collections.abc import Callable, Mapping

from holter.diagnosis import rank_causes
from holter.faults import Window
from holter.faults.logged.importance_ratio import ImportanceRatio
from holter.faults.logged.inactive_terms import InactiveTerms
from holter.faults.logged.kl_term import KlTerm
from holter.faults.logged.policy_entropy import PolicyEntropy
from holter.faults.logged.reward_spread import RewardSpread
from holter.faults.logged.reward_trend import RewardTrend
from holter.faults.numerics.loss_terms import LossTerms
from holter.faults.numerics.loss_trend import LossTrend
from holter.faults.window import Spread, StepNumbers
from holter.records import Finding
from made_up import made_window

Series = Mapping[str, Callable[[int], float]]


def window_of(series: Series, num: int = 60) -> Window:
    def numbers(step: int) -> dict[str, Spread]:
        made = {name: make(step) for name, make in series.items()}
        return {name: Spread(value, value, value, 0, 0, 2) for name, value in made.items()}

    return made_window(series=tuple(StepNumbers(step, step, numbers(step)) for step in range(num)))


def terms(active: Mapping[str, float], value: Callable[[str, int], float]) -> dict[str, Callable[[int], float]]:
    made: dict[str, Callable[[int], float]] = {}
    for name, flag in active.items():
        made[f"carries_gradient.{name}"] = lambda _, flag=flag: flag  # type: ignore[misc]
        made[f"log.{name}"] = lambda step, name=name: value(name, step)  # type: ignore[misc]
    return made


def causes(findings: list[Finding]) -> list[str]:
    return [rank_causes(finding)[0].cause for finding in findings]


def test_a_term_without_gradient_beside_others_is_named() -> None:
    window = window_of(terms({"loss_terms.pg": 1, "loss_terms.balance": 0}, lambda _, step: 0.1 + step))
    (finding,) = InactiveTerms().judge(window)
    assert "'balance' carries no gradient" in finding.summary
    assert causes([finding]) == ["auxiliary_loss_inactive"]
    window = window_of(terms({"actor/pg_loss": 1, "actor/kl_loss": 0}, lambda _, step: 0.1 + step))
    assert causes(list(InactiveTerms().judge(window))) == ["kl_inactive"]


def test_detached_copies_totals_and_placeholders_are_silent() -> None:
    def parts(name: str, step: int) -> float:
        return {"loss_terms.all": 3.0 + step, "loss_terms.a": 1.0, "loss_terms.b": 2.0 + step}.get(name, 1.0)

    for active in (
        {"loss_terms.a": 0, "loss_terms.b": 0},
        {"loss_terms.total": 1, "loss_terms.a": 0},
        {"loss_terms.all": 1, "loss_terms.a": 0, "loss_terms.b": 0},
    ):
        assert list(InactiveTerms().judge(window_of(terms(active, parts)))) == []
    placeholder = terms({"loss_terms.a": 1, "loss_terms.aux": 0}, lambda name, _: float(name == "loss_terms.a"))
    assert list(InactiveTerms().judge(window_of(placeholder))) == []


def test_advantages_of_zero_beside_rewards_that_differ_are_named() -> None:
    rewards: Series = {
        "log.rewards_std": lambda _: 0.5,
        "rewards.num_groups": lambda _: 4,
        "rewards.num_flat_groups": lambda _: 0,
    }
    (finding,) = RewardSpread().judge(
        window_of({**rewards, "advantages.largest": lambda _: 0.0, "log.advantages_std": lambda _: 0.0})
    )
    assert "exactly zero" in finding.summary
    assert causes([finding]) == ["zero_advantages"]
    sound = {**rewards, "advantages.largest": lambda _: 1.0, "log.advantages_std": lambda _: 1.0}
    assert list(RewardSpread().judge(window_of(sound))) == []


def ratios(mean: Callable[[int], float], num: int = 60) -> list[str]:
    series: Series = {"ratio.first_mean_deviation": mean, "ratio.first_deviation": lambda step: 1.5 * mean(step)}
    return causes(list(ImportanceRatio().judge(window_of(series, num))))


def test_ratios_that_are_off_from_the_first_on_and_ratios_that_move_away() -> None:
    assert ratios(lambda _: 0.08) == ["train_inference_mismatch"]
    assert ratios(lambda step: 0.03 * step) == ["stale_rollout_weights"]


def test_ratios_of_rounding_of_several_updates_and_of_a_clip_are_silent() -> None:
    assert ratios(lambda _: 0.02) == []
    assert ratios(lambda step: 0.1 * (step % 8), 200) == []
    assert ratios(lambda step: min(0.02 * step, 0.25), 300) == []


def test_a_sudden_fall_of_entropy_counts_unless_the_reward_rose_with_it() -> None:
    noise = random.Random(1)  # noqa: S311 - noise, no secret

    def fallen(paid: float, swing: float = 0.0) -> list[str]:
        series: Series = {
            "log.entropy": lambda step: 3.0 if step < 25 else 0.2,
            "log.vocabulary": lambda _: 32.0,
            "log.rewards": lambda step: noise.gauss(0.2 if step < 25 else paid + swing * (step % 3 - 1), 0.02),
        }
        return causes(list(PolicyEntropy().judge(window_of(series))))

    assert fallen(0.2) == ["entropy_collapse"]
    assert fallen(0.9) == []
    # All or nothing by turns: on average more, and no knowledge of the answers.
    assert fallen(0.35, swing=0.2) == ["entropy_collapse"]


def test_a_reward_that_falls_at_once_after_a_dozen_logs_is_told_and_one_that_wanders_is_not() -> None:
    noise = random.Random(2)  # noqa: S311 - noise, no secret

    def judged(reward: Callable[[int], float]) -> list[str]:
        values = [reward(step) + noise.gauss(0, 0.02) for step in range(60)]
        return causes(list(RewardTrend().judge(window_of({"log.train/reward": values.__getitem__}))))

    assert judged(lambda step: 0.12 if step < 18 else -0.05) == ["reward_collapse"]
    rising = [0.10, 0.07, 0.16, 0.12, 0.22, 0.09, 0.3, 0.13, 0.25, 0.19]
    swinging: Series = {
        "log.reward": lambda step: rising[step % 10] + step / 400 if step < 25 else 0.006 + step / 20_000
    }
    assert causes(list(RewardTrend().judge(window_of(swinging)))) == ["reward_collapse"]
    assert judged(lambda step: 0.12 - 0.004 * step) == []
    assert judged(lambda step: 0.12 if step < 18 else -0.05 + 0.005 * (step - 18)) == []
    assert judged(lambda step: 0.12 if step < 6 else -0.05) == []
    walk = [0.0]
    for _ in range(400):
        walk.append(walk[-1] + noise.gauss(0, 0.05))
    for begin in range(0, 340, 10):
        assert judged(lambda step, begin=begin: walk[begin + step]) == []  # type: ignore[misc]


def test_a_single_log_above_does_not_hide_a_collapse() -> None:
    series: Series = {
        "log.entropy": lambda step: 3.0 if step < 25 else 0.3 if step == 45 else 0.01,
        "log.vocabulary": lambda _: 32.0,
    }
    assert causes(list(PolicyEntropy().judge(window_of(series)))) == ["entropy_collapse"]


def test_a_policys_loss_that_rises_with_its_distance_is_no_divergence() -> None:
    """On-policy, with normalised advantages: the surrogate is rounding, the loss is the KL term."""
    noise = random.Random(2)  # noqa: S311 - noise, no secret
    series: Series = {
        "loss": lambda step: 1e-8 + 0.002 * step,
        "log.loss_terms.policy": lambda _: noise.gauss(0, 1e-8),
        "log.loss_terms.kl": lambda step: 0.002 * step,
    }
    for named in (series, {name.replace("policy", "first"): make for name, make in series.items()}):
        window = window_of(named, 150)
        assert list(LossTrend().judge(window)) == []
        assert list(LossTerms().judge(window)) == []


def test_a_loss_that_was_trained_down_and_rises_is_still_a_divergence() -> None:
    series: Series = {"loss": lambda step: 2.0 - 0.03 * step if step < 50 else 4.0}
    assert causes(list(LossTrend().judge(window_of(series, 150)))) == ["loss_divergence"]


def test_a_reference_that_is_far_before_the_first_update_is_a_remark() -> None:
    window = window_of({"log.train/kl": lambda step: 2.4 + 0.001 * step})
    (finding,) = KlTerm().judge(window)
    assert ("info", 0) == (finding.severity, finding.first_step)
    assert ["wrong_reference"] == causes([finding])


def test_a_kl_of_nothing_but_rounding_is_no_kl() -> None:
    """A reference that is renewed after each step; and a policy that has only just set out from it."""
    noise = random.Random(3)  # noqa: S311 - noise, no secret

    def judged(kl: Callable[[int], float]) -> list[str]:
        series: Series = {
            "log.grpo/kl": kl,
            "log.loss_terms.kl": lambda step: 0.05 * kl(step),
            "gradient_norm": lambda _: 1.0,
            "learning_rate": lambda _: 1e-3,
        }
        return causes(list(KlTerm().judge(window_of(series))))

    assert judged(lambda step: 0.01 * step if step < 24 else noise.gauss(0, 1e-8)) == ["kl_inactive"]
    assert judged(lambda _: noise.gauss(0, 1e-8)) == ["kl_inactive"]
    assert judged(lambda step: 2e-10 * step**2) == []
    assert judged(lambda step: 0.01 * (step % 12)) == []
