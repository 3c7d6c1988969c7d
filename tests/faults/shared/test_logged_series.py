"""The detectors of reinforcement learning's logged series: each fires on its fault and is quiet on the nearest healthy run."""

import math
import random
from collections.abc import Callable

import pytest

from holter.diagnosis import top_cause
from holter.faults import Detector
from holter.faults.logged.adapter_norm import AdapterNorm
from holter.faults.logged.importance_ratio import ImportanceRatio
from holter.faults.logged.kl_term import KlTerm
from holter.faults.logged.output_variety import OutputVariety
from holter.faults.logged.policy_entropy import PolicyEntropy
from holter.faults.logged.reward_trend import RewardTrend
from holter.faults.shared.logged_series import halves, logged, plain, trailing
from holter.faults.window import Note, Spread, StepNumbers, Window
from holter.records import Finding, Swapped
from made_up import made_window

Series = dict[str, Callable[[int], float]]
TRAINING: Series = {"gradient_norm": lambda _: 0.5, "learning_rate": lambda _: 1e-4}


def window(names: Series, logs: int = 100, notes: tuple[Note, ...] = ()) -> Window:
    series = tuple(
        StepNumbers(step, 0, {name: Spread(make(step), 0, 0, 0, 0, 1) for name, make in (TRAINING | names).items()})
        for step in range(logs)
    )
    return made_window(series=series, notes=notes)


def judge(detector: Detector, names: Series, logs: int = 100) -> list[Finding]:
    return list(detector.judge(window(names, logs)))


def noise(step: int, size: float = 0.05) -> float:
    return random.Random(step).gauss(0, size)  # noqa: S311 - test data


def ratios(largest: Callable[[int], float]) -> Series:
    """A rank tells the largest distance from one and the mean one."""
    return {"ratio.first_deviation": largest, "ratio.first_mean_deviation": lambda step: largest(step) / 5}


VOCABULARY: Series = {"log.vocabulary": lambda _: 1000.0}
TOP = math.log(1000)

FAULTS: list[tuple[str, Detector, Series, int]] = [
    ("entropy_collapse", PolicyEntropy(), VOCABULARY | {"log.entropy": lambda step: 2.0 if step < 50 else 0.01}, 50),
    ("entropy_collapse", PolicyEntropy(), {"log.train/entropy": lambda step: 0.5 * 0.9**step}, 9),
    ("entropy_explosion", PolicyEntropy(), VOCABULARY | {"log.entropy": lambda step: 1.0 if step < 50 else 0.95 * TOP}, 50),
    ("kl_inactive", KlTerm(), {"log.kl": lambda _: 0.0, "log.loss_terms.kl": lambda _: 0.0}, 0),
    ("kl_sign_flipped", KlTerm(), {"log.kl": lambda step: 0.01 * step, "log.loss_terms.kl": lambda step: -0.001 * step}, 1),
    ("reward_collapse", RewardTrend(), {"log.reward": lambda step: (0.8 if step < 60 else 0.2) + noise(step, 0.02)}, 60),
    ("train_inference_mismatch", ImportanceRatio(), ratios(lambda step: 0.6 + noise(step)), 0),
    ("clamped_adapter_norm", AdapterNorm(), {"log.lora_norm": lambda step: min(1.0, step / 20), "log.max_lora_norm": lambda _: 1.0}, 19),
    ("degenerate_outputs", OutputVariety(), {"log.commonest_token_share": lambda step: min(0.95, 0.1 + step / 50)}, 36),
]  # fmt: skip

HEALTHY: list[tuple[str, Detector, Series]] = [
    ("falls as it learns", PolicyEntropy(), VOCABULARY | {"log.entropy": lambda step: 0.3 + 2 * 0.95**step}),
    ("begins untrained", PolicyEntropy(), VOCABULARY | {"log.entropy": lambda step: TOP * (0.99 - step / 1000)}),
    ("was always low", PolicyEntropy(), {"log.entropy": lambda _: 0.005}),
    ("vocabulary unknown", PolicyEntropy(), {"log.entropy": lambda step: 1.0 + step}),
    ("equal at first", KlTerm(), {"log.kl": lambda step: 0.0 if step < 2 else 1e-9 * step}),
    ("grows at once", KlTerm(), {"log.kl": lambda step: 0.0 if step < 1 else 3.0 + step}),
    ("dropout at first", KlTerm(), {"log.kl": lambda step: 0.08 + 0.01 * step}),
    ("one outlier at first", KlTerm(), {"log.kl": lambda step: 4.0 if step < 1 else 0.01 * step}),
    ("term of the right sign", KlTerm(), {"log.kl": lambda step: 0.01 * step, "log.loss_terms.kl": lambda step: 0.001 * step}),
    ("penalty in the reward", KlTerm(), {"log.kl": lambda step: 0.01 * step, "log.kl_penalty": lambda step: -0.01 * step}),
    ("not trained", KlTerm(), {"log.kl": lambda _: 0.0, "gradient_norm": lambda _: 0.0}),
    ("rises", RewardTrend(), {"log.reward": lambda step: step / 100 + noise(step, 0.1)}),
    ("noise", RewardTrend(), {"log.reward": lambda step: 0.5 + noise(step, 0.3)}),
    ("a dip that comes back", RewardTrend(), {"log.reward": lambda step: 0.2 if 50 < step < 60 else 0.8 + noise(step)}),
    ("held-out", RewardTrend(), {"log.eval/reward": lambda step: 0.8 if step < 60 else 0.2}),
    ("half precision", ImportanceRatio(), ratios(lambda step: 0.05 + abs(noise(step)))),
    ("several updates", ImportanceRatio(), ratios(lambda step: 0.5 if step % 4 else 0.001)),
    ("below", AdapterNorm(), {"log.lora_norm": lambda _: 0.5, "log.lora_norm_limit": lambda _: 1.0}),
    ("no limit", AdapterNorm(), {"log.lora_norm": lambda _: 0.5}),
    ("gradient clipping", AdapterNorm(), {"log.lora_grad_norm": lambda _: 1.0, "log.lora_grad_norm_clip": lambda _: 1.0}),
    ("ordinary text", OutputVariety(), {"log.commonest_token_share": lambda step: 0.06 + step / 1e4}),
    ("padding", OutputVariety(), {"log.commonest_token_share": lambda _: 0.85}),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "detector", "names", "step"), FAULTS, ids=[f"{row[0]}-{row[3]}" for row in FAULTS])
def test_it_fires_on_the_fault(cause: str, detector: Detector, names: Series, step: int) -> None:
    (finding,) = judge(detector, names)
    assert top_cause(finding) == cause
    assert finding.severity == "warning"
    assert finding.first_step == pytest.approx(step, abs=1)
    assert finding.facts["series"]
    assert finding.evidence


@pytest.mark.parametrize(("detector", "names"), [row[1:] for row in HEALTHY], ids=[row[0] for row in HEALTHY])
def test_it_is_quiet_on_the_nearest_healthy_run(detector: Detector, names: Series) -> None:
    assert judge(detector, names) == []


@pytest.mark.parametrize("detector", [row[1] for row in FAULTS], ids=lambda detector: detector.name)
def test_a_few_logs_are_not_enough(detector: Detector) -> None:
    names = next(row[2] for row in FAULTS if row[1] is detector)
    assert judge(detector, names, logs=7) == []


def test_a_zero_without_a_term_of_the_loss_is_a_remark() -> None:
    (finding,) = judge(KlTerm(), {"log.kl": lambda _: 0.0})
    assert finding.severity == "info"


def test_a_zero_that_a_swap_explains_is_left_to_it() -> None:
    swapped = Swapped(distance=0.1, is_input_equal=True, is_output_equal=True, num_times=3)
    seen = window({"log.kl": lambda _: 0.0, "log.loss_terms.kl": lambda _: 0.0}, notes=(Note(0, 3, 0, swapped),))
    assert list(KlTerm().judge(seen)) == []


def test_names_are_known_whatever_they_were_put_under() -> None:
    assert plain("log.train/Reward_std") == "reward_std"
    assert plain("log.eval/reward_std") == plain("log.val_reward_std") == ""
    found = logged(window({"log.a/x": float, "log.y": float}, logs=3), lambda name: name == "x")
    assert found == {"log.a/x": [(0, 0.0), (1, 1.0), (2, 2.0)]}


def test_runs_and_halves() -> None:
    points = [(step, float(step)) for step in range(6)]
    assert list(trailing(points, lambda value: value > 3)) == points[4:]
    assert list(trailing(points, lambda value: value >= 0)) == points
    assert list(halves(points)) == [1.0, 4.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PolicyEntropy(min_logs=1), r"policy_entropy\.min_logs must be at least 2, got 1"),
        (lambda: KlTerm(min_logs=1), r"kl_term\.min_logs must be at least 2, got 1"),
        (lambda: RewardTrend(stretch=1), r"reward_trend\.stretch must be at least 5, got 1"),
        (lambda: ImportanceRatio(min_deviation=0), r"importance_ratio\.min_deviation must be positive, got 0"),
        (lambda: AdapterNorm(share=2), r"adapter_norm\.share must be above 0 and at most 1, got 2"),
        (lambda: OutputVariety(max_share=1), r"output_variety\.max_share must be between 0 and 1, got 1"),
    ],
)
def test_a_wrong_threshold_is_named(make: Callable[[], Detector], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_policy_that_becomes_plain_noise_is_found_though_it_began_near_it() -> None:
    fault = {"log.entropy": lambda step: 2.4 if step < 40 else 2.772, "log.vocabulary": lambda _: 16.0}
    (finding,) = judge(PolicyEntropy(), fault)
    assert (40, "entropy_explosion") == (finding.first_step, top_cause(finding))
    assert judge(PolicyEntropy(), fault | {"log.entropy": lambda _: 2.75}) == []
